"""The engines of one local run: started, replaced when they die, drained when they are too many.

Implements the operator's `direct_cluster.Fleet`, so that it obeys the plan; decides nothing. Each
engine has a task that keeps it alive; draining ends that task first. `supervisor` owns it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from chairlift_cli.backoff import Backoff
from chairlift_cli.engine_process import EngineProcess
from chairlift_cli.errors import CliError
from chairlift_cli.run_dir import RunDir
from chairlift_cli.view import View
from chairlift_operator.decisions import SetReplicas
from chairlift_operator.direct_cluster import StartingReplica
from chairlift_operator.engine_client import ReplicaEndpoint
from chairlift_operator.spec import InferencePool
from chairlift_protocol.wire import RequestClass

RETRY_S: Final = 5.0


@dataclass(slots=True)
class _Member:
    engine: EngineProcess
    is_draining: bool = False
    keeping: asyncio.Task[None] | None = None


class LocalFleet:
    """Made in an event loop; used once, from the first engine to `stop`."""

    def __init__(
        self,
        pool: InferencePool,
        run_dir: RunDir,
        session: aiohttp.ClientSession,
        gateway_url: str,
        view: View,
    ) -> None:
        self.gateway_url = gateway_url
        self._pool = pool
        self._run_dir = run_dir
        self._session = session
        self._view = view
        self._members: dict[str, _Member] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_unpublished = False

    async def start_first(self) -> None:
        """One interactive engine, so that a pool that cannot start says so at once; CliError."""
        member = self._add(RequestClass.INTERACTIVE)
        await member.engine.start(self._session, self._view.say)
        self._publish()

    async def keep(self) -> None:
        """The least of each class from the start, and all alive, until cancelled."""
        try:
            for member in self._members.values():
                self._keep_alive(member, started=True)
            for request_class in RequestClass:
                self._grow(request_class, self._pool.spec.replicas(request_class).min)
            await asyncio.Event().wait()
        finally:
            await self._cancel_tasks()

    def endpoints(self) -> list[ReplicaEndpoint]:
        token = self._run_dir.admin_token
        return [
            ReplicaEndpoint(
                engine.name,
                address.url,
                address.admin_url,
                token,
                engine.request_class,
                member.is_draining,
            )
            for member in self._members.values()
            if (address := (engine := member.engine).address) is not None
        ]

    def starting(self) -> list[StartingReplica]:
        return [
            StartingReplica(member.engine.name, member.engine.request_class)
            for member in self._members.values()
            if member.engine.address is None and not member.is_draining
        ]

    def set_replicas(self, action: SetReplicas) -> str:
        for name in action.victims:
            member = self._members.get(name)
            if member is not None and not member.is_draining:
                self._begin(self._drain(member, action.drain_timeout_s))
        grown = self._grow(action.request_class, action.count)
        return f"starting {', '.join(grown)}" if grown else f"draining {', '.join(action.victims)}"

    async def stop(self) -> None:
        """Every engine, after the gateway has let the streams end."""
        await asyncio.gather(*(member.engine.stop() for member in self._members.values()))

    async def end(self) -> None:
        await self._cancel_tasks()
        await asyncio.gather(*(member.engine.end() for member in self._members.values()))

    def _grow(self, request_class: RequestClass, count: int) -> list[str]:
        grown = []
        while sum(1 for _ in self._members_of(request_class)) < count:
            member = self._add(request_class)
            self._keep_alive(member, started=False)
            grown.append(member.engine.name)
        return grown

    def _members_of(self, request_class: RequestClass) -> Iterator[_Member]:
        for member in self._members.values():
            if member.engine.request_class is request_class and not member.is_draining:
                yield member

    def _add(self, request_class: RequestClass) -> _Member:
        names = (f"{request_class}-{number}" for number in range(len(self._members) + 1))
        name = next(name for name in names if name not in self._members)
        member = _Member(EngineProcess(name, self._pool, self._run_dir, request_class))
        self._members[name] = member
        return member

    def _keep_alive(self, member: _Member, started: bool) -> None:
        member.keeping = self._begin(self._live(member, started))

    def _begin(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _live(self, member: _Member, started: bool) -> None:
        """Start again whatever ends, ever less often while it does not live long."""
        engine, backoff, has_served = member.engine, Backoff(), started
        while True:
            try:
                if not started:
                    await engine.start(self._session, self._view.say)
                self._publish()
                if not started:
                    self._view.say(f"{engine.name} is {'serving again' if has_served else 'ready'}")
                started, has_served = False, True
                with backoff.timed():
                    why = await engine.wait()
            except CliError as error:
                why = str(error)
            self._publish()
            self._view.say(f"{why}; starting it again in {backoff.next_s:g} s")
            await backoff.sleep()

    async def _drain(self, member: _Member, timeout_s: float) -> None:
        """Out of the gateway's list, then no new work, then gone once its requests have ended."""
        engine, member.is_draining = member.engine, True
        self._publish()
        if member.keeping is not None:
            member.keeping.cancel()
            await asyncio.gather(member.keeping, return_exceptions=True)
        if engine.address is None:
            await engine.end()  # it never served, or has just died
        elif not await engine.drain(self._session, timeout_s):
            self._view.say(f"{engine.name}: its requests did not end in {timeout_s:g} s")
        await engine.stop()
        del self._members[engine.name]
        self._view.say(f"{engine.name} is gone")

    def _publish(self) -> None:
        """Tell the gateway who serves from now on."""
        try:
            self._run_dir.write_endpoints([e for e in self.endpoints() if not e.is_draining])
        except OSError as error:
            if not self._is_unpublished:
                self._view.say(
                    f"cannot tell the gateway which engines serve: {self._run_dir.endpoints_file}: "
                    f"{error.strerror}; trying again every {RETRY_S:g} s"
                )
                self._is_unpublished = True
                self._begin(self._publish_later())
        else:
            self._is_unpublished = False

    async def _publish_later(self) -> None:
        while self._is_unpublished:
            await asyncio.sleep(RETRY_S)
            self._publish()

    async def _cancel_tasks(self) -> None:
        tasks: Sequence[asyncio.Task[None]] = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
