"""The operator's one loop: every pool ticked on the grid, changed ones looked at in between.

Runs in each replica and acts in the one that leads; a standby keeps its watches warm, so that it
goes on at once. Fed by Kopf's index; knows nothing else of Kopf.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp

from chairlift_operator.control_loop import AnchoredClock
from chairlift_operator.kube.access import read_access
from chairlift_operator.kube.api import Api, ApiError
from chairlift_operator.kube.lease import Lease
from chairlift_operator.kube.listening import Listening
from chairlift_operator.kube.objects import Stores
from chairlift_operator.kube.operator_metrics import OperatorMetrics
from chairlift_operator.kube.pacing import turn_of
from chairlift_operator.kube.paths import CHILD_KINDS, POD, POOL, Kind
from chairlift_operator.kube.polling import Polling
from chairlift_operator.kube.pool_controller import PoolController
from chairlift_operator.kube.settings import (
    KEEPALIVE_S,
    NUM_CONCURRENT_POOLS,
    NUM_TURNS,
    RESYNC_S,
    TICK_S,
    Settings,
)
from chairlift_operator.kube.starting import until_served
from chairlift_operator.kube.tenancy_start import start_tenancy
from chairlift_operator.kube.tools import Tools
from chairlift_operator.kube.watching import PoolKey, Reflector, Store

logger = logging.getLogger(__name__)

Json = dict[str, Any]
Pools = Mapping[PoolKey, Json]
KINDS = ("tick", "change")
_SETTLE_S = 0.2  # changes come in flurries: one look at the pool for all of them


class Operator:
    """pools: a live view of all InferencePools, by namespace and name."""

    def __init__(self, settings: Settings, pools: Pools) -> None:
        self._settings = settings
        self._pools = pools
        self._changed: dict[PoolKey, float] = {}
        self._woken = asyncio.Event()
        self._controllers: dict[PoolKey, PoolController] = {}
        self._gone: frozenset[str] = frozenset()  # by uid: one of the same name may come after it
        self._busy: set[PoolKey] = set()
        # Each kind its own: somebody waits for a change, and ticks may be a thousand.
        self._slots = {kind: asyncio.Semaphore(NUM_CONCURRENT_POOLS) for kind in KINDS}
        self.metrics = OperatorMetrics()
        self.lease: Lease | None = None
        self.is_synced = False
        self.turned_at_s = time.monotonic()

    def wake(self, key: PoolKey) -> None:
        """Something of this pool changed."""
        self._changed.setdefault(key, time.monotonic())
        self._woken.set()

    async def run(self) -> None:
        """Until cancelled; then a standby may lead at once. CannotOperate without CRD or rights."""
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            api = Api(session, read_access, on_call=self.metrics.count_call)
            await until_served(api, self._first_namespace(), self._turned)
            settings = self._settings
            lease = self.lease = Lease(
                api, settings.namespace, settings.lease_name, settings.identity
            )
            try:
                async with asyncio.TaskGroup() as tasks:
                    stores, reflectors = self._reflect(api)
                    for work in (*(r.run() for r in reflectors), lease.run()):
                        tasks.create_task(work)
                    tasks.create_task(self._resync(api))
                    for reflector in reflectors:
                        await self._until(reflector.is_synced)
                    self.is_synced = True
                    tools = self._tools(api, lease, session, stores, tasks)
                    await self._lead(lease, tools, tasks)
            finally:
                with contextlib.suppress(ApiError):  # a standby waits for the lease to run out
                    await lease.release()

    def _tools(
        self,
        api: Api,
        lease: Lease,
        session: aiohttp.ClientSession,
        stores: Stores,
        tasks: asyncio.TaskGroup,
    ) -> Tools:
        """What pools share, and its tasks."""
        settings, clock = self._settings, AnchoredClock()
        listening = Listening(session, clock)
        tasks.create_task(listening.run())
        polling = Polling(session, clock, self.metrics.count_answer)
        tasks.create_task(polling.run())
        guarded = api.guarded_by(lease.is_held)
        tenancy = start_tenancy(
            guarded, lease, stores, settings, self._pools, clock, self.wake, tasks
        )
        return Tools(
            api=guarded,
            session=session,
            stores=stores,
            settings=settings,
            now_s=clock,
            listening=listening,
            on_plan=self.metrics.count_plan,
            polling=polling,
            on_snapshot=self.metrics.count_snapshot,
            tenancy=tenancy,
        )

    def _turned(self) -> None:
        self.turned_at_s = time.monotonic()

    async def _until(self, event: asyncio.Event) -> None:
        """Alive while it waits: what fails meanwhile says so, and a restart would not help."""
        while not event.is_set():
            self._turned()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await event.wait()

    async def _lead(self, lease: Lease, tools: Tools, tasks: asyncio.TaskGroup) -> None:
        due_s = time.monotonic()
        term = turn = 0
        while True:
            is_leading = lease.is_held()
            self._turned()
            self.metrics.leading.set(is_leading)
            if not is_leading or lease.term != term:
                self._controllers.clear()  # what they know is of another term
                term = lease.term
            if is_leading and time.monotonic() >= due_s:
                due_s = max(due_s + TICK_S / NUM_TURNS, time.monotonic())
                turn = (turn + 1) % NUM_TURNS
                if turn == 0:
                    self._forget_gone()
                whose = [key for key in list(self._pools) if turn_of(key, NUM_TURNS) == turn]
                self._begin(filter(self._is_known, whose), "tick", tools, term, tasks)
            if is_leading:  # on a tick too: it may have cut short the wait for a flurry's end
                self._begin(self._take_changed(), "change", tools, term, tasks)
            await self._wait(due_s if is_leading else time.monotonic() + 1.0)

    async def _wait(self, until_s: float) -> None:
        self._woken.clear()
        left_s = max(0.0, until_s - time.monotonic())
        try:
            async with asyncio.timeout(left_s):
                await self._woken.wait()
                await asyncio.sleep(_SETTLE_S)
        except TimeoutError:
            return

    def _forget_gone(self) -> None:
        known = set(filter(self._is_known, self._pools))
        for key in set(self._controllers) - known:
            del self._controllers[key]
        self.metrics.pools.set(len(known))

    def _is_known(self, key: PoolKey) -> bool:
        body = self._pools.get(key)
        return body is not None and _uid(body) not in self._gone and self._is_ours(key)

    def _take_changed(self) -> list[PoolKey]:
        """Those whose turn is not over stay: it may have begun before the change."""
        changed = [key for key in self._changed if key not in self._busy]
        now_s, known = time.monotonic(), self._pools
        for key in changed:
            self.metrics.queue_age_s.observe(now_s - self._changed.pop(key))
        return [key for key in changed if key in known and self._is_ours(key)]

    def _begin(
        self,
        keys: Iterable[PoolKey],
        kind: str,
        tools: Tools,
        term: int,
        tasks: asyncio.TaskGroup,
    ) -> None:
        for key in keys:
            if key not in self._busy:  # one that takes longer than a tick misses the next
                self._busy.add(key)
                tasks.create_task(self._turn(key, kind, tools, term))

    async def _turn(self, key: PoolKey, kind: str, tools: Tools, term: int) -> None:
        try:
            async with self._slots[kind]:
                body = self._pools.get(key)
                if body is None or body["metadata"].get("deletionTimestamp"):
                    return
                controller = self._controllers.get(key)
                if controller is None or controller.uid != body["metadata"]["uid"]:
                    controller = self._controllers[key] = PoolController(body, term, tools)
                with self.metrics.reconcile_s.labels(kind).time():
                    await (controller.tick if kind == "tick" else controller.reconcile)(body)
        except Exception:
            self.metrics.failures.inc()
            logger.exception("%s/%s: this turn failed", *key)
        finally:
            self._busy.discard(key)
            if key in self._changed:
                self._woken.set()

    async def _resync(self, api: Api) -> None:
        """A watch may have missed an end: a pool that the server does not list is gone."""
        while True:
            await asyncio.sleep(RESYNC_S)
            known = {_uid(body) for body in self._pools.values()}
            try:
                listed = [
                    item
                    for namespace in self._settings.namespaces or (None,)
                    for item in (await api.list(POOL.path(namespace))).items
                ]
            except ApiError as error:
                logger.warning("resync: %s", error)
                continue
            self._gone = frozenset(known - {_uid(item) for item in listed})

    def _reflect(self, api: Api) -> tuple[Stores, list[Reflector]]:
        pods = Store(self.wake)
        children = {kind.name: Store(self.wake) for kind in CHILD_KINDS}
        watched: list[tuple[Kind, Store]] = [(POD, pods)]
        watched += [(kind, children[kind.name]) for kind in CHILD_KINDS]
        reflectors = [
            Reflector(api, kind, store, namespace)
            for kind, store in watched
            for namespace in self._settings.namespaces or (None,)
        ]
        return Stores(pods, children), reflectors

    def _first_namespace(self) -> str | None:
        return self._settings.namespaces[0] if self._settings.namespaces else None

    def _is_ours(self, key: PoolKey) -> bool:
        return not self._settings.namespaces or key[0] in self._settings.namespaces


def _uid(body: Json) -> str:
    return str(body["metadata"]["uid"])
