"""How an objective was met over one window, from counters or from buckets of many pods. Pure.

Counters tell exactly. Buckets tell at their boundaries only: the nearest one stands for the
threshold, and what lies between its neighbours widens the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chairlift_operator.pool_windows import Trouble
from chairlift_operator.prometheus.series import Series
from chairlift_operator.signals import checked
from chairlift_operator.windows import wilson_bounds
from chairlift_protocol.metrics import SLO_EVENTS

_DISAGREEMENT: Final = 0.05
OBJECTIVE, THRESHOLD, RESULT, CLASS, LE = "objective", "threshold_ms", "result", "class", "le"


# Reasons, as a condition says them.
LABEL, SERIES, NUMBER = "LabelMissing", "SeriesMissing", "NotANumber"


class NotKnown(Exception):
    """Something cannot be read; the message is one sentence without its full stop."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.trouble = Trouble(reason, message)


@dataclass(frozen=True, slots=True)
class Counted:
    """Events over a window. num_bad_least, num_bad_most: what is certain when the threshold lies
    between two boundaries; both are num_bad where events were counted exactly."""

    num_good: float
    num_bad: float
    num_bad_least: float
    num_bad_most: float
    boundary_ms: float | None = None

    @property
    def total(self) -> float:
        return self.num_good + self.num_bad


def counted_events(
    series: Sequence[Series], objective: str, threshold_ms: float, request_class: str
) -> Counted:
    """One pod's, from its counters of good and bad events. Raise NotKnown."""
    for label in (OBJECTIVE, THRESHOLD, RESULT, CLASS):
        if any(label not in s.labels for s in series):
            raise NotKnown(LABEL, f"label {label} is absent from {SLO_EVENTS}")
    own = [
        s
        for s in series
        if s.labels[OBJECTIVE] == objective
        and s.labels[CLASS] == request_class
        and _is_close(s.labels[THRESHOLD], threshold_ms)
    ]
    sides = {}
    for result in ("good", "bad"):
        values = [_number(s, SLO_EVENTS) for s in own if s.labels[RESULT] == result]
        if not values:
            raise NotKnown(
                SERIES,
                f"series {SLO_EVENTS} of {objective}, {threshold_ms:g} ms, {result} "
                "has no two samples",
            )
        sides[result] = sum(values)
    return Counted(sides["good"], sides["bad"], sides["bad"], sides["bad"])


def counted_buckets(series: Sequence[Series], name: str, threshold_ms: float) -> Counted:
    """One pod's, from the increases of a classic histogram's buckets, in seconds. Raise NotKnown.

    A boundary is a number, however it is spelled: 1, 1.0 and 1e0 are the same.
    """
    if not series:
        raise NotKnown(SERIES, f"series {name}_bucket has no two samples")
    below: dict[float, float] = {}
    for one in series:
        boundary = _boundary(one, name)
        below[boundary] = below.get(boundary, 0.0) + _number(one, f"{name}_bucket")
    if math.inf not in below or len(below) < 2:
        raise NotKnown(SERIES, f"bucket le=+Inf, or any other, is absent from {name}_bucket")
    return _at_boundaries(_cumulative(below, name), threshold_ms)


def _boundary(series: Series, name: str) -> float:
    try:
        boundary = float(series.labels[LE])
    except KeyError:
        raise NotKnown(LABEL, f"label {LE} is absent from {name}_bucket") from None
    except ValueError:
        boundary = math.nan
    if math.isnan(boundary):
        raise NotKnown(LABEL, f"label {LE} of {name}_bucket is no number")
    return boundary


def _cumulative(below: dict[float, float], name: str) -> dict[float, float]:
    """Prometheus extrapolates each bucket by itself, so that they may disagree a little."""
    most = 0.0
    for boundary in sorted(below):
        if most - below[boundary] > _DISAGREEMENT * below[math.inf] + 1.0:
            raise NotKnown(NUMBER, f"the buckets of {name} do not add up")
        below[boundary] = most = max(most, below[boundary])
    return below


def _at_boundaries(below: dict[float, float], threshold_ms: float) -> Counted:
    total, threshold_s = below[math.inf], 1e-3 * threshold_ms
    lower = max((b for b in below if _at_most(b, threshold_s)), default=None)
    if lower is not None and _at_most(threshold_s, lower):  # the threshold is a boundary
        bad = total - below[lower]
        return Counted(below[lower], bad, bad, bad, 1e3 * lower)
    upper = min(b for b in below if b > threshold_s)
    least = total - below[upper]
    if lower is None:
        return Counted(below[upper], least, least, total, 1e3 * upper)
    nearest = lower if threshold_s - lower <= upper - threshold_s else upper
    good, most = below[nearest], total - below[lower]
    return Counted(good, total - good, least, most, 1e3 * nearest)


def _at_most(one_s: float, other_s: float) -> bool:
    return one_s <= other_s * (1 + 1e-9)


def _is_close(text: str, threshold_ms: float) -> bool:
    try:
        return math.isclose(float(text), threshold_ms, rel_tol=1e-5)
    except ValueError:
        return False


def _number(series: Series, name: str) -> float:
    number = checked(series.value)
    if number is None:
        raise NotKnown(NUMBER, f"{name} is NaN, negative or absurdly large")
    return number


def bad_bounds(parts: Sequence[Counted], num_independent: float) -> tuple[float, float]:
    """Of the share of bad events over all parts, at least one event among them."""
    total = sum(part.total for part in parts)
    least = sum(part.num_bad_least for part in parts) / total
    most = sum(part.num_bad_most for part in parts) / total
    return wilson_bounds(least, num_independent)[0], wilson_bounds(most, num_independent)[1]
