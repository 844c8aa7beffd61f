"""The law on the real engine: a cold start, tuned, against fixed settings.

`python -m chairlift_bench.bench_tuning` measures the machine, serves a rush without batch work
beside it, once with each fixed setting of a small grid and once more in reverse order, and then
compares in alternating rounds: tuned, the grid's best, and the default, which is what every engine
starts with. Every run is a pool of its own, started anew, with the same requests at the same times.
Writes bench/results/bench_tuning.json and prints the claims last. `make bench-tuning` calls it.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from chairlift_bench import rush_formula
from chairlift_bench.claims import publish
from chairlift_bench.rush import FAILURES, Options, parse_options, prepare, say
from chairlift_bench.rush_figures import RunFigures, figures_of, moves_of, thresholds
from chairlift_bench.rush_formula import Phase
from chairlift_bench.rush_plan import RushPlan, make_plan
from chairlift_bench.rush_report import machine_lines
from chairlift_bench.rush_run import RunKind, run_once, settings_of
from chairlift_operator.memory import Knobs
from chairlift_operator.policy_plan import FIRST_KNOBS

NUM_ROUNDS: Final = 5
# Of the capacity; more than in the demo, which has batch work beside it.
RUSH_SHARE: Final = 0.8
DEFAULT: Final = FIRST_KNOBS
GRID: Final = (DEFAULT, Knobs(8, 80), Knobs(32, 48), Knobs(32, 80), Knobs(32, 128))
TUNED: Final = "tuned"


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a setting. changes: what was moved, and why."""

    setting: str
    figures: RunFigures
    changes: tuple[str, ...]

    @property
    def num_good(self) -> int:
        return self.figures.interactive.num_good

    @property
    def line(self) -> str:
        seen = self.figures.interactive
        return (
            f"{self.setting}: {self.num_good} of {seen.num_requests} good, "
            f"p95 first token {seen.ttft_p95_s:.2f} s, {self.figures.num_failed} failed"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "setting": self.setting,
            "figures": self.figures.to_json(),
            "changes": self.changes,
        }


Measure = Callable[[Knobs | None], Awaitable[Measured]]


class Bench:
    """Runs settings one after the other; each pool is started for its run and ended after it."""

    def __init__(self, options: Options, plan: RushPlan) -> None:
        self._options = options
        self._plan = replace(plan, load=replace(plan.load, backlog=()))
        self._started_s = time.monotonic()
        self._num_runs = 0

    async def measure(self, knobs: Knobs | None) -> Measured:
        """knobs: fixed; None is tuned."""
        plan, name = self._plan, name_of(knobs)
        self._num_runs += 1
        elapsed_s = time.monotonic() - self._started_s
        say(f"run {self._num_runs} of {num_runs()}: {name} ({elapsed_s:.0f} s so far)")
        kind = RunKind.TUNED if knobs is None else RunKind.FIXED
        own = settings_of(kind, plan.load.slo, 1) + ([] if knobs is None else fixed_at(knobs))
        journal = self._options.folder / f"tuning-{self._num_runs}.journal.jsonl"
        settings = [*plan.given_settings, *own]
        record = await run_once(kind, plan.pool_file, plan.pool, settings, plan.load, journal, say)
        changes = tuple(f"{m.at_s:.0f} s: {m.sentence}" for m in moves_of(record.changes))
        measured = Measured(name, figures_of(record, plan.load), changes)
        say(measured.line)
        return measured


def name_of(knobs: Knobs | None) -> str:
    return TUNED if knobs is None else f"fixed {knobs.batch_size}/{knobs.step_tokens}"


def fixed_at(knobs: Knobs) -> list[str]:
    """What `--set` says so that an engine starts with these and nobody moves them."""
    return [
        f"interactive.{field}.{end}={value}"
        for field, value in (("batchSize", knobs.batch_size), ("stepTokens", knobs.step_tokens))
        for end in ("min", "max")
    ]


def phases(scale: float) -> tuple[Phase, ...]:
    calm, rush, again = rush_formula.phases(scale)
    return calm, replace(rush, share=RUSH_SHARE), again


def num_runs() -> int:
    return 2 * len(GRID) + 3 * NUM_ROUNDS


def best_of(grid: Sequence[Measured]) -> Knobs:
    """The most good requests over its runs; of equals, the shorter first tokens."""

    def merit(knobs: Knobs) -> tuple[int, float]:
        own = [m for m in grid if m.setting == name_of(knobs)]
        ttft_s = statistics.fmean(m.figures.interactive.ttft_p95_s for m in own)
        return sum(m.num_good for m in own), -ttft_s

    return max(GRID, key=merit)


def ratios(rounds: Sequence[Mapping[str, Measured]], other: str) -> list[float]:
    """Tuned over the other, by round. No good request counts as one."""
    return [r[TUNED].num_good / max(1, r[other].num_good) for r in rounds]


async def compare(measure: Measure) -> tuple[list[Measured], list[list[Measured]]]:
    """The grid, there and back, then the rounds; each round begins with another."""
    grid = [await measure(knobs) for knobs in (*GRID, *reversed(GRID))]
    kinds = (None, best_of(grid), DEFAULT)
    rounds = [
        [await measure(knobs) for knobs in (*kinds[number:], *kinds[:number])]
        for number in range(NUM_ROUNDS)
    ]
    return grid, rounds


async def _measure_all(options: Options) -> tuple[RushPlan, list[Measured], list[list[Measured]]]:
    plan = await make_plan(
        options.pool_file, options.settings, phases(options.scale), options.folder, say
    )
    for line in machine_lines(plan):
        say(line)
    return plan, *await compare(Bench(options, plan).measure)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv, "python -m chairlift_bench.bench_tuning")
    try:
        prepare(options)
        plan, grid, rounds = asyncio.run(_measure_all(options))
    except FAILURES as error:
        print(f"bench-tuning: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    best = name_of(best_of(grid))
    by_name = [{m.setting: m for m in measured} for measured in rounds]
    compared = {
        "real_goodput_vs_best_fixed": ratios(by_name, best),
        "real_goodput_vs_default": ratios(by_name, name_of(DEFAULT)),
    }
    say(f"good: {thresholds(plan.load.slo)}")
    for name, values in compared.items():
        say(f"{name}, by round: {', '.join(f'{value:.2f}' for value in values)}")
    figures = {
        "plan": plan.to_json(),
        "best": best,
        "ratios": compared,
        "grid": [m.to_json() for m in grid],
        "rounds": [[m.to_json() for m in measured] for measured in rounds],
    }
    claims = {name: statistics.median(values) for name, values in compared.items()}
    publish("bench_tuning", claims, figures, options.folder)
    everything = [*grid, *(m for measured in rounds for m in measured)]
    return 1 if any(m.figures.num_failed for m in everything) else 0


if __name__ == "__main__":
    sys.exit(main())
