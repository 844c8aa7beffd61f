from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_bench.arrivals import read_arrivals, with_lengths_divided
from chairlift_bench.excerpt import busiest_start_s, cut
from chairlift_simulation.arrival_traces import Arrival, at_mean_rate

TRACE = read_arrivals()[:300]


def test_the_excerpt_is_twenty_busy_minutes_in_order() -> None:
    arrivals = read_arrivals()
    times_s = [a.arrival_s for a in arrivals]
    assert len(arrivals) == 8264
    assert times_s == sorted(times_s) and times_s[0] >= 0 and times_s[-1] < 1200
    assert sum(a.prompt_tokens for a in arrivals) / 8264 == pytest.approx(1241, abs=1)
    assert sum(a.output_tokens for a in arrivals) / 8264 == pytest.approx(164, abs=1)


@given(
    st.builds(Arrival, st.just(0.0), st.integers(1, 20_000), st.integers(1, 5_000)),
    st.integers(32, 4096),
)
def test_divided_lengths_are_at_least_one_and_fit_the_model(
    arrival: Arrival, model_length_tokens: int
) -> None:
    (short,) = with_lengths_divided([arrival], model_length_tokens)
    assert short.prompt_tokens >= 1 and short.output_tokens >= 1
    assert short.prompt_tokens + short.output_tokens <= model_length_tokens
    assert short.prompt_tokens <= max(1, round(arrival.prompt_tokens / 8))
    assert short.output_tokens <= max(1, round(arrival.output_tokens / 4))


def test_the_excerpt_is_cut_where_most_requests_arrive(tmp_path: Path) -> None:
    sparse = [10.0 * i for i in range(150)]
    busy = [1500.0 + i for i in range(1200)]
    assert busiest_start_s([*sparse, *busy, 4000.0]) == 1500.0

    source, target = tmp_path / "trace.csv", tmp_path / "excerpt.csv"
    source.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:00:00.0000000,100,10\n"
        "2023-11-16 18:40:00.5000000,200,20\n"
        "2023-11-16 18:59:59.0000000,300,30\n"
    )
    # The last possible start, 2,390 s, has one request and so has the first: the first wins.
    assert cut(source, target) == 1
    assert target.read_text() == "arrival_s,context_tokens,generated_tokens\n0.000,100,10\n"


@given(st.floats(0.05, 2), st.floats(30, 120))
def test_stretched_time_has_the_wanted_mean_and_the_traces_shape(
    requests_per_s: float, duration_s: float
) -> None:
    scaled = at_mean_rate(TRACE, requests_per_s, duration_s)
    assert len(scaled) == max(1, round(requests_per_s * duration_s))
    assert scaled[0].arrival_s == 0 and scaled[-1].arrival_s <= duration_s
    factor = duration_s / (TRACE[len(scaled)].arrival_s - TRACE[0].arrival_s)
    for before, after in zip(TRACE, scaled, strict=False):
        assert after.arrival_s == pytest.approx((before.arrival_s - TRACE[0].arrival_s) * factor)
        assert after.prompt_tokens == before.prompt_tokens


def test_asking_for_more_than_the_trace_holds_says_so() -> None:
    with pytest.raises(ValueError, match="lower the rate or the duration"):
        at_mean_rate(read_arrivals(), requests_per_s=100, duration_s=1000)
