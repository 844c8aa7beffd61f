"""The simulated runner: its times follow the profile, its text follows the prompt."""

from __future__ import annotations

import pytest

from chairlift_engine.clock import VirtualClock
from chairlift_engine.config import Capacity
from chairlift_engine.engine import Engine, StepReport
from chairlift_engine.request import Request, SamplingParams
from chairlift_engine.scheduler import Scheduler
from chairlift_engine.simulator import Profile, ProfileError, SimulatorRunner
from chairlift_protocol.policy import Generation, Policy, SloThresholds

CAPACITY = Capacity(
    batch_size=8, step_tokens=128, num_blocks=64, block_tokens=16, model_length_tokens=400
)


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


def test_the_text_follows_from_the_prompt_alone() -> None:
    alone = serve([[7] * 30], seed=1)["r0"]
    beside_others = serve([[7] * 30, [8] * 100, [9] * 5], seed=2, step_tokens=32)
    assert beside_others["r0"] == alone
    assert beside_others["r1"] != alone
    assert bytes(alone).isascii()


@pytest.mark.parametrize(
    ("text", "a_ms"), [("reference", 8.0), ("fast", 3.6), ("slow", 12.8), ('{"a_ms": 5}', 5.0)]
)
def test_a_profile_is_a_name_or_some_coefficients(text: str, a_ms: float) -> None:
    assert Profile.parse(text).a_ms == pytest.approx(a_ms)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quick", "use one of reference, fast, slow"),
        ("[1]", "use one of reference"),
        ('{"a": 5}', "unknown field 'a'; it takes a_ms, b_ms"),
        ('{"a_ms": -1}', "a_ms must be 0 or more, not -1"),
        ('{"a_ms": NaN}', "a_ms must be 0 or more, not nan"),
    ],
)
def test_a_bad_profile_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        Profile.parse(text)
