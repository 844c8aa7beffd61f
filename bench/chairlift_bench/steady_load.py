"""`python -m chairlift_bench.steady_load URL MODEL`: chat streams at a steady rate, then a summary.

Arrivals are Poisson and the same for the same seed. The last line printed is a JSON object with the
summary and the first errors; the exit code is 1 when any request failed. Needs aiohttp alone, so
that it runs in a pod beside the gateway that it loads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from chairlift_bench.load import Load, PlannedRequest
from chairlift_bench.outcomes import Outcome, Slo, Summary

MAX_ERRORS_SHOWN: Final = 10
PATIENCE_S: Final = 600.0  # as the openai client has it
WORDS: Final = "snow "
ANY: Final = Slo(ttft_s=math.inf, gap_s=math.inf, gap_percent=0.0)


@dataclass(frozen=True, slots=True)
class Steady:
    """prompt_chars is also the number of tokens for a simulated engine, which reads bytes."""

    requests_per_s: float
    duration_s: float
    prompt_chars: int
    max_tokens: int
    seed: int


def plan(load: Steady) -> list[PlannedRequest]:
    draw = random.Random(load.seed)
    requests: list[PlannedRequest] = []
    due_s = draw.expovariate(load.requests_per_s)
    while due_s < load.duration_s:
        # Each prompt begins differently, so that no prefix cache makes them cheap.
        start = f"{load.seed}-{len(requests)}: "
        prompt = (start + WORDS * load.prompt_chars)[: max(len(start), load.prompt_chars)]
        requests.append(PlannedRequest(due_s, prompt, load.max_tokens, exact_length=True))
        due_s += draw.expovariate(load.requests_per_s)
    return requests


def summarise(outcomes: Sequence[Outcome], elapsed_s: float) -> dict[str, Any]:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    summary = Summary.of(outcomes, ANY, elapsed_s).to_json()
    return {**summary, "errors": errors[:MAX_ERRORS_SHOWN]}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    load = Steady(
        options.requests_per_s,
        options.duration_s,
        options.prompt_chars,
        options.max_tokens,
        options.seed,
    )
    sending = Load(options.url, options.model, patience_s=PATIENCE_S)
    outcomes = asyncio.run(sending.run(plan(load)))
    summary = summarise(outcomes, load.duration_s)
    print(json.dumps(summary), flush=True)
    return 1 if summary["num_failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("chairlift_bench.steady_load", description=__doc__)
    add = parser.add_argument
    add("url", help="of a gateway, without /v1; with /batch at its end the requests are batch work")
    add("model")
    add("--requests-per-s", type=float, default=1.0)
    add("--duration-s", type=float, default=60.0, help="of arrivals; the last answers come later")
    add("--prompt-chars", type=int, default=200)
    add("--max-tokens", type=int, default=64)
    add("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
