"""From a batch of answers to what one pool did over minutes and hours. Pure.

Joined on the pool's Ready pods, reduced within a pod before across pods. What is not told of every
pod is not known of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from chairlift_operator.pool_windows import (
    ARRIVALS,
    NOT_YET_ASKED,
    NOT_YET_SCRAPED,
    PoolWindows,
    Trouble,
    WindowedQuantity,
    WindowedShare,
)
from chairlift_operator.prometheus.attained import (
    CLASS,
    LABEL,
    NUMBER,
    SERIES,
    Counted,
    NotKnown,
    bad_bounds,
    counted_buckets,
    counted_events,
)
from chairlift_operator.prometheus.batch import ENGINES, GATEWAYS, QUERY_FAILED, Batch, PoolPods
from chairlift_operator.prometheus.heartbeats import Heartbeat, Roll
from chairlift_operator.prometheus.queries import HISTOGRAMS, WINDOWS
from chairlift_operator.prometheus.series import PodKey
from chairlift_operator.signals import Idle, Signal, Unknown, Value, checked
from chairlift_protocol.metrics import STEPS
from chairlift_protocol.wire import RequestClass

# Of several troubles the first of these is told: it may be the cause of the others.
_URGENCY: Final = (
    QUERY_FAILED, LABEL, "NoTarget", "TargetDown", SERIES, NUMBER, "ScrapedTooRarely", "Stale",
    "Partial", "Stalled", NOT_YET_ASKED, NOT_YET_SCRAPED,
)  # fmt: skip
WAITING_PEAK, KV_PEAK = "waitingPeak[5m]", "kvPeak[5m]"
ARRIVALS_PEAK: Final = "arrivalsPeak[1h]"


def windows_of(batch: Batch, pool: PoolPods) -> PoolWindows:
    return _Reduction(batch, pool).windows()


@dataclass(frozen=True, slots=True)
class _Question:
    """One share that is asked for."""

    request_class: RequestClass
    objective: str
    threshold_ms: float
    window: str

    @property
    def query(self) -> str:
        return f"sloEvents[{self.window}]"

    @property
    def bucket_query(self) -> str:
        return f"{self.objective}Buckets[{self.window}]"

    def share(self, signal: Signal) -> WindowedShare:
        return WindowedShare(self.request_class, self.objective, WINDOWS[self.window], signal)


class _Reduction:
    def __init__(self, batch: Batch, pool: PoolPods) -> None:
        self._batch, self._pool = batch, pool
        self._troubles: list[Trouble] = []
        self._rolls: dict[tuple[str, RequestClass | None], Roll | NotKnown] = {}

    def windows(self) -> PoolWindows:
        shares = [
            self._share(_Question(request_class, objective, threshold_ms, window))
            for (request_class, objective), threshold_ms in self._pool.thresholds_ms.items()
            if self._pool.engines.get(request_class)
            for window in WINDOWS
        ]
        quantities = [*self._peaks(), *self._arrivals()]
        first = min(self._troubles, key=lambda t: _URGENCY.index(t.reason), default=None)
        num_rejected = sum(trouble.reason == NUMBER for trouble in set(self._troubles))
        return PoolWindows(tuple(shares), tuple(quantities), first, num_rejected)

    def _roll(self, heartbeat: str, request_class: RequestClass | None) -> Roll:
        """request_class: None for the gateways. Raise NotKnown."""
        key = (heartbeat, request_class)
        if key not in self._rolls:
            pods = self._pool.engines[request_class] if request_class else self._pool.gateways
            try:
                self._rolls[key] = self._batch.everybody(heartbeat, pods)
            except NotKnown as error:
                self._rolls[key] = error
        found = self._rolls[key]
        if isinstance(found, NotKnown):
            raise found
        return found

    def _unknown(self, query: str, error: NotKnown) -> Unknown:
        self._troubles.append(error.trouble)
        return Unknown(error.trouble.message, self._batch.at_s, f"Prometheus: {query}")

    def _share(self, asked: _Question) -> WindowedShare:
        try:
            return self._attained(asked)
        except NotKnown as error:
            return asked.share(self._unknown(asked.query, error))

    def _attained(self, asked: _Question) -> WindowedShare:
        roll = self._roll(ENGINES, asked.request_class)
        parts = {pod: self._counted(asked, pod, beat) for pod, beat in roll.beats.items()}
        total = sum(part.total for part in parts.values())
        if total < 1:
            self._refuse_stalled(asked, roll)
            return asked.share(Idle(roll.oldest_s, f"Prometheus: {asked.query}"))
        independent = sum(
            self._independent(asked, pod, roll.beats[pod], part.total)
            for pod, part in parts.items()
        )
        lower, upper = bad_bounds(list(parts.values()), independent)
        boundaries = {p.boundary_ms for p in parts.values() if p.boundary_ms is not None}
        good_percent = 100 * (sum(part.num_good for part in parts.values()) / total)
        query = asked.bucket_query if boundaries else asked.query
        return replace(
            asked.share(Value(good_percent, roll.oldest_s, f"Prometheus: {query}")),
            bad_lower=lower,
            bad_upper=upper,
            num_events=total,
            boundary_ms=min(boundaries, default=None),
        )

    def _counted(self, asked: _Question, pod: PodKey, beat: Heartbeat) -> Counted:
        exact = self._batch.series(asked.query, pod, beat.job)
        try:
            if not exact and asked.bucket_query in self._batch.answers:
                found = self._batch.series(asked.bucket_query, pod, beat.job)
                return counted_buckets(found, HISTOGRAMS[asked.objective], asked.threshold_ms)
            return counted_events(
                exact, asked.objective, asked.threshold_ms, asked.request_class.value
            )
        except NotKnown as error:
            raise NotKnown(error.trouble.reason, f"{pod[1]}: {error.trouble.message}") from error

    def _independent(
        self, asked: _Question, pod: PodKey, beat: Heartbeat, num_events: float
    ) -> float:
        """All gaps of one step are one reading of its time. Without counted steps, a step has as
        many gaps as requests run."""
        if asked.objective != "itl":
            return num_events
        steps = self._batch.series(f"steps[{asked.window}]", pod, beat.job)
        if not steps:
            return num_events / max(1.0, beat.value or 0.0)
        return min(num_events, sum(_number(s.value, STEPS, pod) for s in steps))

    def _refuse_stalled(self, asked: _Question, roll: Roll) -> None:
        """An engine that hangs counts nothing at all: that is no rest."""
        if asked.objective == "itl":
            busy = sum(beat.value or 0.0 for beat in roll.beats.values())
        else:
            busy = sum(v for _, v in self._of_each(WAITING_PEAK, roll, None))
        if busy >= 1:
            noun = "gap" if asked.objective == "itl" else "first token"
            state = "run" if asked.objective == "itl" else "have waited"
            raise NotKnown("Stalled", f"no {noun} was counted, though requests {state}")

    def _peaks(self) -> list[WindowedQuantity]:
        return [
            self._quantity(f"{of_pods.value}/{query}", query, of_pods, None, reduce)
            for of_pods, pods in self._pool.engines.items()
            if pods
            for query, reduce in ((WAITING_PEAK, sum), (KV_PEAK, max))
        ]

    def _arrivals(self) -> list[WindowedQuantity]:
        return [
            self._quantity(f"{c.value}/{name}", query, None, c, sum)
            for name, query in ((ARRIVALS, GATEWAYS), (ARRIVALS_PEAK, ARRIVALS_PEAK))
            for c in RequestClass
        ]

    def _quantity(
        self,
        name: str,
        query: str,
        of_pods: RequestClass | None,
        of_series: RequestClass | None,
        reduce: Callable[[Iterable[float]], float],
    ) -> WindowedQuantity:
        """of_pods: the class whose engines are meant, None for the gateways. of_series: the class
        label that counts, None where there is none."""
        try:
            roll = self._roll(ENGINES if of_pods else GATEWAYS, of_pods)
            number = reduce([value for _, value in self._of_each(query, roll, of_series)])
        except NotKnown as error:
            return WindowedQuantity(name, self._unknown(query, error))
        source = f"Prometheus: {query}"
        if of_series is not None and number == 0:
            return WindowedQuantity(name, Idle(roll.oldest_s, source))
        return WindowedQuantity(name, Value(number, roll.oldest_s, source))

    def _of_each(
        self, query: str, roll: Roll, request_class: RequestClass | None
    ) -> list[tuple[PodKey, float]]:
        """Each pod's own sum; of raw counters, how fast they rose. Raise NotKnown."""
        found = []
        for pod, beat in roll.beats.items():
            series = self._batch.series(query, pod, beat.job)
            if request_class is not None:
                if any(CLASS not in s.labels for s in series):
                    raise NotKnown(LABEL, f"{pod[1]}: label {CLASS} is absent, query {query}")
                series = [s for s in series if s.labels[CLASS] == request_class.value]
            if query == GATEWAYS:
                series = [s for s in series if len(s.points) > 1]
            if not series:
                raise NotKnown(SERIES, f"{pod[1]}: query {query} finds no series")
            values = [s.rise_per_s if query == GATEWAYS else s.value for s in series]
            found.append((pod, sum(_number(value, query, pod) for value in values)))
        return found


def _number(value: float, name: str, pod: PodKey) -> float:
    number = checked(value)
    if number is None:
        raise NotKnown(NUMBER, f"{pod[1]}: {name} is NaN, negative or absurdly large")
    return number
