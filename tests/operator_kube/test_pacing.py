"""Pools take turns: each once in a period, and not all at once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from chairlift_operator.kube.pacing import is_due, turn_of

NAMES = st.text("abc-", min_size=1, max_size=8)
KEYS = [("team", f"pool-{number}") for number in range(1000)]


@given(NAMES, st.floats(0, 2e9), st.floats(0.5, 20.0))
def test_a_pool_that_is_looked_at_often_is_due_once_in_each_period(
    name: str, from_s: float, step_s: float
) -> None:
    num_steps = int(6 * 60.0 / step_s) + 1
    moments = [from_s + step_s * number for number in range(num_steps)]
    key = ("team", name)
    due = [b for a, b in zip(moments, moments[1:], strict=False) if is_due(key, a, b, 60.0)]
    assert 4 <= len(due) <= 7
    assert all(40.0 <= b - a <= 80.0 for a, b in zip(due, due[1:], strict=False))


def test_a_thousand_pools_are_due_all_over_the_period() -> None:
    second = Counter(
        next(s for s in range(60) if is_due(key, 1.8e9 + s, 1.8e9 + s + 1, 60.0)) for key in KEYS
    )
    assert len(second) == 60 and max(second.values()) < 40


def test_turns_are_taken_by_about_as_many() -> None:
    turns = Counter(turn_of(key, 5) for key in KEYS)
    assert set(turns) == set(range(5)) and min(turns.values()) > 150
