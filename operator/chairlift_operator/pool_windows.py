"""What a pool did over minutes and hours, as Prometheus tells it: values that a snapshot can hold.

Each is tri-state and names the query it came from. Read by `conditions` and `scaling_view`; made by
`prometheus`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chairlift_operator.signals import Idle, Signal, Unknown, Value
from chairlift_protocol.wire import RequestClass

SHORT_S: Final = 300.0
LONG_S: Final = 3600.0
ARRIVALS: Final = "arrivals"
NOT_YET_ASKED: Final = "NotYetAsked"
NOT_YET_SCRAPED: Final = "NotYetScraped"
OBJECTIVES: Final = {"itl": "interTokenLatency", "ttft": "timeToFirstToken"}


@dataclass(frozen=True, slots=True)
class WindowedShare:
    """How one objective was met over one window. signal: percent of good events.

    bad_lower, bad_upper: bounds of the bad share, one-sided 95 % (Wilson), widened by what lies
    between two buckets where events were counted by buckets only.
    boundary_ms: of the bucket that stands for the threshold; None where events were counted
    exactly.
    """

    request_class: RequestClass
    objective: str
    window_s: float
    signal: Signal
    bad_lower: float = 0.0
    bad_upper: float = 1.0
    num_events: float = 0.0
    boundary_ms: float | None = None

    @property
    def name(self) -> str:
        window = f"{self.window_s / 60:.0f}m" if self.window_s < LONG_S else "1h"
        return f"{self.request_class.value}/{OBJECTIVES[self.objective]}.goodPercent[{window}]"


@dataclass(frozen=True, slots=True)
class WindowedQuantity:
    """Arrivals, and the most that was seen of something."""

    name: str
    signal: Signal


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why something is not known: one CamelCase word, and a sentence without its full stop."""

    reason: str
    message: str

    @property
    def is_passing(self) -> bool:
        """Nothing is wrong: a first answer, or a second scrape of a new pod, is on its way."""
        return self.reason in (NOT_YET_ASKED, NOT_YET_SCRAPED)


@dataclass(frozen=True, slots=True)
class PoolWindows:
    """trouble: the first thing to look after, None when all is known.

    num_rejected: samples that were no numbers.
    """

    shares: tuple[WindowedShare, ...] = ()
    quantities: tuple[WindowedQuantity, ...] = ()
    trouble: Trouble | None = None
    num_rejected: int = 0

    @property
    def is_known(self) -> bool:
        signals = [share.signal for share in self.shares]
        signals += [quantity.signal for quantity in self.quantities]
        return self.trouble is None and not any(isinstance(s, Unknown) for s in signals)

    def arrivals_per_s(self, request_class: RequestClass) -> float | None:
        """At all gateways, over the last scrapes; None where that is not known."""
        name = f"{request_class.value}/{ARRIVALS}"
        signal = next((q.signal for q in self.quantities if q.name == name), None)
        if isinstance(signal, Value):
            return signal.value
        return 0.0 if isinstance(signal, Idle) else None

    def is_burning(self, request_class: RequestClass, objective: str, bad_budget: float) -> bool:
        """More bad events than the objective allows, for sure, for minutes and for an hour."""
        lowest = [
            share.bad_lower
            for share in self.shares
            if share.request_class is request_class and share.objective == objective
        ]
        return bool(lowest) and min(lowest) > bad_budget
