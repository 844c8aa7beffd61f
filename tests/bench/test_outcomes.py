from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_bench.outcomes import Outcome, Slo, Summary, percentile

SLO = Slo(ttft_s=1.0, gap_s=0.1, gap_percent=95)
FINE = Outcome(
    due_s=0.0,
    ttft_s=0.5,
    gaps_s=(0.05,) * 19 + (0.5,),
    elapsed_s=2.0,
    text="text",
    finish_reason="stop",
    prompt_tokens=10,
    output_tokens=21,
    error=None,
)


@pytest.mark.parametrize(
    ("outcome", "good"),
    [
        (FINE, True),
        (replace(FINE, ttft_s=1.0), True),
        (replace(FINE, ttft_s=1.001), False),
        (replace(FINE, gaps_s=()), True),
        (replace(FINE, gaps_s=(0.1,)), True),
        (replace(FINE, gaps_s=(0.05,) * 18 + (0.5, 0.5)), False),
        (replace(FINE, error="HTTP 503: busy"), False),
        (replace(FINE, error="the stream ended without [DONE]"), False),
        (replace(FINE, ttft_s=None), False),
    ],
)
def test_a_request_is_good_when_it_met_both_objectives_and_ended(
    outcome: Outcome, good: bool
) -> None:
    assert outcome.is_good(SLO) is good


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_is_one_of_the_values_with_enough_at_or_below_it(
    values: list[float], percent: float
) -> None:
    found = percentile(values, percent)
    assert found in values
    # Up to rounding of the product.
    assert sum(v <= found for v in values) * 100 >= percent * len(values) * (1 - 1e-9)


def test_the_summary_counts_every_request_and_writes_unknown_as_null() -> None:
    failed = replace(FINE, ttft_s=None, gaps_s=(), error="HTTP 500: no", prompt_tokens=0)
    summary = Summary.of([FINE, failed], SLO, elapsed_s=2.0)
    assert (summary.num_requests, summary.num_failed, summary.num_good) == (2, 1, 1)
    assert summary.good_percent == 50
    assert summary.prompt_tokens_per_s == 5
    nothing = Summary.of([failed], SLO, elapsed_s=1.0)
    assert math.isnan(nothing.ttft_p50_s)
    assert json.loads(json.dumps(nothing.to_json(), allow_nan=False))["ttft_p50_s"] is None
