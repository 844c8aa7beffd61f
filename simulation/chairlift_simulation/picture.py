"""A simulated run as one picture: load, queue, knobs, replicas and attainment over time.

Draws what the run recorded; decides nothing. matplotlib without a window.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from chairlift_operator.spec import InferencePool
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.conditions import PoolResult
from chairlift_simulation.records import Journey, of_class

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
INK, GREY, FAINT = "#1f2933", "#7b8794", "#e4e7eb"
INTERACTIVE_COLOUR, BATCH_COLOUR = "#2563a8", "#c98a1b"
GOOD, BAD = "#2e8b57", "#c0392b"
STYLE: Final[dict[Any, Any]] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "text.color": INK,
    "axes.labelcolor": INK,
    "svg.fonttype": "path",
    "svg.hashsalt": "chairlift",
}
NUM_BINS: Final = 120
ROWS: Final = (
    "arrivals\nrequests/s",
    "time to first\ntoken, s",
    "attainment\n%",
    "running\n(batch size)",
    "waiting",
    "step tokens",
    "replicas",
)
HEIGHTS: Final = (0.8, 1.3, 1.0, 1.1, 0.8, 1.0, 0.8)


def drawn(pool: InferencePool, result: PoolResult, title: str) -> Figure:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 11.0), facecolor="white", layout="constrained")
        rows: Any = figure.subplots(len(ROWS), 1, sharex=True, height_ratios=HEIGHTS)
        for axes, label in zip(rows, ROWS, strict=True):
            axes.set_ylabel(label, rotation=0, ha="right", va="center", labelpad=8)
            axes.grid(axis="y", color=FAINT, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.set_xlim(0, result.elapsed_s)
        bin_s = max(1.0, result.elapsed_s / NUM_BINS)
        own = of_class(result.journeys, INTERACTIVE)
        _arrivals(rows[0], own, bin_s)
        _first_tokens(rows[1], own, pool)
        _attainment(rows[2], own, pool, bin_s)
        _running(rows[3], result)
        _waiting(rows[4], result)
        _step_tokens(rows[5], result)
        _replicas(rows[6], result)
        rows[0].set_title(title, loc="left", fontsize=10.5, fontweight="bold", pad=10)
        rows[-1].set_xlabel("seconds", color=GREY)
        return figure


def png(figure: Figure, dots_per_inch: int = 110) -> bytes:
    with matplotlib.rc_context(STYLE):
        written = io.BytesIO()
        figure.savefig(written, format="png", dpi=dots_per_inch)
        return written.getvalue()


def _arrivals(axes: Axes, journeys: Sequence[Journey], bin_s: float) -> None:
    counts = _binned(journeys, bin_s)
    axes.fill_between(
        [bin_s * (i + 0.5) for i in range(len(counts))],
        [len(own) / bin_s for own in counts],
        step="mid", color=INTERACTIVE_COLOUR, alpha=0.35, linewidth=0,
    )  # fmt: skip
    axes.set_ylim(bottom=0)


def _first_tokens(axes: Axes, journeys: Sequence[Journey], pool: InferencePool) -> None:
    slo = pool.spec.interactive.slo
    axes.set_yscale("log")
    for is_good, colour in ((True, GOOD), (False, BAD)):
        shown = [j for j in journeys if j.ttft_s is not None and j.is_good(slo) is is_good]
        axes.scatter(
            [j.request.due_s for j in shown],
            [max(1e-3, j.ttft_s or 0.0) for j in shown],
            s=5, color=colour, linewidth=0, alpha=0.6, label="good" if is_good else "bad",
        )  # fmt: skip
    axes.axhline(
        slo.time_to_first_token.threshold_s, color=BAD, linewidth=0.9, linestyle=(0, (4, 3))
    )
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _legend(axes)


def _attainment(axes: Axes, journeys: Sequence[Journey], pool: InferencePool, bin_s: float) -> None:
    slo = pool.spec.interactive.slo
    judged: tuple[tuple[str, str, Callable[[Journey], bool]], ...] = (
        ("first token", INTERACTIVE_COLOUR, lambda j: j.met_first_token(slo)),
        ("gaps", BATCH_COLOUR, lambda j: j.error is None and j.met_gaps(slo)),
    )
    for label, colour, is_met in judged:
        points = [
            (bin_s * (i + 0.5), 100 * sum(is_met(j) for j in own) / len(own))
            for i, own in enumerate(_binned(journeys, bin_s))
            if own
        ]
        axes.plot([x for x, _ in points], [y for _, y in points], color=colour, linewidth=1.1,
                  label=label)  # fmt: skip
    axes.axhline(slo.time_to_first_token.percent, color=BAD, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_ylim(0, 104)
    _legend(axes)


def _running(axes: Axes, result: PoolResult) -> None:
    times_s = [tick.at_s for tick in result.ticks]
    total = [sum(r.num_running for r in tick.replicas) for tick in result.ticks]
    batch = [sum(r.num_batch for r in tick.replicas) for tick in result.ticks]
    slots = [sum(r.batch_size for r in t.replicas if r.is_ready) for t in result.ticks]
    axes.fill_between(times_s, total, step="post", color=BATCH_COLOUR, alpha=0.8, linewidth=0,
                      label="batch class")  # fmt: skip
    own = [all_of - of_batch for all_of, of_batch in zip(total, batch, strict=True)]
    axes.fill_between(times_s, own, step="post", color=INTERACTIVE_COLOUR, alpha=0.8, linewidth=0,
                      label="interactive")  # fmt: skip
    axes.step(times_s, slots, where="post", color=INK, linewidth=1.2, label="batch size")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _waiting(axes: Axes, result: PoolResult) -> None:
    times_s = [tick.at_s for tick in result.ticks]
    waiting = [sum(r.num_waiting for r in tick.replicas) for tick in result.ticks]
    axes.step(times_s, waiting, where="post", color=INTERACTIVE_COLOUR, linewidth=1.2,
              label="at engines")  # fmt: skip
    axes.step(times_s, [tick.num_held for tick in result.ticks], where="post", color=BAD,
              linewidth=1.2, label="held at the gateway")  # fmt: skip
    axes.set_ylim(bottom=0)
    _legend(axes)


def _step_tokens(axes: Axes, result: PoolResult) -> None:
    names = dict.fromkeys(r.name for t in result.ticks for r in t.replicas if r.batch_size)
    for name in names:
        points = [
            (tick.at_s, r.step_tokens)
            for tick in result.ticks
            for r in tick.replicas
            if r.name == name and r.batch_size
        ]
        axes.step([x for x, _ in points], [y for _, y in points], where="post", linewidth=1.1)
    axes.set_ylim(bottom=0)


def _replicas(axes: Axes, result: PoolResult) -> None:
    times_s = [tick.at_s for tick in result.ticks]
    held = [len(tick.replicas) for tick in result.ticks]
    axes.fill_between(times_s, held, step="post", color=GREY, alpha=0.35, linewidth=0,
                      label="starting or draining")  # fmt: skip
    ready = [sum(r.is_ready for r in tick.replicas) for tick in result.ticks]
    axes.fill_between(times_s, ready, step="post", color=INTERACTIVE_COLOUR, alpha=0.8, linewidth=0,
                      label="ready")  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes)


def _binned(journeys: Sequence[Journey], bin_s: float) -> list[list[Journey]]:
    """By when they came."""
    last_s = max((j.request.due_s for j in journeys), default=0.0)
    bins: list[list[Journey]] = [[] for _ in range(int(last_s / bin_s) + 1)]
    for journey in journeys:
        bins[int(journey.request.due_s / bin_s)].append(journey)
    return bins


def _legend(axes: Axes) -> None:
    axes.legend(loc="upper right", fontsize=7.5, ncols=3, frameon=True, framealpha=0.85,
                edgecolor="none")  # fmt: skip
