"""What a ride shows while it runs and at its end: a live table, or a line every few seconds.

Computes nothing but percentiles of what it is handed. `ride` calls it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from chairlift_bench.journal_tail import Change, JournalTail
from chairlift_bench.load import Load
from chairlift_bench.outcomes import Outcome, Slo, Summary, percentile

LIVE_EVERY_S: Final = 0.5
LINE_EVERY_S: Final = 5.0
NUM_CHANGES_SHOWN: Final = 5


class RideView:
    def __init__(self, console: Console, slo: Slo, journal: JournalTail) -> None:
        self.every_s = LIVE_EVERY_S if console.is_terminal else LINE_EVERY_S
        self._console = console
        self._slo = slo
        self._journal = journal
        self._started_s = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> RideView:
        self._started_s = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, load: Load) -> None:
        elapsed_s = time.monotonic() - self._started_s
        self._journal.read()
        facts = _facts(load, self._slo, elapsed_s)
        facts["batch size"], facts["step tokens"] = _knobs(self._journal)
        if self._live is None:
            line = ", ".join(f"{name} {value}" for name, value in facts.items())
            print(f"{elapsed_s:5.0f} s  {line}", flush=True)
            return
        table = Table(title=f"{elapsed_s:.0f} s", title_justify="left")
        for name in facts:
            table.add_column(name, justify="right")
        table.add_row(*facts.values())
        changes = _timed(self._journal.changes)[-NUM_CHANGES_SHOWN:]
        recent = [Text(f"{after_s:5.0f} s  {sentence}") for after_s, sentence in changes]
        self._live.update(Group(table, *recent), refresh=True)


def _facts(load: Load, slo: Slo, elapsed_s: float) -> dict[str, str]:
    done = load.outcomes
    num_good = sum(o.is_good(slo) for o in done)
    gaps_s = [gap_s for o in done for gap_s in o.gaps_s]
    return {
        "in flight": str(load.num_in_flight),
        "done": str(len(done)),
        "good": str(num_good),
        "failed": str(sum(o.error is not None for o in done)),
        "TTFT p50": _ms(percentile((o.ttft_s for o in done if o.ttft_s is not None), 50)),
        "gap p50": _ms(percentile(gaps_s, 50)),
        "gap p95": _ms(percentile(gaps_s, 95)),
        "tokens/s out": f"{_output_tokens(done) / elapsed_s:.0f}" if elapsed_s > 0 else "–",
    }


def _output_tokens(outcomes: Sequence[Outcome]) -> int:
    return sum(o.output_tokens for o in outcomes)


def _knobs(journal: JournalTail) -> tuple[str, str]:
    if journal.in_force is None:
        return "–", "–"
    return str(journal.in_force.batch_size), str(journal.in_force.step_tokens)


def summary_table(summary: Summary, slo: Slo) -> Table:
    table = Table(title="The ride, as its clients saw it", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in (
        ("requests", str(summary.num_requests)),
        ("failed", str(summary.num_failed)),
        (
            f"good (TTFT ≤ {slo.ttft_s:g} s, {slo.gap_percent:g} % of gaps ≤ {_ms(slo.gap_s)})",
            f"{summary.good_percent:.1f} %",
        ),
        ("TTFT p50 / p95", f"{_ms(summary.ttft_p50_s)} / {_ms(summary.ttft_p95_s)}"),
        (
            "gap p50 / p95 / p99",
            f"{_ms(summary.gap_p50_s)} / {_ms(summary.gap_p95_s)} / {_ms(summary.gap_p99_s)}",
        ),
        (
            "tokens/s in / out",
            f"{summary.prompt_tokens_per_s:.1f} / {summary.output_tokens_per_s:.1f}",
        ),
    ):
        table.add_row(name, value)
    return table


def changes_table(changes: Sequence[Change]) -> Table:
    table = Table(title="What the controller changed, and why", title_justify="left")
    table.add_column("at", justify="right")
    table.add_column("change and reason", overflow="fold")
    for after_s, sentence in _timed(changes):
        table.add_row(f"{after_s:.0f} s", sentence)
    return table


def _timed(changes: Sequence[Change]) -> list[tuple[float, str]]:
    """Seconds since the first change, which is the first policy, and what each says."""
    return [(change.at_s - changes[0].at_s, change.sentence) for change in changes]


def _ms(duration_s: float) -> str:
    return "–" if duration_s != duration_s else f"{1e3 * duration_s:.0f} ms"
