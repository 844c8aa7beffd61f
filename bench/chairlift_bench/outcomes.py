"""What became of the requests of a run, and which of them were good.

A request is good when its TTFT met the threshold and at least the objective's percent of its own
gaps did. Refused, failed, cut or unfinished requests are bad. Pure; knows no HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Slo:
    """gap_percent: how many of a request's own gaps must meet gap_s, in percent."""

    ttft_s: float
    gap_s: float
    gap_percent: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as its client saw it. Times count from when it was due.

    gaps_s: between consecutive pieces of text. error: None if the stream came to its proper end.
    """

    due_s: float
    ttft_s: float | None
    gaps_s: tuple[float, ...]
    elapsed_s: float
    text: str
    finish_reason: str | None
    prompt_tokens: int
    output_tokens: int
    error: str | None

    def is_good(self, slo: Slo) -> bool:
        if self.error is not None or self.ttft_s is None or self.ttft_s > slo.ttft_s:
            return False
        num_met = sum(gap_s <= slo.gap_s for gap_s in self.gaps_s)
        return num_met * 100 >= slo.gap_percent * len(self.gaps_s)


def percentile(values: Iterable[float], percent: float) -> float:
    """Nearest rank; NaN when there are none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a run over all its requests; latencies over those that got that far."""

    num_requests: int
    num_failed: int
    num_good: int
    ttft_p50_s: float
    ttft_p95_s: float
    gap_p50_s: float
    gap_p95_s: float
    gap_p99_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float

    @property
    def good_percent(self) -> float:
        return 100.0 * self.num_good / self.num_requests if self.num_requests else math.nan

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], slo: Slo, elapsed_s: float) -> Self:
        ttfts_s = [o.ttft_s for o in outcomes if o.ttft_s is not None]
        gaps_s = [gap_s for o in outcomes for gap_s in o.gaps_s]
        return cls(
            num_requests=len(outcomes),
            num_failed=sum(o.error is not None for o in outcomes),
            num_good=sum(o.is_good(slo) for o in outcomes),
            ttft_p50_s=percentile(ttfts_s, 50),
            ttft_p95_s=percentile(ttfts_s, 95),
            gap_p50_s=percentile(gaps_s, 50),
            gap_p95_s=percentile(gaps_s, 95),
            gap_p99_s=percentile(gaps_s, 99),
            prompt_tokens_per_s=sum(o.prompt_tokens for o in outcomes) / elapsed_s,
            output_tokens_per_s=sum(o.output_tokens for o in outcomes) / elapsed_s,
        )

    def to_json(self) -> dict[str, Any]:
        """NaN becomes null: unknown is not a number."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["good_percent"] = self.good_percent
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in values.items()
        }
