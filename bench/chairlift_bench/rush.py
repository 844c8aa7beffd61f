"""The demo: a lunch rush served statically, with fixed knobs, and tuned, on this machine.

`python -m chairlift_bench.rush` gets the model, measures the machine, derives objectives and load
from that, runs all three through `chairlift local`, and writes a page and a picture. Exits 1 when
any request failed. `make demo` calls it; `bench_demo` repeats its runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from chairlift_bench import rush_formula
from chairlift_bench.local_server import LocalServerFailed, ensure_model
from chairlift_bench.prompts import REPOSITORY
from chairlift_bench.rush_figures import (
    Claim,
    RunFigures,
    claims_of,
    figures_of,
    moves_of,
    thresholds,
)
from chairlift_bench.rush_plan import RushPlan, make_plan
from chairlift_bench.rush_report import COLUMNS, method_lines, row, write_report
from chairlift_bench.rush_run import RunKind, RunRecord, run_once
from chairlift_bench.step_calibration import CalibrationFailed
from chairlift_cli.errors import CliError
from chairlift_cli.pool_file import read_pool

KINDS = (RunKind.STATIC, RunKind.FIXED, RunKind.TUNED)
FAILURES = (CliError, LocalServerFailed, CalibrationFailed, aiohttp.ClientError, ValueError)


@dataclass(frozen=True, slots=True)
class Options:
    pool_file: Path
    settings: tuple[str, ...]
    folder: Path
    scale: float


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv, "python -m chairlift_bench.rush")
    try:
        prepare(options)
        plan, records = asyncio.run(_one_round(options))
    except FAILURES as error:
        print(f"rush: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    figures = [figures_of(record, plan.load) for record in records]
    show(Console(), plan, records, figures)
    claims = claims_of([{f.kind: f for f in figures}])
    written = write_report(options.folder, "rush", plan, records, claims)
    write_json(options.folder / "rush.json", result_of(plan, records, claims))
    print(f"report: {written.page}\npicture: {written.picture}")
    tuned = next(f for f in figures if f.kind is RunKind.TUNED)
    for claim in claims:
        print(claim.line)
    print(f"claim ride_failed_requests {tuned.num_failed}")
    print(f"claim ride_policy_changes {tuned.num_policy_changes}")
    return 1 if sum(f.num_failed for f in figures) else 0


def prepare(options: Options) -> None:
    """The model in its cache and the folder for results."""
    pool = read_pool(options.pool_file, options.settings)
    options.folder.mkdir(parents=True, exist_ok=True)
    ensure_model(pool)


async def _one_round(options: Options) -> tuple[RushPlan, list[RunRecord]]:
    started_s = time.monotonic()
    phases = rush_formula.phases(options.scale)
    plan = await make_plan(options.pool_file, options.settings, phases, options.folder, say)
    for line in method_lines(plan):
        say(line)
    records = []
    for number, kind in enumerate(KINDS, start=1):
        say(f"run {number} of {len(KINDS)}: {kind} ({time.monotonic() - started_s:.0f} s so far)")
        records.append(await run(options, plan, kind))
    return plan, records


async def run(options: Options, plan: RushPlan, kind: RunKind, suffix: str = "") -> RunRecord:
    name = str(kind).replace(", ", "-").replace(" ", "-")
    journal_file = options.folder / f"rush-{name}{suffix}.journal.jsonl"
    settings = plan.settings(kind)
    load = replace(plan.load, backlog=()) if kind is RunKind.TUNED_ALONE else plan.load
    return await run_once(kind, plan.pool_file, plan.pool, settings, load, journal_file, say)


def say(line: str) -> None:
    print(line, flush=True)


def show(
    console: Console, plan: RushPlan, records: Sequence[RunRecord], figures: Sequence[RunFigures]
) -> None:
    table = Table(title=f"Good: {thresholds(plan.load.slo)}", title_justify="left")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if number else "left")
    for each in figures:
        table.add_row(*row(each, plan))
    console.print(table)
    for record in records:
        for outcome in (*record.interactive, *record.batch):
            if outcome.error is not None:
                say(f"failed in {record.kind}: {outcome.error}")
        if record.kind is RunKind.TUNED:
            console.print(_decisions(record))


def _decisions(record: RunRecord) -> Table:
    table = Table(title="What the controller changed, and why", title_justify="left")
    table.add_column("at", justify="right")
    table.add_column("change and reason", overflow="fold")
    for move in moves_of(record.changes):
        table.add_row(f"{move.at_s:.0f} s", move.sentence)
    return table


def result_of(
    plan: RushPlan, records: Sequence[RunRecord], claims: Sequence[Claim]
) -> dict[str, Any]:
    return {
        "plan": plan.to_json(),
        "claims": [asdict(claim) for claim in claims],
        "runs": [
            {"figures": figures_of(record, plan.load).to_json(), **record.to_json()}
            for record in records
        ],
    }


def write_json(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def parse_options(argv: Sequence[str] | None, program: str) -> Options:
    parser = argparse.ArgumentParser(
        prog=program,
        description="A lunch rush served statically, with fixed knobs, and tuned.",
        epilog=f"example: {program} --set runtime.engine=simulator --scale 0.5",
        allow_abbrev=False,
    )
    add = parser.add_argument
    pool_file = REPOSITORY / "examples" / "lunch-rush.yaml"
    add("--pool", type=Path, default=pool_file, metavar="POOL.YAML")
    add("--set", action="append", default=[], metavar="PATH=VALUE", dest="settings",
        help="change a field of the pool's spec; repeatable")  # fmt: skip
    add("--out", type=Path, default=REPOSITORY / "bench" / "results", metavar="FOLDER")
    add("--scale", type=float, default=1.0, help="length of the phases (default: 1)")
    args = parser.parse_args(argv)
    return Options(args.pool, tuple(args.settings), args.out, args.scale)


if __name__ == "__main__":
    sys.exit(main())
