"""A pool from its first request to its last, in virtual time: arrivals, gateway, engines, law.

Each part is the real one, but for sockets and waiting. Between two events every replica computes
by itself; what it did is known to the others when its time has come. Deterministic by seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

from chairlift_engine.engine import StepReport
from chairlift_engine.live_policy import StalePolicy
from chairlift_gateway.choice import Replica
from chairlift_operator.control_loop import TICK_S
from chairlift_operator.decisions import Action, Decision, SetPolicy, SetReplicas
from chairlift_operator.plan import Plan
from chairlift_operator.snapshot import GatewaySnapshot, Phase, Snapshot
from chairlift_operator.spec import InferencePool
from chairlift_protocol.load import Load
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.conditions import NO_BACKLOG, Backlog, Conditions, PoolResult
from chairlift_simulation.events import Events, Rank
from chairlift_simulation.fleet import Fleet, Member
from chairlift_simulation.gateway import VirtualGateway
from chairlift_simulation.laws import Law
from chairlift_simulation.records import Journey, TickState
from chairlift_simulation.replica import VirtualRequest
from chairlift_simulation.tally import Tally

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
RETRY_S: Final = 2.0  # until a client of a backlog asks again after a refusal
TURNAROUND_S: Final = 0.02  # until it sends its next request after an answer


class PoolRun:
    """Used once. on_tick: told of each plan, snapshot and its time, for journals and progress."""

    def __init__(
        self,
        pool: InferencePool,
        law: Law,
        conditions: Conditions,
        on_tick: Callable[[Snapshot, Plan | None], None] = lambda snapshot, plan: None,
    ) -> None:
        self._pool = pool
        self._law = law
        self._conditions = conditions
        self._on_tick = on_tick
        self._events = Events()
        self._fleet = Fleet(pool, conditions.hardware, conditions.seed, conditions.first_policy)
        self._gateway = VirtualGateway(self._events, self, conditions.hold, conditions.router())
        self._memory: Any = law.start()
        self._tally = Tally(pool.spec.interactive.slo, conditions.keeps_gaps)
        self._ticks: list[TickState] = []
        self._decisions: list[Decision] = []
        self._actions: list[tuple[float, Action]] = []
        self._num_preemptions = self._prefix_hit_tokens = 0
        self._backlog = NO_BACKLOG
        self._num_sent = 0
        self._num_clients = 0  # of the backlog, that wait for an answer
        self._now_s = 0.0

    def run(
        self, requests: Iterable[VirtualRequest], until_s: float, backlog: Backlog = NO_BACKLOG
    ) -> PoolResult:
        """requests: by time. until_s: how long load is offered; what is open may end after it."""
        self._start_first()
        self._backlog = backlog
        for _ in range(backlog.num_clients):
            self._events.at(backlog.from_s, self._send_next)
        for at_s in self._conditions.restarts_s:
            self._events.at(at_s, self._restart, Rank.REPLICA)
        self._events.at(0.0, self._tick, Rank.TICK)
        self._await_next(iter(requests))
        ends_s = until_s + self._conditions.tail_s
        while self._events.next_s <= ends_s:
            at_s = self._events.next_s
            if at_s > until_s and not self._tally.num_open:
                break
            if self._num_clients and at_s > self._now_s + TURNAROUND_S:
                # No further than a client may answer to what happens meanwhile.
                self._reach(self._now_s + TURNAROUND_S)
                continue
            self._reach(at_s)
            self._events.do_next()
        last_s = max((j.ended_s or 0.0 for j in self._tally.journeys), default=0.0)
        elapsed_s = max(until_s, min(ends_s, last_s))
        for member in self._fleet.members.values():
            self._count(member)
        return PoolResult(
            tuple(self._tally.journeys), tuple(self._ticks), self._tally.seconds,
            tuple(self._decisions), tuple(self._actions), elapsed_s,
            self._fleet.held_replica_s(elapsed_s), self._num_preemptions, self._prefix_hit_tokens,
        )  # fmt: skip

    # What the gateway asks for.

    def send(self, journey: Journey, replica: str, now_s: float) -> None:
        member = self._fleet.members[replica]
        if member.engine is None or member.is_full(
            journey.request.request_class, journey.request.tenant
        ):
            self._gateway.end(journey)
            self.refuse(journey, "the engine's queue is full", now_s)
            return
        journey.replica = replica
        member.open[member.engine.submit(journey.request)] = journey

    def refuse(self, journey: Journey, why: str, now_s: float) -> None:
        self._end(journey, now_s, why)

    def load_of(self, replica: str) -> Load:
        return self._fleet.members[replica].load()

    # Arrivals.

    def _await_next(self, requests: Iterator[VirtualRequest]) -> None:
        request = next(requests, None)
        if request is not None:
            self._events.at(request.due_s, partial(self._arrive, request, requests))

    def _arrive(
        self, request: VirtualRequest, rest: Iterator[VirtualRequest], now_s: float
    ) -> None:
        self._await_next(rest)
        self._receive(request, now_s)

    def _receive(self, request: VirtualRequest, now_s: float) -> None:
        self._gateway.receive(self._tally.begin(request, now_s), now_s)

    def _send_next(self, now_s: float) -> None:
        backlog, number = self._backlog, self._num_sent
        if now_s >= backlog.until_s or (not backlog.is_endless and number >= len(backlog.requests)):
            return
        self._num_sent += 1
        self._num_clients += 1
        request = backlog.requests[number % len(backlog.requests)]
        self._receive(
            VirtualRequest(
                now_s, request.prompt_tokens, request.output_tokens, BATCH, request.tenant,
                request.prefix_blocks,
            ),
            now_s,
        )  # fmt: skip

    # Time.

    def _reach(self, at_s: float) -> None:
        """Every replica computes up to that time, and what it did becomes known."""
        self._now_s = at_s
        for member in list(self._fleet.members.values()):
            for report in member.advance(at_s):
                self._take(member, report)
            if member.is_draining and not member.open:
                self._remove(member, at_s)

    def _take(self, member: Member, report: StepReport) -> None:
        told = self._tally.take(report, member.open)
        for journey in told.began:
            self._gateway.learn(journey, report.now_s)
        for journey, error in told.ended:
            self._gateway.end(journey)
            self._end(journey, report.now_s, error)

    def _end(self, journey: Journey, now_s: float, error: str | None) -> None:
        self._tally.end(journey, now_s, error)
        if journey.request.request_class is BATCH and self._backlog.num_clients:
            self._num_clients -= 1
            pause_s = RETRY_S if error is not None else TURNAROUND_S
            self._events.at(now_s + pause_s, self._send_next)

    # Control.

    def _tick(self, now_s: float) -> None:
        self._events.at(now_s + TICK_S, self._tick, Rank.TICK)
        members = self._fleet.members.values()
        snapshot = Snapshot(
            self._pool.name,
            now_s,
            tuple(member.observed(now_s) for member in members),
            GatewaySnapshot(self._gateway.samples(), now_s),
        )
        snapshot = self._conditions.distort(snapshot)
        ruled, self._memory = self._law.rule(snapshot, self._memory)
        self._decisions += ruled.decisions
        self._on_tick(snapshot, ruled.plan)
        for action in ruled.actions:
            self._actions.append((now_s, action))
            if isinstance(action, SetReplicas):
                self._set_replicas(action, now_s)
            elif self._conditions.policy_delay_s > 0:
                at_s = now_s + self._conditions.policy_delay_s
                self._events.at(at_s, partial(self._set_policy, action), Rank.POLICY)
            else:
                self._set_policy(action, now_s)
        self._ticks.append(
            TickState(now_s, tuple(m.state() for m in members), self._gateway.num_held)
        )

    def _set_policy(self, action: SetPolicy, now_s: float) -> None:
        member = self._fleet.members.get(action.replica)
        if member is None or member.engine is None:
            return
        try:
            member.engine.set_policy(action.policy)
        except StalePolicy:
            return  # overtaken by a newer one

    def _set_replicas(self, action: SetReplicas, now_s: float) -> None:
        for name in action.victims:
            if (member := self._fleet.members.get(name)) is not None:
                self._drain(member, now_s, action.drain_timeout_s)
        for member in self._fleet.grow(action, now_s):
            at_s = now_s + self._conditions.warm_up_s
            self._events.at(at_s, partial(self._make_ready, member), Rank.REPLICA)

    def _start_first(self) -> None:
        for request_class in RequestClass:
            count = self._pool.spec.replicas(request_class).min
            if request_class is INTERACTIVE and self._conditions.first_replicas is not None:
                count = self._conditions.first_replicas
            for member in self._fleet.grow(SetReplicas(request_class, count, (), "", 0.0), 0.0):
                self._fleet.make_ready(member, 0.0)
        self._publish(0.0)

    def _make_ready(self, member: Member, now_s: float) -> None:
        if member.name in self._fleet.members and not member.is_draining:
            self._fleet.make_ready(member, now_s)
            self._publish(now_s)

    def _drain(self, member: Member, now_s: float, timeout_s: float) -> None:
        was = member.phase
        if was is Phase.DRAINING:
            return
        member.is_draining = True
        if not member.open:
            self._remove(member, now_s)
        else:
            self._events.at(now_s + timeout_s, partial(self._cut, member))
        self._publish(now_s)

    def _cut(self, member: Member, now_s: float) -> None:
        """Its time to drain is over."""
        if member.engine is not None:
            for request_id in member.open:
                member.engine.abort(request_id)

    def _remove(self, member: Member, now_s: float) -> None:
        self._count(member)
        self._fleet.remove(member, now_s)

    def _count(self, member: Member) -> None:
        """What it did until now, at its end."""
        self._num_preemptions += member.counters.num_preemptions
        if member.engine is not None:
            self._prefix_hit_tokens += member.gauges.prefix_hit_tokens

    def _publish(self, now_s: float) -> None:
        listed = tuple(
            Replica(member.name, f"virtual://{member.name}", member.request_class)
            for member in self._fleet.serving()
        )
        self._gateway.publish(listed, now_s)

    def _restart(self, now_s: float) -> None:
        self._memory = self._law.start()
