"""The control law against every baseline: scenarios, hardware and seeds in virtual time.

`python -m chairlift_bench.evaluate [quick|usual|full]`; `make evaluate-quick`, `evaluate` and
`evaluate-full` call it. Two processes carry runs out; figures go to bench/results/evaluate.json,
the report beside it, and the claims to the end of what is printed.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Final

from chairlift_bench.claims import RESULTS
from chairlift_bench.evaluate_claims import claims_of, intervals_of
from chairlift_bench.evaluate_figures import Figures
from chairlift_bench.evaluate_report import write_report
from chairlift_bench.evaluate_runs import (
    SIZES,
    Run,
    Size,
    best_settings,
    carry_out,
    runs_of,
    tuning_runs,
)

NUM_PROCESSES: Final = 2
SAY_EVERY_S: Final = 10.0
DONE: Final = RESULTS / "evaluate.done.jsonl"  # a line for each run, as soon as it has ended


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", nargs="?", choices=tuple(SIZES), default="usual")
    parser.add_argument("--only", action="append", default=[], metavar="SCENARIO",
        help="leave the other scenarios out; repeatable")  # fmt: skip
    parser.add_argument("--seed", action="append", default=[], type=int, metavar="N",
        help="leave the other seeds out; repeatable")  # fmt: skip
    parser.add_argument("--profile", action="append", default=[], metavar="NAME",
        help="leave other hardware out; repeatable")  # fmt: skip
    parser.add_argument("--resume", action="store_true",
        help="keep what an interrupted evaluation of the same code has done")  # fmt: skip
    parser.add_argument("--report-to", type=Path, metavar="FOLDER",
        help="where evaluation.md and its pictures go (default: bench/results)")  # fmt: skip
    args = parser.parse_args(argv)
    size = SIZES[args.size]
    started_s = time.monotonic()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if not args.resume:
        DONE.unlink(missing_ok=True)
    baselines = best_settings(_carried_out(tuning_runs(), size) if size.tunes else {})
    print(f"baselines: {', '.join(baselines)}")
    runs = [
        run
        for run in runs_of(size, baselines)
        if (not args.only or run.scenario in args.only)
        and (not args.seed or run.seed in args.seed)
        and (not args.profile or run.profile in args.profile)
    ]
    figures = _carried_out(runs, size)
    print(f"{len(runs)} runs in {(time.monotonic() - started_s) / 60:.1f} minutes")
    claims, intervals = claims_of(figures), intervals_of(figures)
    path = RESULTS / "evaluate.json"
    path.write_text(_as_json(size, figures, claims, intervals), encoding="utf-8")
    report = write_report(args.report_to or RESULTS, size, figures, claims, intervals)
    print(f"all figures: {path}\nreport: {report}")
    for claim, value in claims.items():
        print(f"claim {claim} {value:.4g}")


def _carried_out(runs: Sequence[Run], size: Size) -> dict[Run, Figures]:
    """The longest first, so that both processes end at about the same time."""
    known = _done_before()
    figures = {run: known[run] for run in runs if run in known}
    order = sorted(set(runs) - set(figures), key=lambda r: (-r.cost_s, r))
    started_s = said_s = time.monotonic()
    with (
        ProcessPoolExecutor(NUM_PROCESSES, initializer=_begin_process) as processes,
        DONE.open("a", encoding="utf-8") as done_file,
    ):
        waiting = {processes.submit(_carry_out, run, size.minutes): run for run in order}
        for num_done, done in enumerate(as_completed(waiting), start=1):
            run = waiting[done]
            if (error := done.exception()) is not None:
                processes.shutdown(wait=False, cancel_futures=True)
                raise RuntimeError(f"{run} failed") from error
            figures[run] = done.result()
            print(json.dumps({**asdict(run), **figures[run].to_json()}), file=done_file, flush=True)
            now_s = time.monotonic()
            if now_s - said_s >= SAY_EVERY_S or num_done == len(order):
                said_s = now_s
                left_s = time_left_s(now_s - started_s, set(order) & set(figures), order)
                print(
                    f"  {num_done} of {len(order)} runs, about {left_s / 60:.0f} minutes left; "
                    f"{run.scenario} {run.profile} {run.law} seed {run.seed}: "
                    f"{100 * figures[run].good_share:.0f} % good"
                )
    return figures


def _begin_process() -> None:
    os.nice(5)
    # A run makes hardly any cycles before it ends, and spent 4 % of its time on looking for them.
    gc.disable()
    gc.freeze()


def _carry_out(run: Run, minutes: float) -> Figures:
    try:
        return carry_out(run, minutes)
    finally:
        gc.collect()


def time_left_s(elapsed_s: float, done: Collection[Run], runs: Collection[Run]) -> float:
    """Until all runs are done: long ones go first, so they are weighed by what they cost."""
    done_s, all_s = (sum(run.cost_s for run in some) for some in (done, runs))
    return elapsed_s * (all_s - done_s) / done_s


def _done_before() -> dict[Run, Figures]:
    if not DONE.exists():
        return {}
    found = {}
    for line in DONE.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        run = Run(*(values[name] for name in Run.__dataclass_fields__))
        found[run] = Figures.from_json(values)
    return found


def _as_json(
    size: Size,
    figures: Mapping[Run, Figures],
    claims: Mapping[str, float],
    intervals: Mapping[str, tuple[float, float]],
) -> str:
    body = {
        "size": size.name,
        "claims": {k: _finite(v) for k, v in claims.items()},
        "intervals": {k: [_finite(v) for v in ends] for k, ends in intervals.items()},
        "runs": [{**asdict(run), **figures[run].to_json()} for run in sorted(figures)],
    }
    return json.dumps(body, indent=1, allow_nan=False) + "\n"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    main()
