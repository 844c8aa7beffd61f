"""The report of a rush: one page that needs nothing else, and its picture as a file.

Writes what it is handed; measures nothing. `rush` and `bench_demo` call it.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chairlift_bench import rush_picture
from chairlift_bench.arrivals import OUTPUT_DIVISOR, PROMPT_DIVISOR
from chairlift_bench.rush_figures import Claim, RunFigures, figures_of, moves_of, thresholds
from chairlift_bench.rush_plan import RushPlan
from chairlift_bench.rush_run import RunKind, RunRecord
from chairlift_simulation.picture import png

COLUMNS: Final = (
    "run", "good", "goodput, req/s", "TTFT p50 / p95, s", "gap p50 / p95 / p99, ms",
    "tokens/s interactive", "tokens/s batch class", "failed",
)  # fmt: skip
PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Lunch rush</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 1180px;
  margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.1rem; margin-top: 2rem }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }}
th, td {{ text-align: right; padding: .35rem .6rem; border-bottom: 1px solid #e4e7eb }}
th {{ font-weight: 600; color: #52606d }} th:first-child, td:first-child {{ text-align: left }}
tr.tuned td {{ font-weight: 600; background: #eef6f1 }}
svg {{ width: 100%; height: auto }} li {{ margin: .2rem 0 }} .note {{ color: #52606d }}
</style></head><body>
<h1>Lunch rush: static, fixed and tuned on the same hardware</h1>
<p>{summary}</p>
{table}
<p class="note">Good: {good}. Goodput: good requests per second of arrivals. Tokens: prompt and
answer, per second until the last request had ended.</p>
{picture}
<h2>What the controller changed, and why</h2>
<ol>{decisions}</ol>
{claims}
<h2>How load and objectives were made</h2>
<ul>{method}</ul>
</body></html>
"""


@dataclass(frozen=True, slots=True)
class Written:
    """table: the runs' figures as Markdown, for a README."""

    page: Path
    picture: Path
    table: Path


def write_report(
    folder: Path, name: str, plan: RushPlan, records: Sequence[RunRecord], claims: Sequence[Claim]
) -> Written:
    shown = [r for r in records if r.kind is not RunKind.TUNED_ALONE]
    figure = rush_picture.drawn(shown, plan.load)
    files = (folder / f"{name}.{ending}" for ending in ("html", "png", "md"))
    written = Written(*files)
    rows = [row(figures_of(record, plan.load), plan) for record in records]
    written.table.write_text(markdown(COLUMNS, rows), encoding="utf-8")
    written.picture.write_bytes(png(figure))
    written.page.write_text(page(plan, records, claims, rush_picture.svg(figure)), encoding="utf-8")
    return written


def page(
    plan: RushPlan, records: Sequence[RunRecord], claims: Sequence[Claim], picture: str
) -> str:
    figures = [figures_of(record, plan.load) for record in records]
    tuned = next((r for r in records if r.kind is RunKind.TUNED), None)
    decisions = moves_of(tuned.changes) if tuned else []
    return PAGE.format(
        summary=html.escape(_summary(plan)),
        table=_table(COLUMNS, [row(f, plan) for f in figures], [f.kind for f in figures]),
        good=html.escape(thresholds(plan.load.slo)),
        picture=picture,
        decisions="".join(
            f"<li>at {move.at_s:.0f} s: {html.escape(move.sentence)}</li>" for move in decisions
        ),
        claims=_claims(claims),
        method="".join(f"<li>{html.escape(line)}</li>" for line in method_lines(plan)),
    )


def row(figures: RunFigures, plan: RushPlan) -> list[str]:
    own, batch = figures.interactive, figures.batch
    name = str(figures.kind)
    if figures.kind is RunKind.STATIC:
        name += f", batch {plan.static.batch_size}"
    return [
        name,
        f"{own.good_percent:.0f} %",
        f"{figures.goodput:.2f}",
        f"{own.ttft_p50_s:.1f} / {own.ttft_p95_s:.1f}",
        f"{1e3 * own.gap_p50_s:.0f} / {1e3 * own.gap_p95_s:.0f} / {1e3 * own.gap_p99_s:.0f}",
        f"{own.prompt_tokens_per_s + own.output_tokens_per_s:.0f}",
        f"{batch.prompt_tokens_per_s + batch.output_tokens_per_s:.0f}",
        str(figures.num_failed),
    ]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def machine_lines(plan: RushPlan) -> list[str]:
    """What this machine is, and what was derived from that."""
    costs, load = plan.calibration.costs, plan.load
    return [
        f"One step takes {1e3 * costs.fixed_s:.1f} ms + {1e3 * costs.decode_s:.2f} ms per decode + "
        f"{1e3 * costs.prefill_s:.2f} ms per prompt token here (typical error of the fit "
        f"{100 * plan.calibration.misfit:.0f} %); a stream alone has gaps of "
        f"{1e3 * plan.calibration.gap_s:.0f} ms.",
        f"Objectives from that by docs/decisions/0007: {thresholds(load.slo)}.",
        f"Capacity inside the objectives: {plan.requests_per_s:.2f} such requests/s; the rush "
        f"offers {load.requests_per_s(load.phases[1]):.2f}/s, static batching finishes at most "
        f"{plan.static.requests_per_s:.2f}/s.",
    ]


def method_lines(plan: RushPlan) -> list[str]:
    load, static = plan.load, plan.static
    tried = ", ".join(f"{size}: {100 * share:.0f} %" for size, share in static.rehearsed.items())
    return [
        *machine_lines(plan),
        f"Static batch size {static.batch_size}: good requests rehearsed by size {tried}; "
        f"{100 * static.without_backlog:.0f} % if there were no backlog.",
        f"{len(load.requests)} requests of the Azure conversation trace, prompts / "
        f"{PROMPT_DIVISOR}, answers / {OUTPUT_DIVISOR}; "
        f"beside them a batch-class backlog, the same in all runs.",
    ]


def _summary(plan: RushPlan) -> str:
    calm, rush, again = plan.load.phases
    return (
        f"The same {len(plan.load.requests)} chat requests at the same times, "
        f"{calm.duration_s:.0f} s of calm, {rush.duration_s:.0f} s of rush and "
        f"{again.duration_s:.0f} s of calm again, with batch work beside them; three ways to serve "
        "them, one after another, on the same engine and machine."
    )


def _claims(claims: Sequence[Claim]) -> str:
    if not claims:
        return ""
    rows = [
        [
            claim.name,
            claim.line.split()[-1],
            " ".join(f"{value:.2f}" for value in claim.values),
            claim.wanted,
            "yes" if claim.holds else "no",
        ]
        for claim in claims
    ]
    heading = "<h2>Medians over rounds</h2>"
    return heading + _table(
        ("figure", "median", "rounds", "wanted", "holds"), rows, [""] * len(rows)
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        f'<tr class="{html.escape(kind)}">'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for cells, kind in zip(rows, classes, strict=True)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
