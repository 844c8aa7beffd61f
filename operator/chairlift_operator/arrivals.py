"""Arrivals at the gateway over time: how many a second, and whether they grow. Pure.

A step is no trend: where the last seconds hold far more than chance would bring, they count alone,
and for as long as the step is in the means, none of it is taken for growth that goes on. A counter
that went back begins a new history: the gateway restarted. Called by `scaling`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from chairlift_operator.exposition import GatewayClassSample
from chairlift_operator.snapshot import GatewaySnapshot
from chairlift_protocol.wire import RequestClass

STALE_AFTER_S: Final = 15.0
RATE_WINDOW_S: Final = 30.0
SLOPE_WINDOW_S: Final = 60.0
STEP_WINDOW_S: Final = 10.0
STEP_SIGMAS: Final = 3.0  # of a Poisson process: once in a thousand windows
_SLACK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Arrivals:
    """points: when, and requests of each class received until then."""

    points: tuple[tuple[float, tuple[GatewayClassSample, ...]], ...] = ()

    def with_snapshot(self, seen: GatewaySnapshot) -> Arrivals:
        at_s = seen.sampled_at_s
        if not seen.classes or at_s is None or (self.points and at_s <= self.points[-1][0]):
            return self
        if self.points and _went_back(self.points[-1][1], seen.classes):
            return Arrivals(((at_s, seen.classes),))
        oldest_s = at_s - SLOPE_WINDOW_S - RATE_WINDOW_S - _SLACK_S
        kept = tuple(point for point in self.points if point[0] >= oldest_s)
        return Arrivals((*kept, (at_s, seen.classes)))

    def is_fresh(self, now_s: float) -> bool:
        return bool(self.points) and 0 <= now_s - self.points[-1][0] <= STALE_AFTER_S

    def num_held(self, request_class: RequestClass) -> float:
        return _of(self.points[-1][1], request_class).num_held if self.points else 0.0

    def rate_per_s(self, request_class: RequestClass, now_s: float) -> float | None:
        """None before two samples, or when the last is old."""
        if not self.is_fresh(now_s):
            return None
        return self._step(request_class, now_s) or self._rate(request_class, now_s)

    def slope_per_s(self, request_class: RequestClass, now_s: float) -> float:
        """How fast the rate rose over the last minute, in requests a second each second."""
        latest = self._rate(request_class, now_s)
        earlier = self._rate(request_class, now_s - RATE_WINDOW_S)
        if latest is None or earlier is None or self._stepped(request_class, now_s):
            return 0.0
        return (latest - earlier) / RATE_WINDOW_S

    def _stepped(self, request_class: RequestClass, now_s: float) -> bool:
        return any(
            self._step(request_class, at_s) is not None
            for at_s, _ in self.points
            if at_s >= now_s - SLOPE_WINDOW_S
        )

    def _step(self, request_class: RequestClass, until_s: float) -> float | None:
        """The rate of the last seconds, where it is far above the mean that holds them too."""
        mean = self._rate(request_class, until_s)
        recent = self._rate(request_class, until_s, STEP_WINDOW_S)
        if mean is None or recent is None:
            return None
        by_chance = STEP_SIGMAS * math.sqrt(max(1.0, mean * STEP_WINDOW_S)) / STEP_WINDOW_S
        return recent if recent > mean + by_chance else None

    def _rate(
        self, request_class: RequestClass, until_s: float, window_s: float = RATE_WINDOW_S
    ) -> float | None:
        window = [
            (at_s, _of(classes, request_class).num_received)
            for at_s, classes in self.points
            if until_s - window_s - _SLACK_S <= at_s <= until_s
        ]
        if len(window) < 2:
            return None
        (from_s, before), (to_s, after) = window[0], window[-1]
        return (after - before) / (to_s - from_s)


def _of(classes: tuple[GatewayClassSample, ...], request_class: RequestClass) -> GatewayClassSample:
    known = (c for c in classes if c.request_class is request_class)
    return next(known, GatewayClassSample(request_class, 0.0, 0.0))


def _went_back(
    before: tuple[GatewayClassSample, ...], after: tuple[GatewayClassSample, ...]
) -> bool:
    return any(_of(after, c.request_class).num_received < c.num_received for c in before)
