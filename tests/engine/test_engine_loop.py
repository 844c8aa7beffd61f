"""The step loop: commands take effect between two steps, and every change is reported."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from chairlift_engine.clock import MonotonicClock, VirtualClock
from chairlift_engine.config import Capacity
from chairlift_engine.engine import Engine, StepReport
from chairlift_engine.request import FinishReason, Request, SamplingParams
from chairlift_engine.runner import ScheduledChunk
from chairlift_engine.scheduler import PolicyOutOfRange, Scheduler, StalePolicy
from chairlift_engine.simulator import SimulatorRunner
from chairlift_engine.simulator_profile import Profile
from chairlift_protocol.policy import Generation, Policy, SloThresholds

CAPACITY = Capacity(
    batch_size=4, step_tokens=64, num_blocks=32, block_tokens=16, model_length_tokens=400
)
POLICY = Policy(Generation(0, 0), 4, 64, 64, 1.0, SloThresholds(1000, 100))


class Recorder:
    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def __call__(self, report: StepReport) -> None:
        self.reports.append(report)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def engine(recorder: Recorder) -> Engine:
    clock = VirtualClock()
    runner = SimulatorRunner(Profile(noise=0.0), clock)
    return Engine(Scheduler(CAPACITY, POLICY), runner, clock, recorder)


def request(name: str, max_tokens: int = 3, num_prompt_tokens: int = 5) -> Request:
    return Request(name, [1] * num_prompt_tokens, SamplingParams(max_tokens), arrival_s=0.0)


def test_a_step_reports_its_tokens_its_time_and_what_it_carried(
    engine: Engine, recorder: Recorder
) -> None:
    engine.request_add(request("a"))
    engine.step()
    engine.step()
    first, second = recorder.reports
    assert first.sums is not None and second.sums is not None
    assert (first.sums.num_prefill_tokens, first.sums.num_decode_seqs) == (5, 0)
    assert (second.sums.num_prefill_tokens, second.sums.num_decode_seqs) == (0, 1)
    assert first.sums.step_s == pytest.approx(1e-3 * (8.0 + 0.045 * 5 + 5e-5 * 5))
    assert [len(r.tokens) for r in recorder.reports] == [1, 1]


def test_an_abort_takes_effect_before_the_next_step_and_is_reported(
    engine: Engine, recorder: Recorder
) -> None:
    engine.request_add(request("a"))
    engine.step()
    engine.request_abort("a")
    engine.request_abort("never-seen")
    engine.step()
    last = recorder.reports[-1]
    assert [(r.id, reason) for r, reason in last.ended] == [("a", FinishReason.ABORT)]
    assert last.sums is None and sum(last.gauges.num_running.values()) == 0
    assert last.gauges.num_free_blocks == CAPACITY.num_blocks


def test_a_request_aborted_while_it_waits_is_never_computed(
    engine: Engine, recorder: Recorder
) -> None:
    engine.request_add(request("a"))
    engine.request_abort("a")
    engine.step()
    assert [r.sums for r in recorder.reports] == [None]


def test_a_policy_answers_with_what_is_in_force_or_why_not(engine: Engine) -> None:
    newer = replace(POLICY, generation=Generation(0, 1), batch_size=2)
    taken = engine.request_policy(newer)
    stale = engine.request_policy(replace(POLICY, batch_size=3))
    too_big = engine.request_policy(replace(newer, generation=Generation(0, 2), batch_size=5))
    engine.step()
    assert taken.result(0) == engine.scheduler.policy == newer
    assert isinstance(stale.exception(0), StalePolicy)
    assert isinstance(too_big.exception(0), PolicyOutOfRange)


class Threaded:
    """An engine on a thread of its own, stopped and joined at the end of the test."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.engines: list[Engine] = []

    def start(self, engine: Engine) -> threading.Thread:
        def run() -> None:
            try:
                engine.run()
            except RuntimeError:
                pass  # kept in engine.failure

        thread = threading.Thread(target=run)
        thread.start()
        self.threads.append(thread)
        self.engines.append(engine)
        return thread


@pytest.fixture
def threaded() -> Iterator[Threaded]:
    threaded = Threaded()
    yield threaded
    for engine, thread in zip(threaded.engines, threaded.threads, strict=True):
        engine.request_stop()
        thread.join(5)
        assert not thread.is_alive()


def test_an_idle_engine_wakes_for_a_request_and_keeps_its_heartbeat(threaded: Threaded) -> None:
    finished = threading.Event()

    def on_report(report: StepReport) -> None:
        if any(event.finish_reason for event in report.tokens):
            finished.set()

    clock = MonotonicClock()
    runner = SimulatorRunner(Profile(a_ms=0.1, noise=0.0), clock)
    engine = Engine(Scheduler(CAPACITY, POLICY), runner, clock, on_report)
    threaded.start(engine)
    before_s = engine.heartbeat_s
    engine.request_add(request("a"))
    assert finished.wait(5)
    assert engine.heartbeat_s > before_s
    free = engine.request_snapshot(lambda s: s.residency.blocks.num_free).result(5)
    assert free == CAPACITY.num_blocks


class Broken:
    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[int]:
        raise RuntimeError("the device is gone")


def test_a_failing_forward_ends_the_loop_and_its_reason_is_kept(threaded: Threaded) -> None:
    engine = Engine(Scheduler(CAPACITY, POLICY), Broken(), MonotonicClock(), lambda _: None)
    thread = threaded.start(engine)
    engine.request_add(request("a"))
    thread.join(5)
    assert str(engine.failure) == "the device is gone"


def test_a_snapshot_that_fails_does_not_end_the_loop(engine: Engine) -> None:
    def read(scheduler: Scheduler) -> int:
        raise KeyError("nothing there")

    failed = engine.request_snapshot(read)
    engine.step()
    assert isinstance(failed.exception(0), KeyError)
