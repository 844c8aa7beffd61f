"""The lunch rush as one picture: a column per run, a row per quantity, decisions numbered.

Draws what `rush_series` derives; decides nothing. matplotlib without a window; `rush_report` puts
it into a page and a file.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from chairlift_bench import rush_series
from chairlift_bench.outcomes import Outcome
from chairlift_bench.rush_figures import moves_of
from chairlift_bench.rush_load import RushLoad
from chairlift_bench.rush_run import RunKind, RunRecord
from chairlift_simulation.picture import FAINT, GREY, INK, STYLE

INTERACTIVE, BATCH = "#2563a8", "#c98a1b"
GOOD, BAD, LIMIT = "#2e8b57", "#c0392b", "#c0392b"
RUSH: Final = "#fdf3dc"
BIN_S: Final = 2.5
# Left out, so that the page names no other address and repeats to the byte.
SVG_METADATA: Final = ("Creator", "Date", "Format", "Type")
ROWS: Final = (
    "offered\nrequests/s",
    "time to first\ntoken, s",
    "p95 gap of each\nsecond, ms",
    "streams open\n(batch size)",
    "step tokens",
    "waiting for a\nfirst token",
)
HEIGHTS: Final = (0.8, 1.5, 1.2, 1.2, 1.0, 1.2)
TITLES: Final = {
    RunKind.STATIC: "static batching",
    RunKind.FIXED: "continuous, fixed knobs",
    RunKind.TUNED: "continuous, tuned",
}


def drawn(records: Sequence[RunRecord], load: RushLoad) -> Figure:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.4, 11.0), facecolor="white", layout="constrained")
        grid: Any = figure.subplots(
            len(ROWS),
            len(records),
            sharex=True,
            sharey="row",
            squeeze=False,
            height_ratios=HEIGHTS,
        )
        ends_s = max(record.elapsed_s for record in records)
        for column, record in enumerate(records):
            _column([row[column] for row in grid], record, load)
            grid[0][column].set_title(
                _title(record, load), loc="left", fontsize=10.5, fontweight="bold", pad=10
            )
            grid[-1][column].set_xlabel("seconds since the load began", color=GREY)
        for row, label in zip(grid, ROWS, strict=True):
            row[0].set_ylabel(label, rotation=0, ha="right", va="center", labelpad=8)
            for axes in row:
                axes.set_xlim(0, ends_s)
        return figure


def svg(figure: Figure) -> str:
    """To be put into a page: without the XML declaration and fixed size."""
    with matplotlib.rc_context(STYLE):
        written = io.StringIO()
        figure.savefig(
            written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    text = written.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", text, count=1)


def _title(record: RunRecord, load: RushLoad) -> str:
    num_good = sum(o.is_good(load.slo) for o in record.interactive)
    share = 100 * num_good / len(record.interactive)
    return f"{TITLES.get(record.kind, record.kind)}: {share:.0f} % good"


def _column(axes: Sequence[Axes], record: RunRecord, load: RushLoad) -> None:
    for one in axes:
        rush = load.phases[1]
        one.axvspan(rush.starts_s, rush.ends_s, color=RUSH, linewidth=0, zorder=0)
        one.grid(axis="y", color=FAINT, linewidth=0.6)
        one.set_axisbelow(True)
    drawings: tuple[Callable[[Axes], None], ...] = (
        lambda a: _offered(a, load),
        lambda a: _first_tokens(a, record.interactive, load),
        lambda a: _gaps(a, record.interactive, load),
        lambda a: _streams(a, record),
        lambda a: _step_tokens(a, record),
        lambda a: _queue(a, record),
    )
    for one, draw in zip(axes, drawings, strict=True):
        draw(one)


def _offered(axes: Axes, load: RushLoad) -> None:
    points = rush_series.arrivals_per_s((a.arrival_s for a in load.arrivals), BIN_S)
    axes.fill_between(*_steps(points), step="mid", color=INTERACTIVE, alpha=0.35, linewidth=0)
    axes.set_ylim(bottom=0)
    rush = load.phases[1]
    middle_s = (rush.starts_s + rush.ends_s) / 2
    axes.text(
        middle_s, 0.97, "rush", transform=axes.get_xaxis_transform(), ha="center", va="top",
        color=GREY, fontsize=8,
    )  # fmt: skip


def _first_tokens(axes: Axes, outcomes: Sequence[Outcome], load: RushLoad) -> None:
    axes.set_yscale("log")
    for is_good, colour in ((True, GOOD), (False, BAD)):
        shown = [o for o in outcomes if o.ttft_s is not None and o.is_good(load.slo) is is_good]
        axes.scatter(
            [o.due_s for o in shown],
            [o.ttft_s or 0.0 for o in shown],
            s=16,
            color=colour,
            linewidth=0,
            alpha=0.85,
            label="good request" if is_good else "bad request",
        )
    _limit(axes, load.slo.ttft_s, f"objective {load.slo.ttft_s:.1f} s")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(loc="lower right", fontsize=7.5, frameon=True, framealpha=0.85, edgecolor="none")


def _gaps(axes: Axes, outcomes: Sequence[Outcome], load: RushLoad) -> None:
    axes.set_yscale("log")
    points = rush_series.gaps_percentile(outcomes, 95, 1.0)
    axes.plot(*_in_ms(points), color=INTERACTIVE, linewidth=1.1, marker=".", markersize=3)
    _limit(axes, 1e3 * load.slo.gap_s, f"objective {1e3 * load.slo.gap_s:.0f} ms")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _streams(axes: Axes, record: RunRecord) -> None:
    limit = _knob(record, "batch size", "batch_size")
    highest = max(value for _, value in limit)
    for outcomes, colour, label in (
        ((*record.interactive, *record.batch), BATCH, "batch class"),
        (record.interactive, INTERACTIVE, "interactive"),
    ):
        points = rush_series.streaming(outcomes)
        highest = max(highest, *(value for _, value in points))
        axes.fill_between(
            *_steps(points), step="post", color=colour, alpha=0.8, linewidth=0, label=label
        )
    axes.step(*_steps(limit), where="post", color=INK, linewidth=1.3, label="batch size")
    axes.set_ylim(0, max(axes.get_ylim()[1], 1.3 * highest))
    axes.legend(loc="upper right", fontsize=7.5, ncols=3, frameon=False, columnspacing=1.0)
    if record.kind is RunKind.TUNED:
        _mark(axes, record, {"batch size", "batch share"})


def _step_tokens(axes: Axes, record: RunRecord) -> None:
    if record.kind is RunKind.STATIC:
        axes.text(
            0.02, 0.5, "no budget: whole prompts, padded to the longest",
            transform=axes.transAxes, color=GREY, fontsize=8, va="center",
        )  # fmt: skip
        return
    points = _knob(record, "step tokens", "step_tokens")
    axes.step(*_steps(points), where="post", color=INK, linewidth=1.3)
    axes.set_ylim(bottom=0)
    if record.kind is RunKind.TUNED:
        _mark(axes, record, {"step tokens"})


def _knob(record: RunRecord, field: str, attribute: str) -> list[tuple[float, float]]:
    """From the value that the run began with; a move counts from when it was decided."""
    before = [k for k in record.knobs if k.at_s <= 0] or list(record.knobs[:1])
    first = float(getattr(before[-1], attribute)) if before else 0.0
    moves = [m for m in moves_of(record.changes) if m.field == field and m.at_s > 0]
    return rush_series.knob(first, moves, record.elapsed_s)


def _queue(axes: Axes, record: RunRecord) -> None:
    for outcomes, colour, label in (
        (record.batch, BATCH, "batch class"),
        (record.interactive, INTERACTIVE, "interactive"),
    ):
        points = rush_series.waiting(outcomes)
        axes.step(*_steps(points), where="post", color=colour, linewidth=1.3, label=label)
        highest = max((value for _, value in points), default=0.0)
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.25 * highest))
    axes.legend(loc="upper right", fontsize=7.5, ncols=2, frameon=False)


def _mark(axes: Axes, record: RunRecord, fields: set[str]) -> None:
    """The number of each decision, as the list of reasons has it."""
    for number, move in enumerate(moves_of(record.changes), start=1):
        if move.field not in fields:
            continue
        axes.axvline(move.at_s, color=GREY, linewidth=0.6, linestyle=(0, (2, 2)))
        axes.text(
            move.at_s, 0.02, str(number), transform=axes.get_xaxis_transform(), ha="center",
            va="bottom", fontsize=7.5, color="white",
            bbox={"boxstyle": "circle,pad=0.25", "facecolor": INK, "edgecolor": "none"},
        )  # fmt: skip


def _limit(axes: Axes, value: float, label: str) -> None:
    axes.axhline(value, color=LIMIT, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.text(
        0.995, value, label, transform=axes.get_yaxis_transform(), ha="right", va="bottom",
        color=LIMIT, fontsize=7.5,
    )  # fmt: skip


def _steps(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _in_ms(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [1e3 * y for _, y in points]
