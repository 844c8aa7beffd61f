from __future__ import annotations

import asyncio
import errno
import io
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from chairlift_operator.cluster import ActionResult
from chairlift_operator.control_loop import AnchoredClock, ControlLoop, Tick
from chairlift_operator.decisions import SetPolicy
from chairlift_operator.journal import JournalWriter
from chairlift_operator.memory import Memory
from chairlift_operator.snapshot import Snapshot
from chairlift_operator.step_time import StepCosts

Make = Callable[..., Any]


class FakeCluster:
    """One virtual engine; may fail or hang at an observation."""

    def __init__(self, engine: Any, trouble: dict[int, str] | None = None) -> None:
        self.engine, self.trouble = engine, trouble or {}
        self.num_observed = 0

    async def observe(self) -> Snapshot:
        self.num_observed += 1
        trouble = self.trouble.get(self.num_observed)
        if trouble == "hang":
            await asyncio.Event().wait()
        if trouble is not None:
            raise RuntimeError(trouble)
        self.engine.run_until(self.engine.now_s + 5)
        return Snapshot("default/chat", self.engine.now_s, (self.engine.snapshot(),))

    async def apply(self, actions: Sequence[SetPolicy]) -> tuple[ActionResult, ...]:
        for action in actions:
            self.engine.policy = action.policy
        return tuple(ActionResult(action, True, "read back") for action in actions)


@pytest.fixture
def engine(make_engine: Make) -> Any:
    return make_engine(StepCosts(8e-3, 0.06e-3, 0.045e-3, 5e-8))


def _run(cluster: FakeCluster, pool: Any, num_ticks: int, tick_s: float = 0.001) -> list[Tick]:
    """Until so many ticks have completed, or for two seconds at most."""

    async def main() -> list[Tick]:
        stop, ticks = asyncio.Event(), list[Tick]()

        def on_tick(tick: Tick) -> None:
            ticks.append(tick)
            if len(ticks) == num_ticks:
                stop.set()

        loop = ControlLoop(pool, cluster, on_tick=on_tick, tick_s=tick_s)
        await asyncio.wait_for(loop.run(stop), timeout=2)
        return ticks

    return asyncio.run(main())


def test_the_loop_carries_its_memory_and_applies_what_it_plans(
    engine: Any, make_pool: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ticks = _run(FakeCluster(engine), make_pool(), 12)
    assert ticks[0].plan.actions[0].policy.batch_size == 16
    assert engine.policy == ticks[-1].plan.memory.replicas["chat-0"].wanted
    assert engine.policy.step_tokens > 256
    assert "chat chat-0: batch size 256→16: cautious first policy" in caplog.text


def test_one_failed_tick_costs_one_tick_and_is_logged(
    engine: Any, make_pool: Make, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = FakeCluster(engine, {2: "the network is down"})
    assert len(_run(cluster, make_pool(), 3)) == 3
    assert cluster.num_observed == 4
    assert "this tick failed" in caplog.text and "the network is down" in caplog.text


def test_ticks_that_keep_failing_are_said_once_and_their_recovery_too(
    engine: Any, make_pool: Make
) -> None:
    cluster, said = FakeCluster(engine, dict.fromkeys((2, 3, 4, 6), "no network")), list[str]()

    async def main() -> None:
        stop, num_left = asyncio.Event(), 3

        def on_tick(tick: Tick) -> None:
            nonlocal num_left
            num_left -= 1
            if num_left == 0:
                stop.set()

        loop = ControlLoop(make_pool(), cluster, on_tick=on_tick, say=said.append, tick_s=0.001)
        await asyncio.wait_for(loop.run(stop), timeout=2)

    asyncio.run(main())
    failing = "ticks fail: no network; trying again each tick"
    assert said[:3] == [failing, "ticks succeed again", failing]


def test_a_journal_that_cannot_be_written_hides_no_tick(engine: Any, make_pool: Make) -> None:
    class FullDisk(io.StringIO):
        def flush(self) -> None:
            if self.tell() > 200:
                raise OSError(errno.ENOSPC, "No space left on device")

    memory, seen, said = Memory.start(), list[Tick](), list[str]()
    writer = JournalWriter(FullDisk(), memory)

    async def main() -> None:
        stop = asyncio.Event()

        def on_tick(tick: Tick) -> None:
            seen.append(tick)
            if len(seen) == 3:
                stop.set()

        cluster = FakeCluster(engine)
        loop = ControlLoop(make_pool(), cluster, memory, writer, on_tick, said.append, 0.001)
        await asyncio.wait_for(loop.run(stop), timeout=2)

    asyncio.run(main())
    assert len(seen) == 3
    assert said == ["ticks fail: [Errno 28] No space left on device; trying again each tick"]


def test_a_stop_does_not_wait_for_a_hanging_engine(engine: Any, make_pool: Make) -> None:
    cluster = FakeCluster(engine, {1: "hang"})

    async def main() -> None:
        stop = asyncio.Event()
        loop = ControlLoop(make_pool(), cluster, tick_s=60)
        running = asyncio.ensure_future(loop.run(stop))
        while cluster.num_observed == 0:
            await asyncio.sleep(0)
        stop.set()
        await asyncio.wait_for(running, timeout=1)

    asyncio.run(main())


def test_a_stop_does_not_wait_for_the_next_tick(engine: Any, make_pool: Make) -> None:
    assert len(_run(FakeCluster(engine), make_pool(), 1, tick_s=60)) == 1


def test_a_new_spec_is_planned_for_from_the_next_tick_on(engine: Any, make_pool: Make) -> None:
    async def main() -> None:
        loop = ControlLoop(make_pool(), FakeCluster(engine))
        await loop.tick()
        loop.pool = make_pool(itl_s=0.08)
        await loop.tick()

    asyncio.run(main())
    assert engine.policy.slo.itl_ms == 80


def test_the_clock_is_unix_time_and_never_goes_back() -> None:
    clock = AnchoredClock()
    readings = [clock() for _ in range(100)]
    assert readings == sorted(readings) and readings[0] > 1.7e9
