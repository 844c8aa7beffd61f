"""What happened over a window: differences of an engine's counters, and attainment of an objective.

A history holds one engine's recent samples since its last restart; a restart is seen as a counter
that went back, and begins a new history, so that no rate is ever negative or huge. Two samples are
the least that say anything. Called by `plan` and what it is made of; pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from chairlift_operator.exposition import EngineSample

KEEP_S: Final = 300.0
WINDOWS_S: Final = (15.0, 30.0, 60.0, 300.0)
_SLACK_S: Final = 0.5  # ticks jitter: three of five seconds count as a window of fifteen
_ONE_SIDED_95: Final = 1.645
_COUNTERS: Final = (
    "step_seconds",
    "num_steps",
    "step_decode_seqs",
    "step_prefill_tokens",
    "step_kv_tokens",
    "prompt_tokens",
    "generation_tokens",
    "num_preemptions",
    "num_finished",
)


@dataclass(frozen=True, slots=True)
class TimedSample:
    at_s: float
    sample: EngineSample


@dataclass(frozen=True, slots=True)
class History:
    """Usable samples of one engine since its last restart, oldest first."""

    points: tuple[TimedSample, ...] = ()
    num_restarts: int = 0

    @property
    def latest(self) -> TimedSample | None:
        return self.points[-1] if self.points else None

    def with_sample(self, at_s: float, sample: EngineSample) -> History:
        """Ignores a sample not newer than the last: one scrape read twice is one observation."""
        latest = self.latest
        if latest is None:
            return replace(self, points=(TimedSample(at_s, sample),))
        if at_s <= latest.at_s:
            return self
        if _went_back(latest.sample, sample):
            return History((TimedSample(at_s, sample),), self.num_restarts + 1)
        kept = tuple(p for p in self.points if p.at_s >= at_s - KEEP_S - _SLACK_S)
        return replace(self, points=(*kept, TimedSample(at_s, sample)))

    def within(self, window_s: float, now_s: float, since_s: float = -math.inf) -> History:
        """The samples of a window, none older than `since_s`."""
        start_s = max(now_s - window_s - _SLACK_S, since_s)
        return replace(self, points=tuple(p for p in self.points if p.at_s >= start_s))

    def increase(self, counter: str) -> float | None:
        """How far a counter rose over this history; None without two samples that have it."""
        values = [v for p in self.points if (v := getattr(p.sample, counter)) is not None]
        return values[-1] - values[0] if len(values) >= 2 else None

    @property
    def span_s(self) -> float:
        return self.points[-1].at_s - self.points[0].at_s if self.points else 0.0


def _went_back(before: EngineSample, after: EngineSample) -> bool:
    return any(
        (old := getattr(before, name)) is not None
        and (new := getattr(after, name)) is not None
        and new < old
        for name in _COUNTERS
    )


@dataclass(frozen=True, slots=True)
class Attainment:
    """How an objective was met over a window. Bounds are Wilson's, one-sided 95 %.

    num_independent: events that tell something new. All gaps of one step are one reading of its
        time, so gaps count as steps.
    low_sample: too few to claim the objective is met, even in the widest window.
    """

    bad_share: float
    lower: float
    upper: float
    num_events: float
    num_independent: float
    window_s: float
    low_sample: bool

    @property
    def good_percent(self) -> float:
        return 100 * (1 - self.bad_share)


def wilson_bounds(share: float, count: float) -> tuple[float, float]:
    if count <= 0:
        return 0.0, 1.0
    z2 = _ONE_SIDED_95**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    spread = share * (1 - share) / count + z2 / (4 * count * count)
    half = _ONE_SIDED_95 * math.sqrt(spread) / (1 + z2 / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def events_to_claim(bad_budget: float) -> int:
    """Events, all good, that show an objective is met at 95 % confidence: 59 for 5 %."""
    return math.ceil(math.log(0.05) / math.log1p(-bad_budget))


@dataclass(frozen=True, slots=True)
class ObjectiveKey:
    """Which events: objective is 'ttft' or 'itl'."""

    objective: str
    threshold_ms: float
    request_class: str


def attainment_over(
    histories: Sequence[History], key: ObjectiveKey, window_s: float, now_s: float, since_s: float
) -> Attainment | None:
    """Over one window and all given replicas; None without events."""
    good = bad = independent = 0.0
    for history in histories:
        window = history.within(window_s, now_s, since_s)
        counted = _events(window, key)
        if counted is None:
            continue
        good += counted[0]
        bad += counted[1]
        steps = window.increase("num_steps") or 0.0
        independent += min(sum(counted), steps) if key.objective == "itl" else sum(counted)
    if good + bad < 1 or independent < 1:
        return None
    share = bad / (good + bad)
    return Attainment(
        share,
        *wilson_bounds(share, independent),
        good + bad,
        independent,
        window_s,
        low_sample=False,
    )


def attainment(
    histories: Sequence[History],
    key: ObjectiveKey,
    bad_budget: float,
    now_s: float,
    since_s: float = -math.inf,
) -> Attainment | None:
    """Over the narrowest window with enough events, else the widest; None without any event."""
    enough = events_to_claim(bad_budget)
    widest = None
    for window_s in WINDOWS_S:
        seen = attainment_over(histories, key, window_s, now_s, since_s)
        if seen is not None and seen.num_independent >= enough:
            return seen
        widest = seen or widest
    return None if widest is None else replace(widest, low_sample=True)


def _events(window: History, key: ObjectiveKey) -> tuple[float, float] | None:
    counts = [
        (count.num_good, count.num_bad)
        for point in window.points
        if (count := point.sample.slo_count(key.objective, key.threshold_ms, key.request_class))
        and count.num_good is not None
        and count.num_bad is not None
    ]
    if len(counts) < 2:
        return None
    (good_before, bad_before), (good_after, bad_after) = counts[0], counts[-1]
    if good_after is None or bad_after is None or good_before is None or bad_before is None:
        return None
    return max(0.0, good_after - good_before), max(0.0, bad_after - bad_before)
