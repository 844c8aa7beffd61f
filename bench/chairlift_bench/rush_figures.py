"""What a rush's runs amount to: figures of a run, comparisons of a round, medians, claims. Pure.

Goodput counts interactive requests alone, over the time in which they arrive, which is the same for
all runs. Reads records; `rush` and `bench_demo` print what is made here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from chairlift_bench.journal_tail import Change
from chairlift_bench.outcomes import Slo, Summary
from chairlift_bench.rush_load import RushLoad
from chairlift_bench.rush_run import RunKind, RunRecord

# A move smaller than this is no reversal of the one before.
REVERSAL_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class RunFigures:
    """interactive, batch: as their clients saw it, per second until the run's last request ended.

    goodput: good requests per second of arrivals.
    """

    kind: RunKind
    interactive: Summary
    batch: Summary
    goodput: float
    num_failed: int
    num_policy_changes: int
    num_reversals: int
    num_up_in_rush: int
    num_down_in_rush: int
    elapsed_s: float

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens of both classes."""
        return (
            self.interactive.prompt_tokens_per_s
            + self.interactive.output_tokens_per_s
            + self.batch.prompt_tokens_per_s
            + self.batch.output_tokens_per_s
        )

    def to_json(self) -> dict[str, Any]:
        plain = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("interactive", "batch")
        }
        return {
            **plain,
            "tokens_per_s": self.tokens_per_s,
            "interactive": self.interactive.to_json(),
            "batch": self.batch.to_json(),
        }


def figures_of(record: RunRecord, load: RushLoad) -> RunFigures:
    moves = moves_of(record.changes)
    after_calm = [m for m in moves if m.at_s >= load.phases[0].ends_s]
    interactive = Summary.of(record.interactive, load.slo, record.elapsed_s)
    return RunFigures(
        kind=record.kind,
        interactive=interactive,
        batch=Summary.of(record.batch, load.slo, record.elapsed_s),
        goodput=interactive.num_good / load.duration_s,
        num_failed=record.num_failed,
        num_policy_changes=record.num_policy_changes,
        num_reversals=num_reversals(moves),
        num_up_in_rush=sum(m.after > m.before for m in after_calm),
        num_down_in_rush=sum(m.after < m.before for m in after_calm),
        elapsed_s=record.elapsed_s,
    )


def moves_of(changes: Sequence[Change]) -> list[Change]:
    """Changes that moved a knob of the engine."""
    return [c for c in changes if c.enforced and c.before != c.after]


def num_reversals(moves: Sequence[Change]) -> int:
    """Moves of more than a tenth, against the last such move of the same knob."""
    count, last = 0, dict[str, float]()
    for move in moves:
        step = move.after - move.before
        if abs(step) <= REVERSAL_SHARE * move.before:
            continue
        count += last.get(move.field, step) * step < 0
        last[move.field] = step
    return count


Round = Mapping[RunKind, RunFigures]


@dataclass(frozen=True, slots=True)
class Claim:
    """wanted: what has to hold, in words; holds says whether it does."""

    name: str
    values: tuple[float, ...]
    value: float
    wanted: str
    holds: bool

    @property
    def line(self) -> str:
        shown = f"{self.value:.0f}" if float(self.value).is_integer() else f"{self.value:.2f}"
        return f"claim {self.name} {shown}"


def claims_of(rounds: Sequence[Round]) -> list[Claim]:
    """Medians over rounds of each round's own comparison; failures are summed."""
    per_round = {
        "demo_goodput_vs_static": (_goodput_over(RunKind.STATIC), 4.0),
        "demo_goodput_vs_fixed": (_goodput_over(RunKind.FIXED), 1.3),
        "demo_good_fraction_tuned": (lambda r: _tuned(r).interactive.good_percent / 100, 0.85),
    }
    failed = [float(sum(run.num_failed for run in round_.values())) for round_ in rounds]
    claims = [Claim("demo_failed_requests", tuple(failed), sum(failed), "0", sum(failed) == 0)]
    for name, (of_round, least) in per_round.items():
        values = tuple(of_round(r) for r in rounds)
        median = statistics.median(values)
        claims.append(Claim(name, values, median, f"at least {least:g}", median >= least))
    values = tuple(_ttft_over_static(r) for r in rounds)
    median = statistics.median(values)
    claims.append(Claim("demo_p95_ttft_vs_static", values, median, "at most 0.2", median <= 0.2))
    return [*claims, *_policy_claims(rounds), *_batch_claims(rounds)]


def _policy_claims(rounds: Sequence[Round]) -> list[Claim]:
    changes = tuple(float(_tuned(r).num_policy_changes) for r in rounds)
    reversals = tuple(float(_tuned(r).num_reversals) for r in rounds)
    ups = statistics.median(_tuned(r).num_up_in_rush for r in rounds)
    downs = statistics.median(_tuned(r).num_down_in_rush for r in rounds)
    turned = statistics.median(reversals)
    return [
        Claim(
            "demo_policy_changes",
            changes,
            statistics.median(changes),
            "one down and one up after the calm",
            ups >= 1 and downs >= 1,
        ),
        Claim("demo_policy_reversals", reversals, turned, "at most 4", turned <= 4),
    ]


def _batch_claims(rounds: Sequence[Round]) -> list[Claim]:
    """Only where rounds have a run without the backlog to compare with."""
    values = tuple(
        _tuned(r).tokens_per_s / r[RunKind.TUNED_ALONE].tokens_per_s
        for r in rounds
        if RunKind.TUNED_ALONE in r
    )
    if not values:
        return []
    median = statistics.median(values)
    name = "demo_batch_tokens_vs_interactive_only"
    return [Claim(name, values, median, "above 1", median > 1)]


def _tuned(round_: Round) -> RunFigures:
    return round_[RunKind.TUNED]


def _goodput_over(other: RunKind) -> Callable[[Round], float]:
    """No good request counts as one, so that the ratio is rather too low than infinite."""
    return lambda r: _tuned(r).interactive.num_good / max(1, r[other].interactive.num_good)


def _ttft_over_static(round_: Round) -> float:
    return _tuned(round_).interactive.ttft_p95_s / round_[RunKind.STATIC].interactive.ttft_p95_s


def thresholds(slo: Slo) -> str:
    return (
        f"TTFT ≤ {slo.ttft_s:.2f} s and {slo.gap_percent:g} % of its own gaps ≤ "
        f"{1e3 * slo.gap_s:.0f} ms"
    )
