"""One pool under one leadership: children tended, plan made and carried out, status told.

`reconcile` may be called whenever something changed; `tick` on the loop's grid, since plans count
ticks. Never both at once for one pool. A failure is told in the status and tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from chairlift_operator.cluster import ActionResult
from chairlift_operator.control_loop import ControlLoop, Tick
from chairlift_operator.decisions import Action, Condition
from chairlift_operator.kube.acting import Actor
from chairlift_operator.kube.api import ApiError
from chairlift_operator.kube.children import Owner, classes_of
from chairlift_operator.kube.gateways import GatewayReader
from chairlift_operator.kube.keeping import Keeper
from chairlift_operator.kube.objects import PoolObjects
from chairlift_operator.kube.observing import Observer
from chairlift_operator.kube.owning import Foreign
from chairlift_operator.kube.pacing import is_due
from chairlift_operator.kube.polling import (
    NAMELESS,
    PrometheusReader,
    counted_thresholds_ms,
    lacks_url,
    prometheus_url,
)
from chairlift_operator.kube.quota_seen import pool_seen
from chairlift_operator.kube.reporting import Reporter, event_reason
from chairlift_operator.kube.resting import is_at_rest, stirs
from chairlift_operator.kube.rolling import Roller, RolloutState
from chairlift_operator.kube.settings import LOOK_S, REST_S
from chairlift_operator.kube.spec_reading import SpecReader
from chairlift_operator.kube.status import StatusInput, from_json, status_of
from chairlift_operator.kube.tending import Tender
from chairlift_operator.kube.tokens import Tokens
from chairlift_operator.kube.tools import Tools
from chairlift_operator.kube.watching import PoolKey
from chairlift_operator.memory import Memory
from chairlift_operator.plan import Plan
from chairlift_operator.snapshot import GatewaySnapshot, Snapshot
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import SpecError
from chairlift_protocol.wire import RequestClass

logger = logging.getLogger(__name__)

Json = dict[str, Any]


class PoolController:
    """Implements `cluster.Cluster` for its own control loop."""

    def __init__(self, body: Json, term: int, tools: Tools) -> None:
        metadata = body["metadata"]
        key: PoolKey = (metadata["namespace"], metadata["name"])
        self.uid = metadata["uid"]
        self._key, self._tools, self._term = key, tools, term
        self._body = body
        owner = Owner(self.uid, tools.settings.operator)
        self._objects = PoolObjects(key, tools.stores)
        gateways = GatewayReader(self._objects, tools.session, tools.listening, tools.now_s)
        self._observer = Observer(self._objects, tools.session, tools.now_s, gateways)
        self._notes: list[tuple[str, str]] = []
        self._tender = Tender(self._objects, tools.api, tools.settings, owner, self._note)
        self._actor = Actor(
            self._objects, self._observer, self._tender, tools.api, tools.now_s, self._note
        )
        self._roller = Roller(self._objects, self._tender, self._actor, self._busy)
        self._keeper = Keeper(self._objects, tools.api, owner, tools.now_s, tools.hardware)
        self._tokens = Tokens(self._objects, tools.api, owner, tools.now_s)
        before = from_json(body.get("status"))
        self._reporter = Reporter(tools.api, *key, self.uid, before, tools.now_s)
        self._loop: ControlLoop | None = None
        self._last: Tick | None = None
        self._trouble: str | None = None
        self._refused: tuple[str, ...] = ()
        self._is_anothers = False
        self._reader = SpecReader()
        self._told_quotas: Condition | None = None
        self._settled: tuple[InferencePool, int] | None = None
        self._idle_since_s = tools.now_s()
        self._rest: Snapshot | None = None

    async def reconcile(self, body: Json) -> None:
        """Children, drains and replacements, as far as they can go now."""
        pool = self._accepted(body)
        if pool is not None and self._settled == (pool, self._objects.num_changes):
            if self._quotas() != self._told_quotas:
                await self._report(None)
            return  # our own status came back
        self._rest = None
        is_done = pool is not None and await self._tried(self._reconcile(pool))
        if is_done or self._trouble is not None:
            await self._report(None)

    async def tick(self, body: Json) -> None:
        """A whole look, or one at the gateways while nothing else can have changed."""
        if self._rest is not None and await self._rests_on(self._rest):
            return
        pool = self._accepted(body)
        if pool is None or not await self._tried(self._reconcile(pool)):
            await self._report(None)
            return
        if self._loop is None:
            memory = Memory.start(self._term, self._keeper.prior(pool))
            self._loop = ControlLoop(pool, self, memory)
        self._loop.pool = pool
        tick = self._last = await self._loop.tick()
        self._tools.on_plan(tick.plan)
        self._tell_tenancy(tick.plan, tick.snapshot.gateway)
        for decision in tick.plan.decisions:
            told = f"{decision.replica}: {decision.sentence}"  # logged by the loop
            self._notes.append((event_reason(decision.field), told))
        self._note_rest(pool, tick)
        await self._tried(self._keep_planned(pool, self._loop.memory))
        await self._report(tick.plan)

    def _note_rest(self, pool: InferencePool, tick: Tick) -> None:
        now_s = tick.snapshot.taken_at_s
        is_waiting = self._settled is None  # for a rollout, a drain, or leave to write
        if is_waiting or not is_at_rest(pool, tick.snapshot, tick.plan):
            self._idle_since_s = now_s
        is_resting = now_s - self._idle_since_s >= REST_S
        self._rest = tick.snapshot if is_resting else None

    async def _rests_on(self, last: Snapshot) -> bool:
        assert self._loop is not None
        if is_due(self._key, last.taken_at_s, self._tools.now_s(), LOOK_S):
            return False
        seen = await self._observer.gateways.hear(self._prometheus(self._loop.pool))
        self._loop.memory = self._loop.memory.with_arrivals(seen)
        rests = not stirs(last.gateway, seen)
        if rests and self._last is not None:
            self._tell_tenancy(self._last.plan, seen)
        return rests

    def _tell_tenancy(self, made: Plan, gateway: GatewaySnapshot) -> None:
        if (tenancy := self._tools.tenancy) is not None and (loop := self._loop) is not None:
            tenancy.saw(self._key, pool_seen(loop.pool, made, gateway, self._tools.now_s()))

    def _quotas(self) -> Condition | None:
        return self._tools.tenancy.condition(self._key) if self._tools.tenancy else None

    async def observe(self) -> Snapshot:
        assert self._loop is not None
        pool = self._loop.pool
        snapshot = await self._observer.observe(
            self._tokens.admin,
            self._roller.state.num_reserved,
            self._prometheus(pool),
            counted_thresholds_ms(pool),
        )
        if lacks_url(pool, self._tools.settings):
            snapshot = replace(snapshot, windows=NAMELESS)
        if self._tools.tenancy is not None:
            snapshot = replace(snapshot, weights=self._tools.tenancy.weights(self._key))
        self._tools.on_snapshot(snapshot)
        return snapshot

    def _prometheus(self, pool: InferencePool) -> PrometheusReader | None:
        url = prometheus_url(pool, self._tools.settings)
        if self._tools.polling is None or url is None:
            return None
        return self._tools.polling.of(url)

    async def apply(self, actions: Sequence[Action]) -> tuple[ActionResult, ...]:
        return await self._actor.apply(actions, self._tokens.admin)

    def _accepted(self, body: Json) -> InferencePool | None:
        """The spec, or None with the trouble noted: a pool runs on as it was."""
        self._body = body
        try:
            pool = self._reader.read(body)
        except SpecError as error:
            self._trouble = " ".join(error.problems)
            return None
        if not self._is_anothers:
            self._trouble = None
        return pool

    async def _reconcile(self, pool: InferencePool) -> None:
        """Nothing, where everything is as it was when there was nothing to do."""
        before = (pool, self._objects.num_changes)
        if before == self._settled:
            return
        self._settled = None
        spec = pool.spec
        await self._tokens.ensure(pool)
        refused = await self._kept(pool, self._loop.memory if self._loop else None)
        refused += await self._tender.tend(pool, may_roll=spec.mode == "Enforce")
        self._tell_refused(refused)
        others = classes_of(pool) if spec.autoscaling.mode == "External" else ()
        ours = [c for c in RequestClass if c not in others]
        for request_class in classes_of(pool):
            if request_class in ours:
                await self._actor.set_first_count(pool, request_class)
        await self._actor.advance(self._tokens.admin, ours)
        is_told = self._roller.state.interrupts is not None and self._is_told()
        await self._roller.advance(pool, is_told)
        is_moving = any(pod.mark is not None for pod in self._objects.engines())
        is_waiting = self._tokens.are_awaited()
        if not (is_moving or is_waiting or refused or self._roller.state != RolloutState()):
            self._settled = before

    async def _kept(self, pool: InferencePool, memory: Memory | None) -> tuple[str, ...]:
        """What the API server refuses of it."""
        try:
            await self._keeper.keep(pool, memory)
        except ApiError as error:
            if not error.is_refusal:
                raise
            return (str(error),)
        return ()

    async def _keep_planned(self, pool: InferencePool, memory: Memory) -> None:
        if refused := await self._kept(pool, memory):
            self._tell_refused(tuple(dict.fromkeys((*self._refused, *refused))))

    def _tell_refused(self, refused: tuple[str, ...]) -> None:
        for sentence in set(refused) - set(self._refused):
            self._note("WriteRefused", sentence)
        self._refused = refused

    def _is_told(self) -> bool:
        """Whether the status says that a replacement will interrupt."""
        return any(c.reason == "RolloutInterrupts" for c in self._reporter.written.conditions)

    async def _tried(self, work: Awaitable[object]) -> bool:
        try:
            await work
            self._is_anothers = False
        except Foreign as error:
            if self._trouble != str(error):
                logger.warning("%s: %s", "/".join(self._key), error)
            self._trouble = str(error)
            self._is_anothers = error.is_operator
            return False
        except ApiError as error:
            logger.warning("%s: %s", "/".join(self._key), error)
            if error.is_refusal:
                self._tell_refused((str(error),))
            self._rest = None  # tried again with the next tick
            return False
        return True

    async def _report(self, made: Plan | None) -> None:
        if self._is_anothers:
            return
        if made is None and self._last is not None:
            made = replace(self._last.plan, decisions=())  # they have been told
        given = StatusInput(
            namespace=self._key[0],
            pool=self._key[1],
            operator=self._tools.settings.operator,
            generation=self._body["metadata"].get("generation", 0),
            now_s=self._tools.now_s(),
            accepted=self._trouble,
            refused=self._refused,
            made=made,
            replicas=self._replicas(),
            gateways=self._gateways(),
            rollout=self._roller.state if self._trouble is None else RolloutState(),
            quotas=self._quotas(),
        )
        self._told_quotas = given.quotas
        try:
            await self._reporter.write(status_of(given, self._reporter.latest))
        except ApiError as error:
            logger.warning("%s: status not written: %s", "/".join(self._key), error)
            self._rest = None
        notes, self._notes = self._notes, []
        for reason, note in notes:
            await self._reporter.event(reason, note)

    def _replicas(self) -> Mapping[RequestClass, int]:
        return {
            c: self._objects.replicas(c)
            for c in RequestClass
            if self._objects.deployment(c) is not None
        }

    def _gateways(self) -> tuple[int, int]:
        gateways = self._objects.gateways()
        wanted = self._body["spec"].get("gateway", {}).get("replicas", len(gateways))
        return sum(gateway.is_ready for gateway in gateways), int(wanted)

    def _busy(self) -> Mapping[str, float]:
        reports = self._last.plan.replicas if self._last else ()
        return {r.name: (r.num_running or 0.0) + (r.num_waiting or 0.0) for r in reports}

    def _note(self, reason: str, note: str) -> None:
        logger.info("%s: %s", "/".join(self._key), note)
        self._notes.append((reason, note))
