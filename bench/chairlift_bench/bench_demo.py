"""The demo's figures: alternating rounds of its runs, medians and spread.

`python -m chairlift_bench.bench_demo` measures once, then repeats static, fixed, tuned, and tuned
without the backlog; each round begins with another. Writes bench/results/demo.json, the page and
the picture of the round nearest the median, and prints the claims last. `make bench-demo` calls it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from chairlift_bench import rush_formula
from chairlift_bench.rush import (
    FAILURES,
    KINDS,
    Options,
    parse_options,
    prepare,
    result_of,
    run,
    say,
    show,
    write_json,
)
from chairlift_bench.rush_figures import Claim, claims_of, figures_of
from chairlift_bench.rush_plan import RushPlan, make_plan
from chairlift_bench.rush_report import method_lines, write_report
from chairlift_bench.rush_run import RunKind, RunRecord

NUM_ROUNDS: Final = 3
ALL_KINDS: Final = (*KINDS, RunKind.TUNED_ALONE)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv, "python -m chairlift_bench.bench_demo")
    try:
        prepare(options)
        plan, rounds = asyncio.run(_rounds(options))
    except FAILURES as error:
        print(f"bench-demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    figures = [{r.kind: figures_of(r, plan.load) for r in records} for records in rounds]
    claims = claims_of(figures)
    middle = _middle([round_[RunKind.TUNED].interactive.num_good for round_ in figures])
    show(Console(), plan, rounds[middle], list(figures[middle].values()))
    Console().print(_claims_table(claims))
    written = write_report(options.folder, "demo", plan, rounds[middle], claims)
    result = result_of(plan, [record for records in rounds for record in records], claims)
    write_json(options.folder / "demo.json", result)
    print(f"report: {written.page}\npicture: {written.picture}\nall: {options.folder}/demo.json")
    for claim in claims:
        print(claim.line)
    return 1 if any(f.num_failed for round_ in figures for f in round_.values()) else 0


async def _rounds(options: Options) -> tuple[RushPlan, list[list[RunRecord]]]:
    started_s = time.monotonic()
    phases = rush_formula.phases(options.scale)
    plan = await make_plan(options.pool_file, options.settings, phases, options.folder, say)
    for line in method_lines(plan):
        say(line)
    rounds: list[list[RunRecord]] = []
    for number in range(NUM_ROUNDS):
        records = []
        for kind in (*ALL_KINDS[number:], *ALL_KINDS[:number]):
            elapsed_s = time.monotonic() - started_s
            say(f"round {number + 1} of {NUM_ROUNDS}: {kind} ({elapsed_s:.0f} s so far)")
            records.append(await run(options, plan, kind, f"-{number + 1}"))
        rounds.append(sorted(records, key=lambda r: ALL_KINDS.index(r.kind)))
    return plan, rounds


def _middle(values: Sequence[int]) -> int:
    """The round whose value is the median."""
    return sorted(range(len(values)), key=lambda i: values[i])[len(values) // 2]


def _claims_table(claims: Sequence[Claim]) -> Table:
    table = Table(title="Medians over rounds", title_justify="left")
    for column in ("figure", "median", "rounds", "wanted", "holds"):
        table.add_column(column, justify="right" if column in ("median", "rounds") else "left")
    for claim in claims:
        values = " ".join(f"{value:.2f}" for value in claim.values)
        shown = claim.line.split()[-1]
        table.add_row(claim.name, shown, values, claim.wanted, "yes" if claim.holds else "no")
    return table


if __name__ == "__main__":
    sys.exit(main())
