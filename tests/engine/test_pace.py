"""The engine's own idea of a step's time stays right for hours, whatever it is shown."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift_engine.pace import StepPace

FIXED_S, DECODE_S, PREFILL_S = 8e-3, 6e-5, 4.5e-5


def true_s(num_decodes: int, num_prefill_tokens: int) -> float:
    return FIXED_S + DECODE_S * num_decodes + PREFILL_S * num_prefill_tokens


@pytest.mark.parametrize("seed", range(4))
def test_after_many_thousand_noisy_steps_a_full_one_is_still_predicted(seed: int) -> None:
    """Prompts come in bursts, decodes drift: as in a service with little to do."""
    chance, pace, num_decodes = random.Random(seed), StepPace(), 5
    worst = 0.0
    for step in range(20_000):
        if chance.random() < 0.02:
            num_decodes = chance.randrange(1, 40)
        num_prefill = chance.randrange(16, 700) if chance.random() < 0.1 else 0
        noisy_s = true_s(num_decodes, num_prefill) * max(0.5, chance.gauss(1, 0.04))
        pace.observe(noisy_s, num_decodes, num_prefill)
        if step > 500:
            worst = max(worst, abs(pace.step_s(20, 500) / true_s(20, 500) - 1))
    assert worst < 0.15


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(1e-6, 1e3),
            st.integers(0, 1024),
            st.integers(0, 8192),
            st.integers(1, 400),
        ),
        max_size=12,
    )
)
def test_nothing_that_it_is_shown_breaks_it(runs: list[tuple[float, int, int, int]]) -> None:
    pace = StepPace()
    for step_s, num_decodes, num_prefill, times in runs:
        for _ in range(times):
            pace.observe(step_s, num_decodes, num_prefill)
    pace.prefill_tokens_within(0.05, 8)
