"""What the gateway costs, with identity, quota in a real Redis and accounting on, beside nginx as a
plain proxy: `make bench-gateway`.

An engine's stand-in writes one event to each stream every 20 ms, as an engine does at each step.
First the time to the first event, at a load that leaves the cores half idle, found anew for each
round: direct, through the gateway, through nginx, in turns. Then many streams at once: events that
passed, by the proxy's own processor time. Each round compares within itself; medians of the rounds
are claimed, and the spread is told.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from chairlift_bench.claims import publish
from chairlift_bench.gateway_load import steadily, together
from chairlift_bench.gateway_setup import Cores, Measured, NoNginx, Ways, running_ways
from chairlift_bench.outcomes import percentile
from chairlift_bench.redis_process import NoRedis

STEP_MS: Final = 20.0
NUM_ROUNDS: Final = 5
TURN_S: Final = 8.0
ANSWER_TOKENS: Final = 16
# Enough for what is done once for a request to be little beside the events.
NUM_STREAMS, STREAM_TOKENS = 64, 250
WANTED_BUSY_SHARE: Final = 0.5
LEAST_PER_S, TRIAL_S, MAX_GROWTH = 20.0, 3.0, 2.5
# At first, and before each round, as the machine may have become slower or faster.
NUM_TRIALS, NUM_TRIALS_AGAIN = 5, 2


@dataclass(frozen=True, slots=True)
class Turn:
    """One way in one round. busy_share: of all cores, by whoever."""

    name: str
    first_p50_ms: float
    first_p95_ms: float
    busy_share: float
    events_per_cpu_s: float


@dataclass(frozen=True, slots=True)
class Round:
    requests_per_s: float
    turns: Sequence[Turn]


async def measure(ways: Ways, num_rounds: int, turn_s: float) -> list[Round]:
    each_way = [ways.direct, ways.gateway, ways.nginx]
    rate_per_s = await _rate(ways, LEAST_PER_S, NUM_TRIALS)
    rounds = []
    for number in range(num_rounds):
        # Another one begins each time.
        order = each_way[number % 3 :] + each_way[: number % 3]
        rate_per_s = await _rate(ways, rate_per_s, NUM_TRIALS_AGAIN)
        print(f"{rate_per_s:.0f} requests a second of {ANSWER_TOKENS} tokens")
        rounds.append(Round(rate_per_s, [await _turn(way, rate_per_s, turn_s) for way in order]))
        for turn in rounds[-1].turns:
            print(
                f"{turn.name}: first event p50 {turn.first_p50_ms:.2f}, p95 "
                f"{turn.first_p95_ms:.2f} ms, cores busy {turn.busy_share:.0%}, "
                f"{turn.events_per_cpu_s:,.0f} events for each second of its processor time"
            )
    return rounds


async def _rate(ways: Ways, rate_per_s: float, num_trials: int) -> float:
    """Requests a second at which half of the cores are busy when they go through the gateway.

    Found by trying, from rate_per_s on: a part of the work is done whether requests come or not,
    and others may keep the machine busy, now more and then less.
    """
    for _ in range(num_trials):
        before = Cores.now()
        await steadily(ways.gateway.target, rate_per_s, TRIAL_S, ANSWER_TOKENS)
        busy_share = Cores.now().busy_share_since(before)
        more = min(MAX_GROWTH, WANTED_BUSY_SHARE / max(busy_share, 0.01))
        rate_per_s = max(LEAST_PER_S, more * rate_per_s)
    return rate_per_s


async def _turn(way: Measured, rate_per_s: float, turn_s: float) -> Turn:
    before = Cores.now()
    told = await steadily(way.target, rate_per_s, turn_s, ANSWER_TOKENS)
    busy_share = Cores.now().busy_share_since(before)
    first_ms = [seconds * 1000 for seconds in told.first_s]
    before_s = way.cpu_s()
    streamed = await together(way.target, NUM_STREAMS, STREAM_TOKENS)
    cpu_s = way.cpu_s() - before_s
    return Turn(
        way.target.name,
        percentile(first_ms, 50),
        percentile(first_ms, 95),
        busy_share,
        streamed.num_events / cpu_s if cpu_s else 0.0,
    )


def added_ms(rounds: Sequence[Sequence[Turn]], name: str, percent: int) -> list[float]:
    """Of each round, how much later the first event comes than directly."""

    def of(turns: Sequence[Turn], who: str) -> float:
        turn = next(turn for turn in turns if turn.name == who)
        return turn.first_p50_ms if percent == 50 else turn.first_p95_ms

    return [of(turns, name) - of(turns, "direct") for turns in rounds]


def events_per_cpu_s(rounds: Sequence[Sequence[Turn]], name: str) -> list[float]:
    return [turn.events_per_cpu_s for turns in rounds for turn in turns if turn.name == name]


def figures_of(rounds: Sequence[Sequence[Turn]]) -> dict[str, list[float]]:
    return {
        f"{name}_{what}": values
        for name in ("gateway", "nginx")
        for what, values in (
            ("added_ttft_p50_ms", added_ms(rounds, name, 50)),
            ("added_ttft_p95_ms", added_ms(rounds, name, 95)),
            ("chunks_per_cpu_s", events_per_cpu_s(rounds, name)),
        )
    }


def spread_of(figures: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    return {name: {"min": min(v), "max": max(v), "rounds": list(v)} for name, v in figures.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--turn-s", type=float, default=TURN_S)
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder, running_ways(Path(folder), STEP_MS) as ways:
            measured = asyncio.run(measure(ways, args.rounds, args.turn_s))
    except (NoRedis, NoNginx) as error:
        print(f"bench-gateway: {error}", file=sys.stderr)
        return 2
    rounds = [each.turns for each in measured]
    figures = figures_of(rounds)
    claims = {name: statistics.median(values) for name, values in figures.items()}
    busy = [turn.busy_share for turns in rounds for turn in turns if turn.name == "gateway"]
    more = {"requests_per_s": [each.requests_per_s for each in measured], "busy_share": busy}
    publish("bench_gateway", claims, {**more, **spread_of(figures)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
