"""When requests arrive and how long they are: a production trace, scaled to a small model.

Knows nothing of text or servers. `prompts` fills the lengths with words, `load` sends them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from chairlift_simulation.arrival_traces import Arrival

EXCERPT: Final = Path(__file__).parents[1] / "traces" / "azure_conv_excerpt.csv"
# The model here is small, the trace's was not.
PROMPT_DIVISOR: Final = 8
OUTPUT_DIVISOR: Final = 4


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
