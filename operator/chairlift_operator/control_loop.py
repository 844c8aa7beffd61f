"""Observe, plan, apply, write down; every few seconds until told to stop.

The only place where the planner's memory lives. Knows neither engines nor Kubernetes: it is handed
a `Cluster`. One failed tick costs one tick.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from chairlift_operator.cluster import ActionResult, Cluster
from chairlift_operator.journal import JournalWriter
from chairlift_operator.memory import Memory
from chairlift_operator.plan import Plan, plan
from chairlift_operator.snapshot import Snapshot
from chairlift_operator.spec import InferencePool

logger = logging.getLogger(__name__)

TICK_S: Final = 5.0


class AnchoredClock:
    """Unix time that never jumps: read once, then advanced by the monotonic clock."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset_s + time.monotonic()


@dataclass(frozen=True, slots=True)
class Tick:
    """What one tick saw, planned and achieved: for a live view."""

    snapshot: Snapshot
    plan: Plan
    results: tuple[ActionResult, ...]


class ControlLoop:
    """`pool` may be replaced between ticks; the next tick plans for the new spec.

    say: told in one sentence when ticks begin to fail, and when they succeed again.
    """

    def __init__(
        self,
        pool: InferencePool,
        cluster: Cluster,
        memory: Memory | None = None,
        journal: JournalWriter | None = None,
        on_tick: Callable[[Tick], None] | None = None,
        say: Callable[[str], None] | None = None,
        tick_s: float = TICK_S,
    ) -> None:
        self.pool = pool
        self.memory = memory or Memory.start()
        self._cluster = cluster
        self._journal = journal
        self._on_tick = on_tick
        self._say = say
        self._failing = False
        self._tick_s = tick_s

    async def run(self, stop: asyncio.Event) -> None:
        """Ticks keep to their grid; one that overruns makes the next skip, not hurry."""
        loop = asyncio.get_running_loop()
        stopped: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
        due_s = loop.time()
        try:
            while not stop.is_set():
                await self._tick_unless(stopped)
                while due_s <= loop.time():
                    due_s += self._tick_s
                await asyncio.wait({stopped}, timeout=due_s - loop.time())
        finally:
            stopped.cancel()

    async def _tick_unless(self, stopped: asyncio.Future[Any]) -> None:
        """A tick that is given up when `stopped` comes first: it may be waiting for an engine."""
        ticking: asyncio.Future[Any] = asyncio.ensure_future(self._guarded_tick())
        try:
            await asyncio.wait({ticking, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not ticking.done():
                ticking.cancel()
                await asyncio.gather(ticking, return_exceptions=True)

    async def tick(self) -> Tick:
        pool = self.pool
        snapshot = await self._cluster.observe()
        made = plan(pool, snapshot, self.memory, snapshot.taken_at_s)
        self.memory = made.memory
        for decision in made.decisions:
            logger.info("%s %s: %s", pool.name, decision.replica, decision.sentence)
        results = await self._cluster.apply(made.actions)
        for result in results:
            if not result.verified:
                logger.warning("%s %s: %s", pool.name, result.action.target, result.detail)
        tick = Tick(snapshot, made, results)
        if self._on_tick is not None:
            self._on_tick(tick)
        if self._journal is not None:
            self._journal.tick(pool, snapshot, made, results)
        return tick

    async def _guarded_tick(self) -> None:
        try:
            await self.tick()
        except Exception as error:
            logger.exception("%s: this tick failed, nothing more was changed in it", self.pool.name)
            self._tell(True, f"ticks fail: {error or type(error).__name__}; trying again each tick")
        else:
            self._tell(False, "ticks succeed again")

    def _tell(self, failing: bool, sentence: str) -> None:
        if failing is not self._failing and self._say is not None:
            with contextlib.suppress(OSError):  # nobody may be there to read it
                self._say(sentence)
        self._failing = failing
