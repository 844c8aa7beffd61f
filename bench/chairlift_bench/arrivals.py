"""When requests arrive and how long they are: a production trace, scaled to a small model.

Knows nothing of text or servers. `prompts` fills the lengths with words, `load` sends them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

EXCERPT: Final = Path(__file__).parents[1] / "traces" / "azure_conv_excerpt.csv"
# The model here is small, the trace's was not.
PROMPT_DIVISOR: Final = 8
OUTPUT_DIVISOR: Final = 4


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace; arrival_s counts from the trace's start."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def read_arrivals(path: Path = EXCERPT) -> list[Arrival]:
    with path.open(newline="") as file:
        return [
            Arrival(
                arrival_s=float(row["arrival_s"]),
                prompt_tokens=int(row["context_tokens"]),
                output_tokens=int(row["generated_tokens"]),
            )
            for row in csv.DictReader(file)
        ]


def with_lengths_divided(
    arrivals: Iterable[Arrival],
    model_length_tokens: int,
    prompt_divisor: int = PROMPT_DIVISOR,
    output_divisor: int = OUTPUT_DIVISOR,
) -> list[Arrival]:
    """Lengths divided with their shape kept; prompt and output together fit the model."""
    return [
        _shortened(arrival, model_length_tokens, prompt_divisor, output_divisor)
        for arrival in arrivals
    ]


def at_mean_rate(
    arrivals: Sequence[Arrival], requests_per_s: float, duration_s: float
) -> list[Arrival]:
    """The trace's first `requests_per_s * duration_s` requests, time stretched to last duration_s.

    Every gap is multiplied by the same factor, so bursts and lulls keep their relative size.
    """
    num_requests = max(1, round(requests_per_s * duration_s))
    if num_requests >= len(arrivals):
        raise ValueError(
            f"{num_requests} requests and the gap after them are wanted, but the trace holds "
            f"{len(arrivals)}: lower the rate or the duration"
        )
    start_s = arrivals[0].arrival_s
    stretch = duration_s / (arrivals[num_requests].arrival_s - start_s)
    return [
        replace(arrival, arrival_s=(arrival.arrival_s - start_s) * stretch)
        for arrival in arrivals[:num_requests]
    ]


def repeated(arrivals: Sequence[Arrival], num_laps: int) -> list[Arrival]:
    """The trace num_laps times over; between two laps lies a mean gap."""
    last_s = arrivals[-1].arrival_s - arrivals[0].arrival_s
    lap_s = last_s * len(arrivals) / max(1, len(arrivals) - 1)
    return [
        replace(arrival, arrival_s=arrival.arrival_s + lap * lap_s)
        for lap in range(num_laps)
        for arrival in arrivals
    ]


def _shortened(
    arrival: Arrival, model_length_tokens: int, prompt_divisor: int, output_divisor: int
) -> Arrival:
    longest_output_tokens = max(1, model_length_tokens // 2)
    output_tokens = min(
        max(1, round(arrival.output_tokens / output_divisor)), longest_output_tokens
    )
    longest_prompt_tokens = max(1, model_length_tokens - output_tokens)
    prompt_tokens = min(
        max(1, round(arrival.prompt_tokens / prompt_divisor)), longest_prompt_tokens
    )
    return replace(arrival, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
