from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_operator.exposition import EngineSample, SloCount
from chairlift_operator.windows import (
    History,
    ObjectiveKey,
    attainment,
    attainment_over,
    events_to_claim,
    wilson_bounds,
)

GAPS = ObjectiveKey("itl", 50.0, "interactive")
FIRST = ObjectiveKey("ttft", 500.0, "interactive")


def _sample(
    steps: float, good: float = 0, bad: float = 0, key: ObjectiveKey = GAPS
) -> EngineSample:
    count = SloCount(key.objective, key.threshold_ms, key.request_class, good, bad)
    return EngineSample(num_steps=steps, step_seconds=steps * 0.1, slo_counts=(count,))


def _history(*samples: tuple[float, EngineSample]) -> History:
    history = History()
    for at_s, sample in samples:
        history = history.with_sample(at_s, sample)
    return history


def test_one_sample_says_nothing() -> None:
    history = _history((0, _sample(100, 50, 50)))
    assert history.increase("num_steps") is None
    assert attainment([history], GAPS, 0.05, 0) is None


def test_a_restart_begins_anew_and_never_gives_a_negative_or_huge_rate() -> None:
    history = _history((0, _sample(1000)), (5, _sample(1100)), (10, _sample(7)))
    assert history.num_restarts == 1
    assert history.increase("num_steps") is None
    assert history.with_sample(15, _sample(57)).increase("num_steps") == 50


@given(st.lists(st.floats(0, 1e9), min_size=2, max_size=20))
def test_an_increase_is_never_negative_nor_above_the_counter(values: list[float]) -> None:
    history = _history(*((5.0 * i, _sample(v)) for i, v in enumerate(values)))
    increase = history.increase("num_steps")
    assert increase is None or 0 <= increase <= max(values)


def test_a_sample_read_twice_is_one_observation() -> None:
    history = _history((0, _sample(10)), (0, _sample(99)))
    assert len(history.points) == 1


def test_old_samples_are_forgotten() -> None:
    history = _history(*((5.0 * i, _sample(i)) for i in range(200)))
    assert history.span_s <= 300.5


def test_gaps_of_one_step_are_one_reading() -> None:
    history = _history((0, _sample(0)), (5, _sample(30, good=3000)))
    seen = attainment_over([history], GAPS, 15, 5, 0)
    assert seen is not None
    assert (seen.num_events, seen.num_independent) == (3000, 30)


def test_first_tokens_count_each_for_itself() -> None:
    history = _history((0, _sample(0, key=FIRST)), (5, _sample(3, good=60, key=FIRST)))
    seen = attainment([history], FIRST, 0.05, 5)
    assert seen is not None and seen.num_independent == 60 and not seen.low_sample


def test_windows_widen_until_there_is_enough_to_claim_the_objective() -> None:
    samples = [(5.0 * i, _sample(5 * i, good=50 * i)) for i in range(70)]
    seen = attainment([_history(*samples)], GAPS, 0.05, 345)
    assert seen is not None and seen.window_s == 60 and not seen.low_sample
    few = attainment([_history(*samples[:8])], GAPS, 0.05, 35)
    assert few is not None and few.low_sample


def test_nothing_from_before_a_move_counts_after_it() -> None:
    samples = [(0, _sample(0)), (5, _sample(100, bad=100)), (10, _sample(200, good=100, bad=100))]
    seen = attainment([_history(*samples)], GAPS, 0.05, 10, since_s=5)
    assert seen is not None and seen.bad_share == 0


def test_replicas_add_up_and_a_new_one_waits_for_its_second_sample() -> None:
    old = _history((0, _sample(0)), (5, _sample(100, good=300)))
    new = _history((5, _sample(900, bad=900)))
    seen = attainment([old, new], GAPS, 0.05, 5)
    assert seen is not None and (seen.num_events, seen.bad_share) == (300, 0)


def test_a_changed_threshold_starts_without_events() -> None:
    history = _history((0, _sample(0)), (5, _sample(100, good=300)))
    assert attainment([history], ObjectiveKey("itl", 40.0, "interactive"), 0.05, 5) is None


@pytest.mark.parametrize(("budget", "events"), [(0.05, 59), (0.10, 29), (0.01, 299)])
def test_the_gate_is_what_all_good_events_can_prove(budget: float, events: int) -> None:
    assert events_to_claim(budget) == events
    assert wilson_bounds(0.0, events)[1] < budget


@given(st.floats(0, 1), st.floats(1, 1e6))
def test_wilson_bounds_enclose_the_share(share: float, count: float) -> None:
    lower, upper = wilson_bounds(share, count)
    assert 0 <= lower <= share + 1e-9 and share - 1e-9 <= upper <= 1


@pytest.mark.parametrize("count", [5e-324, 0.5])
def test_less_than_one_event_or_step_tells_nothing(count: float) -> None:
    key = ObjectiveKey("itl", 50.0, "interactive")
    samples = [
        EngineSample(num_steps=n, slo_counts=(SloCount("itl", 50.0, "interactive", n, 0.0),))
        for n in (0.0, count)
    ]
    history = History().with_sample(0.0, samples[0]).with_sample(5.0, samples[1])
    assert attainment_over([history], key, 15.0, 5.0, 0.0) is None
