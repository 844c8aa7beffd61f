"""The evaluation as a page with plots. What is written by hand below its mark stays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from chairlift_bench.evaluate_claims import (
    ATTAINMENT,
    HPA_QUEUE,
    OF_ALL_RUNS,
    STATIC_COUNT,
    Mean,
    Runs,
    frontier,
    hours_ratio,
    laws_in,
    normalised,
    of_law,
    scaling_in,
    settled_s,
)
from chairlift_bench.evaluate_figures import Figures
from chairlift_bench.evaluate_runs import OURS, SCALING, Size
from chairlift_bench.evaluate_scenarios import all_scenarios
from chairlift_simulation.picture import BAD, FAINT, GREY, INK, INTERACTIVE_COLOUR, STYLE, png

MARK: Final = "<!-- written by hand from here on -->"
GOODPUT, REPLICAS = "evaluation-goodput.png", "evaluation-replicas.png"
PROMISED: Final = {
    "settle_cold_s": "≤ 60",
    "settle_warm_s": "≤ 30",
    "settle_cold_worst_s": "≤ 120",
    "settle_warm_worst_s": "≤ 90",
    "goodput_vs_oracle": "≥ 0.95",
    "goodput_vs_best_single_setting": "≥ 1.1",
    "knob_reversals_per_h": "≤ 12",
    "replica_reversals_over_turning_points": "≤ 1",
    "replica_hours_vs_hpa_queue": "≤ 0.80",
    "unsafe_actions": "0",
    "fault_goodput_fraction": "≥ 0.9",
    "batch_share_min_kept": "1",
    "interactive_p95_ttft_with_batch": "≤ 1.10",
}
Intervals = Mapping[str, tuple[float, float]]
Column = tuple[str, Callable[[Figures], float], str]
KNOBS: Final[tuple[Column, ...]] = (
    ("good", lambda f: 100 * f.good_share, "{:.1f}"),
    ("first token", lambda f: 100 * f.ttft_share, "{:.1f}"),
    ("gaps", lambda f: 100 * f.itl_share, "{:.1f}"),
    ("good/s", lambda f: f.goodput_per_s, "{:.2f}"),
    ("tokens/s", lambda f: f.tokens_per_s, "{:.0f}"),
    ("p95 first token, s", lambda f: f.ttft_p95_s, "{:.2f}"),
    ("reversals/h", lambda f: f.batch_size_reversals_per_h + f.step_tokens_reversals_per_h,
     "{:.0f}"),
)  # fmt: skip
COUNTS: Final[tuple[Column, ...]] = (
    *KNOBS[:3],
    ("replica-hours", lambda f: f.replica_hours, "{:.2f}"),
    ("replica reversals", lambda f: f.replica_reversals, "{:.1f}"),
    ("p95 first token, s", lambda f: f.ttft_p95_s, "{:.2f}"),
)
FAULTS: Final[tuple[Column, ...]] = (
    *KNOBS[:4],
    ("unsafe actions", lambda f: f.num_unsafe, "{:.0f}"),
    ("batch tokens/s", lambda f: f.batch_tokens_per_s, "{:.0f}"),
)


def write_report(
    folder: Path, size: Size, runs: Runs, claims: Mapping[str, float], intervals: Intervals
) -> Path:
    """Write evaluation.md and its pictures; keep what follows the mark in the page before."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "evaluation.md"
    kept = ""
    if path.exists():
        _, mark, kept = path.read_text(encoding="utf-8").partition(MARK)
    lines = list(_page(size, runs, claims, intervals))
    path.write_text("\n".join(lines) + f"\n\n{MARK}{kept or chr(10)}", encoding="utf-8")
    (folder / GOODPUT).write_bytes(png(_goodput(runs)))
    (folder / REPLICAS).write_bytes(png(_replicas(runs)))
    return path


def _page(
    size: Size, runs: Runs, claims: Mapping[str, float], intervals: Intervals
) -> Iterator[str]:
    seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
    yield "# Evaluation of the control law"
    yield (
        f"Written by `make evaluate` (size {size.name}: {len(runs)} runs, seeds {seeds}). A whole "
        "pool in virtual time: the gateway's routing, the engine's scheduler and the operator's "
        "plan are the real ones, step times are modelled. The load of a seed is the same for every "
        "law. One configuration of the pool for all hardware: first token within 2 s, gaps within "
        "50 ms, 95 % each. A request is good when its first token was in time and at least 95 % of "
        "its own gaps were. Rates are multiples of what one replica carries by the true costs. "
        "Intervals are bootstrapped over seeds, 95 %; those of claims draw the same seeds for "
        "every law and scenario, and keep what was played with one seed."
    )
    yield ""
    yield from _claims(claims, intervals)
    yield ""
    if len(scaling := scaling_in(runs)) > 1:
        yield f"All of {', '.join(scaling)}, each law with one setting for all of them:"
        yield ""
        yield from _hours(runs, scaling)
    yield f"![goodput by law, over the best fixed setting]({GOODPUT})"
    yield ""
    yield f"![attainment and replica-hours]({REPLICAS})"
    if any(r.scenario == "S1" for r in runs):
        yield from _settling(runs)
    scenarios = all_scenarios(size.minutes)
    for name in [s for s in scenarios if any(r.scenario == s for r in runs)]:
        yield ""
        yield f"## {name}: {scenarios[name].title}"
        columns = KNOBS
        if name in SCALING:
            columns = COUNTS
            yield from _hours(runs, [name])
        elif name.startswith(("S8", "S10")):
            columns = FAULTS
        for profile in sorted({r.profile for r in runs if r.scenario == name}):
            yield from _table(runs, name, profile, columns)


