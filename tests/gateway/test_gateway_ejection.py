from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chairlift_gateway.ejection import (
    AVOID_S,
    LONGEST_AVOID_S,
    MAX_SHARE,
    PROBED_FROM,
    Failures,
    avoided,
)


def after(num_failures: int) -> tuple[Failures, float]:
    """Each failure as soon as it was looked at again, and when that was."""
    failures, now_s = Failures(), 0.0
    for _ in range(num_failures):
        now_s = max(now_s, failures.until_s)
        failures.failed(now_s)
    return failures, now_s


@given(st.integers(1, 30))
def test_each_failure_in_a_row_doubles_the_time_up_to_a_bound(num_failures: int) -> None:
    failures, failed_s = after(num_failures)
    out_s = failures.until_s - failed_s
    assert out_s == min(LONGEST_AVOID_S, AVOID_S * 2 ** (num_failures - 1))
    assert failures.is_out(failures.until_s - 0.01)


def test_the_first_failures_pass_with_time_and_later_ones_only_with_a_probe() -> None:
    failures, _ = after(PROBED_FROM - 1)
    assert not failures.is_out(failures.until_s)
    assert not failures.is_due(failures.until_s)
    failures, _ = after(PROBED_FROM)
    assert not failures.is_due(failures.until_s - 0.01)
    assert failures.is_due(failures.until_s + 1000) and failures.is_out(failures.until_s + 1000)
    failures.succeeded()
    assert not failures.is_out(0.0) and not failures.is_due(failures.until_s + 1000)


def test_requests_that_fail_together_count_once() -> None:
    failures = Failures()
    for _ in range(50):
        failures.failed(1.0)
    assert failures.num_in_a_row == 1


@given(st.lists(st.integers(0, 6), max_size=12), st.floats(0, 200))
def test_never_more_than_a_share_of_the_replicas_is_out(
    nums_failed: list[int], now_s: float
) -> None:
    failures = [after(number)[0] for number in nums_failed]
    are_avoided = avoided(failures, now_s)
    assert sum(are_avoided) <= max(1, MAX_SHARE * len(failures))
    assert all(
        each.is_out(now_s) for each, is_out in zip(failures, are_avoided, strict=True) if is_out
    )
    if sum(each.is_out(now_s) for each in failures) == 1:
        assert sum(are_avoided) == 1
