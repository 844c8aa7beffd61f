"""What this machine can carry inside its objectives: closed-loop bursts of trace-like requests.

Absolute rates mean nothing across machines, so `ride` offers a share of what was measured here. A
first burst lets the controller find knobs that keep the objectives; the second one is measured.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import aiohttp

from chairlift_bench.arrivals import Arrival
from chairlift_bench.load import Load, PlannedRequest
from chairlift_bench.outcomes import Outcome
from chairlift_bench.prompts import PromptBook
from chairlift_protocol.wire import TOKENIZE_PATH

NUM_CLIENTS = 8
SETTLE_S = 20.0
BURST_S = 15.0
# Calibration asks other questions than the measured run: neither repeats the other's prompts.
FIRST_SEED = 1_000_000


@dataclass(frozen=True, slots=True)
class Capacity:
    """Measured until the last request of the burst had ended, so rather too low than too high.

    outcomes: of both bursts.
    """

    outcomes: tuple[Outcome, ...]
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float


async def chars_per_token(base_url: str, text: str) -> float:
    """By the served model's own tokenizer."""
    async with (
        aiohttp.ClientSession(raise_for_status=True) as client,
        client.post(base_url + TOKENIZE_PATH, json={"prompt": text}) as response,
    ):
        num_tokens = int((await response.json())["count"])
    return len(text) / num_tokens


async def measure(load: Callable[[], Load], requests: Iterator[PlannedRequest]) -> Capacity:
    settling = await load().run_closed(requests, NUM_CLIENTS, SETTLE_S)
    started_s = time.monotonic()
    outcomes = await load().run_closed(requests, NUM_CLIENTS, BURST_S)
    elapsed_s = time.monotonic() - started_s
    complete = [o for o in outcomes if o.error is None]
    return Capacity(
        outcomes=(*settling, *outcomes),
        requests_per_s=len(complete) / elapsed_s,
        prompt_tokens_per_s=sum(o.prompt_tokens for o in complete) / elapsed_s,
        output_tokens_per_s=sum(o.output_tokens for o in complete) / elapsed_s,
    )


def planned(
    arrivals: Sequence[Arrival], book: PromptBook, chars_per_token: float, first_seed: int = 0
) -> list[PlannedRequest]:
    """The trace's lengths filled with words; the same for the same arguments."""
    return [
        PlannedRequest(
            due_s=arrival.arrival_s,
            prompt=book.prompt(arrival.prompt_tokens, first_seed + number, chars_per_token),
            max_tokens=arrival.output_tokens,
        )
        for number, arrival in enumerate(arrivals)
    ]


def endless(requests: Sequence[PlannedRequest]) -> Iterator[PlannedRequest]:
    return itertools.cycle(requests)
