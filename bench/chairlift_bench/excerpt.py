"""Cuts the busiest stretch out of an Azure LLM inference trace.

Made `bench/traces/azure_conv_excerpt.csv`, run once by hand: `python -m chairlift_bench.excerpt
AzureLLMInferenceTrace_conv.csv OUT.csv`. Nothing calls it at run time.
"""

from __future__ import annotations

import argparse
import csv
from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

STRETCH_S: Final = 1200.0
SEARCH_STEP_S: Final = 10.0
COLUMNS: Final = ("arrival_s", "context_tokens", "generated_tokens")


def busiest_start_s(arrivals_s: Sequence[float], stretch_s: float = STRETCH_S) -> float:
    """Where the stretch with the most arrivals begins, searched in steps of ten seconds."""

    def num_arrivals(start_s: float) -> int:
        return bisect_left(arrivals_s, start_s + stretch_s) - bisect_left(arrivals_s, start_s)

    num_steps = max(0, int((arrivals_s[-1] - stretch_s) // SEARCH_STEP_S))
    starts_s = [step * SEARCH_STEP_S for step in range(num_steps + 1)]
    return max(starts_s, key=num_arrivals)


def cut(source: Path, target: Path) -> int:
    """Write the busiest stretch with arrivals relative to its start; return its number of rows."""
    with source.open(newline="") as file:
        rows = list(csv.DictReader(file))
    # The trace has seven decimals, of which datetime takes six.
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    arrivals_s = [(time - times[0]).total_seconds() for time in times]
    start_s = busiest_start_s(arrivals_s)
    kept = range(bisect_left(arrivals_s, start_s), bisect_left(arrivals_s, start_s + STRETCH_S))
    with target.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for at in kept:
            row = rows[at]
            arrival = f"{arrivals_s[at] - start_s:.3f}"
            writer.writerow((arrival, row["ContextTokens"], row["GeneratedTokens"]))
    return len(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="AzureLLMInferenceTrace_conv.csv")
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    print(f"{args.target}: {cut(args.source, args.target)} arrivals")


if __name__ == "__main__":
    main()
