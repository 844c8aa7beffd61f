from __future__ import annotations

import pytest

from chairlift_engine.server.recent_rate import RecentRate


@pytest.mark.parametrize("seconds", [5, 30, 300])
def test_a_steady_pace_is_told_however_long_it_lasts(seconds: int) -> None:
    rate = RecentRate(now_s=100.0)
    for tick in range(1, seconds * 10 + 1):
        rate.add(2, 100.0 + tick / 10)
    assert rate.per_s(100.0 + seconds) == pytest.approx(20, rel=0.02)


def test_what_is_long_over_counts_no_more() -> None:
    rate = RecentRate(now_s=0.0)
    assert rate.per_s(0.0) == 0
    rate.add(100, 1.0)
    assert rate.per_s(1.0) > 50
    assert rate.per_s(600.0) < 1e-6
