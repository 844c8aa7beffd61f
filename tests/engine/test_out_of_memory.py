"""A step that runs out of memory costs its own requests, and nobody else's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from chairlift_engine.clock import VirtualClock
from chairlift_engine.config import Capacity
from chairlift_engine.engine import Engine, StepReport
from chairlift_engine.memory_limit import LONGEST_HOLD_S, MemoryLimit
from chairlift_engine.request import FinishReason, Request, SamplingParams
from chairlift_engine.runner import ScheduledChunk
from chairlift_engine.scheduler import Scheduler
from chairlift_engine.simulator import SimulatorRunner
from chairlift_engine.simulator_profile import Profile
from chairlift_protocol.policy import Generation, Policy, SloThresholds

CAPACITY = Capacity(
    batch_size=8, step_tokens=64, num_blocks=64, block_tokens=16, model_length_tokens=400
)
POLICY = Policy(Generation(0, 0), 8, 64, 64, 1.0, SloThresholds(1000, 100))


class TorchOutOfMemoryError(RuntimeError):
    """As `torch.OutOfMemoryError` is one."""


NO_MEMORY = [
    MemoryError(),
    TorchOutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 4000000000000 bytes."
    ),
]


class Bench:
    """An engine in virtual time whose next step can be made to fail."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.error: BaseException | None = None
        self.reports: list[StepReport] = []
        self._simulator = SimulatorRunner(Profile(noise=0.0), self.clock)
        self.engine = Engine(Scheduler(CAPACITY, POLICY), self, self.clock, self.reports.append)

    def execute(self, chunks: Sequence[ScheduledChunk]):
        error, self.error = self.error, None
        if error is not None:
            raise error
        return self._simulator.execute(chunks)

    def add(self, *names: str, num_prompt_tokens: int = 5, max_tokens: int = 3) -> None:
        for name in names:
            prompt = [1] * num_prompt_tokens
            self.engine.request_add(Request(name, prompt, SamplingParams(max_tokens), 0.0))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @property
    def ended(self) -> list[tuple[str, FinishReason]]:
        return [(r.id, reason) for report in self.reports for r, reason in report.ended]

    @property
    def finished(self) -> list[str]:
        return [e.request.id for r in self.reports for e in r.tokens if e.finish_reason]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda e: type(e).__name__)
def test_a_step_out_of_memory_fails_its_batch_and_the_next_request_works(error) -> None:
    bench = Bench()
    bench.add("a", "b", "c", "d")
    bench.steps(1)
    bench.error = error
    bench.steps(1)
    assert bench.ended == [(name, FinishReason.MEMORY) for name in "abcd"]
    assert bench.reports[-1].ran_out_of_memory
    assert bench.reports[-1].gauges.num_free_blocks == CAPACITY.num_blocks
    bench.add("e")
    bench.steps(3)
    assert bench.finished == ["e"]
    assert bench.engine.failure is None


@pytest.mark.parametrize("error", [RuntimeError("the device is gone"), ValueError("memory")])
def test_any_other_failure_ends_the_engine(error: Exception) -> None:
    bench = Bench()
    bench.add("a")
    bench.error = error
    with pytest.raises(type(error)):
        bench.engine.run()
    assert bench.engine.failure is error


def test_memory_that_was_too_little_lowers_what_is_effective_and_not_what_is_desired() -> None:
    bench = Bench()
    scheduler = bench.engine.scheduler
    bench.add(*"abcdefgh")
    bench.steps(1)
    bench.error = MemoryError()
    bench.steps(1)
    assert scheduler.desired == POLICY
    assert scheduler.policy == replace(POLICY, batch_size=6)  # it prefilled nothing
    bench.add(*"ABCDEFGH", num_prompt_tokens=4)
    bench.steps(1)
    assert sum(bench.reports[-1].gauges.num_running.values()) == 6
    newer = replace(POLICY, generation=Generation(0, 1), batch_size=7, step_tokens=48)
    taken = bench.engine.request_policy(newer)
    bench.steps(1)
    assert taken.result(0) == scheduler.desired == newer
    assert scheduler.policy == replace(newer, batch_size=6)


def test_a_prefill_that_did_not_fit_lowers_the_tokens_of_a_step() -> None:
    bench = Bench()
    bench.add("a", num_prompt_tokens=200)
    bench.error = MemoryError()
    bench.steps(1)
    assert bench.engine.scheduler.policy.step_tokens == 48  # of 65 that it carried
    bench.error = MemoryError()
    bench.add("b", num_prompt_tokens=200)
    bench.steps(1)
    assert bench.engine.scheduler.policy.step_tokens == 36
    bench.add("c")
    bench.steps(1)
    bench.error = MemoryError()
    bench.steps(1)  # a decode alone: what was learnt of prefill stays
    assert bench.engine.scheduler.policy.step_tokens == 36
    for name in "cdefgh":
        bench.error = MemoryError()
        bench.add(name, num_prompt_tokens=200)
        bench.steps(1)
    assert bench.engine.scheduler.policy.step_tokens == CAPACITY.block_tokens
    assert bench.engine.scheduler.policy.batch_size == 1


def test_a_limit_is_lifted_after_a_minute_and_the_next_one_after_two() -> None:
    bench = Bench()
    scheduler = bench.engine.scheduler
    for hold_s in (60.0, 120.0):
        bench.add("a", "b")
        bench.error = MemoryError()
        bench.steps(1)
        assert scheduler.policy.batch_size == 1
        bench.clock.sleep(hold_s - 1)
        bench.add("c", max_tokens=1)
        bench.steps(1)
        assert scheduler.policy.batch_size == 1
        bench.clock.sleep(1.1)
        bench.add("d", max_tokens=1)
        bench.steps(1)
        assert scheduler.policy == scheduler.desired == POLICY


def test_no_limit_holds_longer_than_an_hour() -> None:
    limit = None
    for _ in range(20):
        limit = MemoryLimit.after_failure(limit, 4, 0, CAPACITY, now_s=0.0)
    assert limit is not None and limit.until_s == LONGEST_HOLD_S


def test_requests_beside_the_failed_batch_go_on() -> None:
    bench = Bench()
    bench.engine.request_policy(replace(POLICY, generation=Generation(0, 1), batch_size=2))
    bench.add("a", "b", "waiting")
    bench.steps(1)
    bench.error = MemoryError()
    bench.steps(4)
    assert [name for name, _ in bench.ended] == ["a", "b"]
    assert bench.finished == ["waiting"]
