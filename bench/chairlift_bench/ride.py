"""The demo: a real model behind `chairlift local`, production-shaped traffic, the loop at work.

`python -m chairlift_bench.ride` gets the model, starts the pool, answers one question, measures
this machine, replays part of a production trace at a share of what was measured, and says what
clients saw and what the controller did. Exits 1 when any request failed. `make demo` calls it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TypeAlias

import aiohttp
from rich.console import Console

from chairlift_bench import calibration
from chairlift_bench.arrivals import (
    PROMPT_DIVISOR,
    Arrival,
    at_mean_rate,
    read_arrivals,
    with_lengths_divided,
)
from chairlift_bench.journal_tail import JournalTail
from chairlift_bench.load import Load, PlannedRequest
from chairlift_bench.local_server import LocalServerFailed, ensure_model, local_server
from chairlift_bench.outcomes import Outcome, Slo, Summary
from chairlift_bench.prompts import REPOSITORY, PromptBook
from chairlift_bench.ride_view import RideView, changes_table, summary_table
from chairlift_cli.errors import CliError
from chairlift_cli.local import read_pool
from chairlift_operator.spec import InferencePool

LOAD_SHARE: Final = 0.5
QUESTION: Final = "Why does a chairlift never wait to fill up?"
ANSWER_TOKENS: Final = 60

Say: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RideOptions:
    pool_file: Path
    settings: Sequence[str]
    duration_s: float
    out: Path


@dataclass(frozen=True, slots=True)
class Ride:
    """What a ride found. outcomes: of the replay; num_failed counts every request ever sent."""

    capacity: calibration.Capacity
    rate_requests_per_s: float
    outcomes: tuple[Outcome, ...]
    summary: Summary
    num_failed: int


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    console = Console()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    journal = JournalTail(options.out.with_suffix(".journal.jsonl"))
    journal.path.unlink(missing_ok=True)
    try:
        pool = read_pool(options.pool_file, options.settings)
        ensure_model(pool)
        found = asyncio.run(_ride(options, pool, journal, console))
    except (CliError, LocalServerFailed, aiohttp.ClientError) as error:
        print(f"ride: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    slo = _slo(pool)
    console.print(summary_table(found.summary, slo))
    console.print(changes_table(journal.changes))
    _write(options.out, found, journal)
    print(f"results: {options.out}, every tick: {journal.path}")
    print(f"claim ride_failed_requests {found.num_failed}")
    print(f"claim ride_policy_changes {journal.num_policy_changes}")
    return 1 if found.num_failed else 0


async def _ride(
    options: RideOptions, pool: InferencePool, journal: JournalTail, console: Console
) -> Ride:
    def say(line: str) -> None:
        print(line, flush=True)

    book = PromptBook.load()
    trace = with_lengths_divided(
        read_arrivals(), pool.spec.model.max_length, output_divisor=PROMPT_DIVISOR
    )
    async with local_server(options.pool_file, journal.path, say, options.settings) as url:
        model = pool.spec.model.name
        warm_up = Load(url, model)
        await warm_up.run([PlannedRequest(0.0, "Hello!", 8)])
        await warm_up.run([PlannedRequest(0.0, QUESTION, ANSWER_TOKENS)])
        say(f"asked:    {QUESTION}")
        say(f"answered: {warm_up.outcomes[-1].text.strip()}")

        chars_per_token = await calibration.chars_per_token(url, book.sample())
        capacity = await _calibrate(lambda: Load(url, model), trace, book, chars_per_token, say)
        rate = min(LOAD_SHARE * capacity.requests_per_s, (len(trace) - 2) / options.duration_s)
        if rate <= 0:
            raise LocalServerFailed("no request of the calibration burst was answered")
        arrivals = at_mean_rate(trace, rate, options.duration_s)
        say(
            f"replaying {len(arrivals)} requests of the Azure trace over "
            f"{options.duration_s:.0f} s ({LOAD_SHARE:.0%} of that)"
        )
        requests = calibration.planned(arrivals, book, chars_per_token)
        outcomes, elapsed_s = await _replay(
            Load(url, model), requests, RideView(console, _slo(pool), journal)
        )
    journal.read()
    sent = [*warm_up.outcomes, *capacity.outcomes, *outcomes]
    for outcome in sent:
        if outcome.error is not None:
            say(f"failed: {outcome.error}")
    return Ride(
        capacity=capacity,
        rate_requests_per_s=rate,
        outcomes=tuple(outcomes),
        summary=Summary.of(outcomes, _slo(pool), elapsed_s),
        num_failed=sum(o.error is not None for o in sent),
    )


async def _calibrate(
    load: Callable[[], Load],
    trace: Sequence[Arrival],
    book: PromptBook,
    chars_per_token: float,
    say: Say,
) -> calibration.Capacity:
    seconds = calibration.SETTLE_S + calibration.BURST_S
    say(f"measuring what this machine carries, for about {seconds:.0f} s …")
    requests = calibration.planned(
        trace[-500:], book, chars_per_token, first_seed=calibration.FIRST_SEED
    )
    capacity = await calibration.measure(load, calibration.endless(requests))
    say(
        f"this machine carries {capacity.requests_per_s:.2f} requests/s "
        f"({capacity.prompt_tokens_per_s:.0f} prompt and {capacity.output_tokens_per_s:.0f} output "
        "tokens/s)"
    )
    return capacity


async def _replay(
    load: Load, requests: Sequence[PlannedRequest], view: RideView
) -> tuple[list[Outcome], float]:
    started_s = time.monotonic()
    with view:
        running = asyncio.create_task(load.run(requests))
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=view.every_s)
                view.show(load)
            return running.result(), time.monotonic() - started_s
        finally:
            running.cancel()


def _slo(pool: InferencePool) -> Slo:
    slo = pool.spec.interactive.slo
    return Slo(
        ttft_s=slo.time_to_first_token.threshold_s,
        gap_s=slo.inter_token_latency.threshold_s,
        gap_percent=slo.inter_token_latency.percent,
    )


def _write(out: Path, found: Ride, journal: JournalTail) -> None:
    capacity = {k: v for k, v in asdict(found.capacity).items() if k != "outcomes"}
    result = {
        "summary": found.summary.to_json(),
        "failed_requests": found.num_failed,
        "policy_changes": journal.num_policy_changes,
        "capacity": capacity,
        "rate_requests_per_s": found.rate_requests_per_s,
        "changes": [asdict(change) for change in journal.changes],
        "requests": [asdict(outcome) for outcome in found.outcomes],
    }
    out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _options(argv: Sequence[str] | None) -> RideOptions:
    parser = argparse.ArgumentParser(
        prog="python -m chairlift_bench.ride",
        description="A real model, production-shaped traffic, the control loop: on this machine.",
        epilog="example: python -m chairlift_bench.ride --duration-s 120",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--pool", type=Path, default=REPOSITORY / "examples" / "chat.yaml", metavar="POOL.YAML")
    add("--set", action="append", default=[], metavar="PATH=VALUE", dest="settings",
        help="change a field of the pool's spec; repeatable")  # fmt: skip
    add("--duration-s", type=float, default=90.0, help="length of the replay (default: 90)")
    add("--out", type=Path, default=REPOSITORY / "bench" / "results" / "ride.json", metavar="FILE")
    args = parser.parse_args(argv)
    return RideOptions(args.pool, args.settings, args.duration_s, args.out)


if __name__ == "__main__":
    sys.exit(main())
