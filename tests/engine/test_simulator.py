"""The simulated runner: its times follow the profile, its text follows the prompt."""

from __future__ import annotations

import pytest

from chairlift_engine.clock import VirtualClock
from chairlift_engine.config import Capacity
from chairlift_engine.engine import Engine, StepReport
from chairlift_engine.request import Request, SamplingParams
from chairlift_engine.runner import ScheduledChunk
from chairlift_engine.scheduler import Scheduler
from chairlift_engine.simulator import SimulatedCrash, SimulatorRunner
from chairlift_engine.simulator_profile import Profile
from chairlift_protocol.policy import Generation, Policy, SloThresholds

CAPACITY = Capacity(
    batch_size=8, step_tokens=128, num_blocks=64, block_tokens=16, model_length_tokens=400
)
CHUNK = ScheduledChunk(Request("r", [7] * 100, SamplingParams(1), 0.0), 0, 100)


def serve(prompts: list[list[int]], seed: int = 0, step_tokens: int = 128) -> dict[str, list[int]]:
    clock = VirtualClock()
    reports: list[StepReport] = []
    policy = Policy(Generation(0, 0), 8, step_tokens, step_tokens, 1.0, SloThresholds(1000, 100))
    engine = Engine(
        Scheduler(CAPACITY, policy), SimulatorRunner(Profile(), clock, seed), clock, reports.append
    )
    requests = [
        Request(f"r{i}", p, SamplingParams(max_tokens=12), arrival_s=0.0)
        for i, p in enumerate(prompts)
    ]
    for request in requests:
        engine.request_add(request)
    engine.step()
    while engine.scheduler.residency.num_requests:
        engine.step()
    return {r.id: r.token_ids[r.num_prompt_tokens :] for r in requests}


class Steps:
    """A runner by itself, without noise; every step takes 10 ms unless something is wrong."""

    def __init__(self, **profile: object) -> None:
        self.clock = VirtualClock(now_s=1000.0)
        costs = {"a_ms": 10, "b_ms": 0, "c_ms": 0, "d_ms": 0, "noise": 0}
        self.runner = SimulatorRunner(Profile.from_mapping({**costs, **profile}), self.clock)

    def times_ms(self, num_steps: int) -> list[float]:
        return [self.time_ms() for _ in range(num_steps)]

    def time_ms(self) -> float:
        before_s = self.clock.now_s()
        self.runner.execute([CHUNK])
        return round((self.clock.now_s() - before_s) * 1e3, 6)


def test_the_text_follows_from_the_prompt_alone() -> None:
    alone = serve([[7] * 30], seed=1)["r0"]
    beside_others = serve([[7] * 30, [8] * 100, [9] * 5], seed=2, step_tokens=32)
    assert beside_others["r0"] == alone
    assert beside_others["r1"] != alone
    assert bytes(alone).isascii()
    assert len(set(alone)) > 2


def test_a_request_id_that_comes_again_gets_its_own_text() -> None:
    runner = SimulatorRunner(Profile(), VirtualClock())
    texts = []
    for prompt in ([7] * 30, [8] * 30, [9] * 30):
        request = Request("same", prompt, SamplingParams(9), 0.0)
        for start in range(30, 39):
            chunk_tokens = 30 if start == 30 else 1
            chunk = ScheduledChunk(request, request.num_tokens - chunk_tokens, chunk_tokens)
            request.token_ids += runner.execute([chunk])
        texts.append(bytes(request.token_ids[30:]))
    assert len(set(texts)) == 3


def test_a_slow_replica_takes_a_factor_longer_from_then_on() -> None:
    assert Steps(slow={"at_s": 0.015, "factor": 3}).times_ms(4) == [10, 10, 30, 30]


def test_a_stall_happens_once() -> None:
    steps = Steps(stall={"at_s": 0.005, "duration_s": 2})
    assert steps.times_ms(4) == [10, 2010, 10, 10]


def test_running_out_of_memory_fails_one_step_and_a_crash_is_another_error() -> None:
    steps = Steps(oom={"at_step": 2}, crash={"at_step": 4})
    assert steps.time_ms() == 10
    with pytest.raises(MemoryError, match="out of memory at step 2"):
        steps.time_ms()
    assert steps.time_ms() == 10
    with pytest.raises(SimulatedCrash, match="at step 4"):
        steps.time_ms()
