"""A long prompt leaves half of each step to short ones, and pauses where streams would stutter."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_bench.fuzz_world import World
from chairlift_engine.config import Capacity
from chairlift_engine.pace import MAX_PAUSED_STEPS, MIN_STEPS, PrefillPause, StepPace
from chairlift_engine.request import Request
from chairlift_protocol.policy import Generation, Policy, SloThresholds

BLOCK = 16
FIXED_S, DECODE_S, PREFILL_S = 0.010, 0.0005, 0.0004


def world(step_tokens: int = 128, itl_ms: float = 10_000, batch_size: int = 64) -> World:
    capacity = Capacity(64, 512, 1000, BLOCK, 8000)
    slo = SloThresholds(1000, itl_ms)
    return World(capacity, Policy(Generation(0, 0), batch_size, step_tokens, step_tokens, 1.0, slo))


def step(w: World) -> float:
    """Takes as long as what it carries; the time."""
    before_s = w.now_s
    w.step(lambda p: FIXED_S + DECODE_S * p.num_decode_seqs + PREFILL_S * p.num_prefill_tokens)
    return w.now_s - before_s


def sizes(w: World) -> dict[str, int]:
    return {chunk.request.id: chunk.num_tokens for chunk in w.step().chunks}


def test_a_long_prompt_takes_half_of_a_step_while_short_ones_are_behind_it() -> None:
    w = world()
    w.add([1] * 6000, 2)
    for kind in range(6):
        w.add([2 + kind] * 30, 1)
    assert sizes(w) == {"r1": 64, "r2": 30, "r3": 30}
    assert sizes(w) == {"r1": 64, "r4": 30, "r5": 30}
    assert sizes(w) == {"r1": 64, "r6": 30, "r7": 30}
    assert sizes(w) == {"r1": 128}


def test_long_prompts_together_take_no_more_than_one_does() -> None:
    w = world()
    for kind in range(3):
        w.add([20 + kind] * 3000, 2)
    for kind in range(8):
        w.add([1 + kind] * 30, 1)
    assert sizes(w) == {"r1": 64, "r4": 30, "r5": 30}


def test_prompts_of_one_size_are_computed_one_after_the_other() -> None:
    w = world()
    for kind in range(3):
        w.add([20 + kind] * 300, 2)
    assert sizes(w) == {"r1": 128}


def test_what_short_prompts_leave_goes_round_again() -> None:
    w = world()
    w.add([1] * 6000, 2)
    w.add([2] * 10, 1)
    assert sizes(w) == {"r1": 112, "r2": 10}


@pytest.mark.parametrize("num_long", [1, 3])
def test_a_hundred_short_prompts_behind_a_long_one_wait_three_times_as_long_at_most(
    num_long: int,
) -> None:
    worst = []
    for longs in (0, num_long):
        w = world(step_tokens=256)
        for kind in range(longs):
            w.add([900 + kind] * 6000, 4)
        shorts = [w.add([1 + kind] * 60, 8) for kind in range(100)]
        for short in shorts:
            short.arrival_s = 0.0
        while w.num_alive:
            step(w)
        waits = sorted(_first_token_s(short) for short in shorts)
        worst.append(waits[94])
    assert worst[1] <= 3 * worst[0]


def _first_token_s(request: Request) -> float:
    assert request.first_token_s is not None
    return request.first_token_s - request.arrival_s


# -- pace ------------------------------------------------------------------------------------------


def learnt(noise: float = 0.0, seed: int = 0) -> StepPace:
    pace, rng = StepPace(), random.Random(seed)
    for index in range(300):
        decodes, prefill = index // 8 % 20, rng.choice((0, 0, 0, 16, 64, 256))
        mean_s = FIXED_S + DECODE_S * decodes + PREFILL_S * prefill
        pace.observe(mean_s * (1 + noise * rng.uniform(-1.7, 1.7)), decodes, prefill)
    return pace


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.01), (0.05, 0.1)])
def test_step_times_are_learnt_from_the_steps_themselves(noise: float, tolerance: float) -> None:
    for seed in range(5):
        pace = learnt(noise, seed)
        for decodes, prefill in ((4, 0), (16, 64), (10, 256)):
            expected = FIXED_S + DECODE_S * decodes + PREFILL_S * prefill
            assert pace.step_s(decodes, prefill) == pytest.approx(expected, rel=tolerance)


def test_nothing_is_paused_before_enough_is_known_or_where_it_would_not_help() -> None:
    pace = StepPace()
    for _ in range(MIN_STEPS - 1):
        pace.observe(0.1, 4, 64)
        assert pace.prefill_tokens_within(0.05, 4) is None
    assert learnt().prefill_tokens_within(0.005, 4) is None  # the decodes alone take longer


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.integers(0, 1000), st.integers(0, 5000)), max_size=100
    ),
    st.floats(0, 10),
)
def test_whatever_was_seen_a_prediction_is_a_number(
    steps: list[tuple[float, int, int]], left_s: float
) -> None:
    pace = StepPace()
    for seen in steps:
        pace.observe(*seen)
    within = pace.prefill_tokens_within(left_s, 8)
    assert within is None or within >= 0
    assert abs(pace.step_s(8, 64)) < 1e9


def test_a_prompt_is_paused_where_streams_would_miss_their_objective_and_advances() -> None:
    w = world(step_tokens=512, itl_ms=30)
    for kind in range(20):
        w.add([1 + kind] * 20, 400)
    times_s: list[float] = []
    for _ in range(60):
        step(w)
    long = w.add([99] * 2000, 2)
    while long.num_computed_tokens < 2000:
        before = long.num_computed_tokens
        times_s.append(step(w))
        assert long.num_computed_tokens - before <= 48
    assert sorted(times_s)[int(0.9 * len(times_s))] <= 0.030


def test_pausing_leaves_a_block_every_few_steps() -> None:
    pause = PrefillPause(BLOCK)
    pause._pace = learnt()
    objective_s = FIXED_S + DECODE_S * 10 + PREFILL_S * 2
    limits = [pause.limit(256, 10, objective_s, 0.0) for _ in range(3 * MAX_PAUSED_STEPS)]
    assert limits.count(BLOCK) == 3
    assert max(limits) == BLOCK


def test_an_objective_that_is_met_pauses_nothing() -> None:
    pause = PrefillPause(BLOCK)
    pause._pace = learnt(noise=0.05)
    objective_s = 1.2 * (FIXED_S + DECODE_S * 10 + PREFILL_S * 256)
    assert pause.limit(256, 10, objective_s, 0.0) == 256