def _claims(claims: Mapping[str, float], intervals: Intervals) -> Iterator[str]:
    yield "| claim | measured | 95 % | wanted |"
    yield "|---|---|---|---|"
    for name, value in claims.items():
        measured = "not told by these runs" if math.isnan(value) else f"{value:.3g}"
        if name in OF_ALL_RUNS or math.isnan(value):
            interval = ""
        elif name in intervals:
            interval = "{:.3g} to {:.3g}".format(*intervals[name])
        else:
            interval = "not told" if intervals else "one seed"
        yield f"| `{name}` | {measured} | {interval} | {PROMISED.get(name, '')} |"


def _hours(runs: Runs, scenarios: list[str]) -> Iterator[str]:
    for family, named in (
        (HPA_QUEUE, "an HPA on the queue"),
        (STATIC_COUNT, "a pool of the same size all the time"),
    ):
        ratio, share = hours_ratio(runs, scenarios, family)
        if not math.isfinite(ratio):
            continue
        wins = "" if ratio <= 1 else f": {named} wins here"
        yield (
            f"Replica-hours over those of {named}, both at {100 * share:.1f} % good: "
            f"{ratio:.2f}{wins}."
        )
        yield ""


def _settling(runs: Runs) -> Iterator[str]:
    profiles = sorted({r.profile for r in runs if r.scenario == "S1"})
    yield ""
    yield "## Settling (S1)"
    yield (
        "Seconds until, for 30 s, gaps met their objective at 90 % of the throughput of the best "
        "fixed setting; median of seeds; 999: not while it was watched."
    )
    yield ""
    yield f"| law | {' | '.join(profiles)} |"
    yield "|---|" + "---|" * len(profiles)
    for law in laws_in(runs, "S1", profiles[0]):
        if not law.startswith("static"):
            cells = " | ".join(f"{settled_s(runs, profile, law):.0f}" for profile in profiles)
            yield f"| {law} | {cells} |"


def _table(runs: Runs, scenario: str, profile: str, columns: tuple[Column, ...]) -> Iterator[str]:
    yield ""
    yield f"| {profile} | {' | '.join(title for title, _, _ in columns)} |"
    yield "|---|" + "---|" * len(columns)
    for law in laws_in(runs, scenario, profile):
        own = of_law(runs, scenario, profile, law)
        cells = " | ".join(
            _shown(Mean.of([float(measure(f)) for f in own]), form) for _, measure, form in columns
        )
        yield f"| {law} | {cells} |"


def _shown(mean: Mean, form: str) -> str:
    if not math.isfinite(mean.mean):
        return "∞"
    text = form.format(mean.mean)
    low, high = form.format(mean.low), form.format(mean.high)
    return text if low == high else f"{text} ({low} to {high})"


def _goodput(runs: Runs) -> Figure:
    table = normalised(runs)
    with matplotlib.rc_context(STYLE):
        count = max(1, len(table))
        figure = Figure(figsize=(3.4 * count, 5.0), facecolor="white", layout="constrained")
        grid: Any = figure.subplots(1, count, squeeze=False)
        for axes, (place, ratios) in zip(grid[0], table.items(), strict=False):
            laws = sorted(ratios, key=lambda law: ratios[law])
            colours = [INTERACTIVE_COLOUR if law == OURS else GREY for law in laws]
            axes.barh(laws, [ratios[law] for law in laws], color=colours)
            axes.axvline(ATTAINMENT, color=BAD, linewidth=0.9, linestyle=(0, (4, 3)))
            axes.set_title(" ".join(place), loc="left", fontsize=9, fontweight="bold")
        return figure


def _replicas(runs: Runs) -> Figure:
    scenarios = scaling_in(runs)
    with matplotlib.rc_context(STYLE):
        count = max(1, len(scenarios))
        figure = Figure(figsize=(5.0 * count, 4.2), facecolor="white", layout="constrained")
        grid: Any = figure.subplots(1, count, squeeze=False)
        for axes, scenario in zip(grid[0], scenarios, strict=False):
            _frontiers(axes, runs, scenario)
        return figure


def _frontiers(axes: Axes, runs: Runs, scenario: str) -> None:
    families = (
        ("ours", INTERACTIVE_COLOUR), ("hpa queue", BAD), ("hpa kv", "#8e44ad"),
        ("wva", "#2e8b57"), ("dynamo", "#b8860b"), ("s-band", "#4682b4"), ("replicas", INK),
    )  # fmt: skip
    for family, colour in families:
        points = sorted(
            (hours, 100 * share, law)
            for share, hours, law in frontier(
                runs,
                [scenario],
                lambda law, family=family: law.startswith(family),  # type: ignore[misc]
            )
        )
        axes.plot([h for h, _, _ in points], [s for _, s, _ in points], marker="o", markersize=4,
                  linewidth=1.0, color=colour, label=family)  # fmt: skip
        for hours, share, law in points:
            axes.annotate(law.removeprefix(family).strip(), (hours, share), fontsize=7, color=GREY,
                          xytext=(3, 3), textcoords="offset points")  # fmt: skip
    axes.axhline(100 * ATTAINMENT, color=BAD, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_title(scenario, loc="left", fontsize=9, fontweight="bold")
    axes.set_xlabel("replica-hours", color=GREY)
    axes.set_ylabel("good requests, %", color=GREY)
    axes.legend(fontsize=7.5, frameon=False)
