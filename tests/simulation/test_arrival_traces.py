"""Traces: those that come with the package, those of users, and how they are scaled."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_simulation.arrival_traces import (
    Arrival,
    Stretch,
    TraceError,
    at_rates,
    mean_rate_per_s,
    read_trace,
    rotated,
)

HEADER = "arrival_s,prompt_tokens,output_tokens\n"
SOME = [Arrival(float(i * i), 10 + i, 1 + i) for i in range(40)]


@pytest.mark.parametrize(
    "name, num_requests, prompt_tokens, output_tokens",
    [
        ("azure-conv", 19366, 1155, 211),
        ("azure-code", 8819, 2048, 28),
        ("mooncake-conversation", 12031, 12035, 343),
        ("mooncake-synthetic", 3993, 15325, 149),
    ],
)
def test_traces_of_the_package_are_whole(
    name: str, num_requests: int, prompt_tokens: int, output_tokens: int
) -> None:
    trace = read_trace(name)
    assert len(trace) == num_requests
    assert round(sum(a.prompt_tokens for a in trace) / len(trace)) == prompt_tokens
    assert round(sum(a.output_tokens for a in trace) / len(trace)) == output_tokens
    blocks = [a for a in trace if a.prefix_blocks]
    assert all(
        512 * (len(a.prefix_blocks) - 1) < a.prompt_tokens <= 512 * len(a.prefix_blocks)
        for a in blocks
    )
    assert len(blocks) == (len(trace) if name.startswith("mooncake") else 0)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_a_users_trace_is_read_plain_and_gzipped(tmp_path: Path, suffix: str) -> None:
    text = b"arrival_s,prompt_tokens,output_tokens,prefix_blocks\n0.5,600,3,7-8\n2,10,1,\n"
    path = tmp_path / f"mine{suffix}"
    path.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    assert read_trace(str(path)) == [Arrival(0.5, 600, 3, (7, 8)), Arrival(2.0, 10, 1)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "its first line lacks gap_ms, prompt_tokens, output_tokens"),
        ("arrival_s,prompt_tokens,output_tokens\n", "holds no request"),
        ("arrival_s,prompt_tokens\n0,1\n", "its first line lacks output_tokens"),
        (f"{HEADER}1,1,1\n0,1,1\n", "line 3, arrival_s: times must not fall"),
        (f"{HEADER}nan,1,1\n", "line 2, arrival_s: must be a number, not 'nan'"),
        (f"{HEADER}0,0,1\n", "line 2, prompt_tokens: must be 1 or more whole tokens, not 0"),
        (f"{HEADER}0,1,2.5\n", "line 2, output_tokens: must be 1 or more whole tokens, not 2.5"),
        (f"{HEADER}0,1,1\n1,1\n", "line 3, output_tokens: must be a number, not nothing"),
        (f"{HEADER}0,x,1\n", "line 2, prompt_tokens: must be a number, not 'x'"),
        ("gap_ms,prompt_tokens,output_tokens\n-1,1,1\n", "line 2, gap_ms: times must not fall"),
        (
            "arrival_s,prompt_tokens,output_tokens,prefix_blocks\n0,1,1,3-\n",
            "line 2, prefix_blocks: must be ids or runs a-b between blanks, not '3-'",
        ),
    ],
)
def test_what_is_no_trace_is_refused_by_line_and_column(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"bad\.csv") as caught:
        read_trace(str(path))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_trace_that_is_not_there_is_refused_with_the_names_that_are() -> None:
    with pytest.raises(TraceError, match="azure-conv"):
        read_trace("azure-chat")


@given(st.integers(0, 1000))
def test_a_seed_begins_elsewhere_and_keeps_every_request_and_the_mean_rate(seed: int) -> None:
    turned = rotated(SOME, seed)
    assert sorted(a.prompt_tokens for a in turned) == [a.prompt_tokens for a in SOME]
    assert turned[0].arrival_s == 0.0
    assert all(a.arrival_s <= b.arrival_s for a, b in zip(turned, turned[1:], strict=False))
    assert mean_rate_per_s(turned) == pytest.approx(mean_rate_per_s(SOME), rel=0.15)


@given(st.lists(st.tuples(st.floats(5, 60), st.floats(0.1, 8)), min_size=1, max_size=4))
def test_stretches_follow_each_other_at_their_rates(parts: list[tuple[float, float]]) -> None:
    stretches = [Stretch(*part) for part in parts]
    load = at_rates(SOME, stretches)
    start_s = 0.0
    for stretch in stretches:
        end_s = start_s + stretch.duration_s
        own = [a for a in load if start_s <= a.arrival_s < end_s]
        wanted = max(1, round(stretch.duration_s * stretch.requests_per_s))
        assert abs(len(own) - wanted) <= 1
        start_s = end_s
