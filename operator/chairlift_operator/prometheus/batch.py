"""One batch of answers, all as of one moment, and the pods that it is joined on. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from chairlift_operator.pool_windows import NOT_YET_ASKED, NOT_YET_SCRAPED, Trouble
from chairlift_operator.prometheus.attained import NotKnown
from chairlift_operator.prometheus.heartbeats import (
    Pod,
    Roll,
    heartbeats,
    roll_call,
    scrape_interval_s,
    trouble_of,
)
from chairlift_operator.prometheus.preflight import diagnose
from chairlift_operator.prometheus.queries import ENGINE_HEARTBEAT, GATEWAY_HEARTBEAT
from chairlift_operator.prometheus.series import Answer, PodKey, Series, of_one_job
from chairlift_protocol.wire import RequestClass

QUERY_FAILED = "QueryFailed"
# The query that tells which pods are told of, and what such a pod is called.
ENGINES, GATEWAYS = "running", "received"
_NOUNS = {ENGINES: "engine", GATEWAYS: "gateway"}
_SERIES = {ENGINES: ENGINE_HEARTBEAT, GATEWAYS: GATEWAY_HEARTBEAT}


@dataclass(frozen=True, slots=True)
class PoolPods:
    """A pool's Ready pods, and the thresholds that its engines count against, in ms."""

    engines: Mapping[RequestClass, Sequence[Pod]]
    gateways: Sequence[Pod]
    thresholds_ms: Mapping[tuple[RequestClass, str], float]

    def of(self, heartbeat: str) -> list[Pod]:
        if heartbeat == GATEWAYS:
            return list(self.gateways)
        return [pod for pods in self.engines.values() for pod in pods]


@dataclass(frozen=True, slots=True)
class Batch:
    """failure: why there are no answers, and the word for it."""

    at_s: float
    answers: Mapping[str, Answer] = field(default_factory=dict)
    failure: str = "it has not been asked yet"
    reason: str = NOT_YET_ASKED

    def answer(self, query: str) -> Answer:
        """Raise NotKnown."""
        found = self.answers.get(query)
        if found is None:
            raise NotKnown(self.reason, f"Prometheus, query {query}: {self.failure}")
        if found.failure is not None:
            raise NotKnown(QUERY_FAILED, f"Prometheus, query {query}: {found.failure}")
        return found

    def everybody(self, heartbeat: str, pods: Collection[Pod]) -> Roll:
        """Raise NotKnown unless all are told of that should be, by numbers."""
        roll = roll_call(self.answer(heartbeat), pods, self.at_s)
        noun = _NOUNS[heartbeat]
        if not pods:
            raise NotKnown(NOT_YET_SCRAPED, f"no {noun} is Ready")
        if not roll.is_complete:
            known = (self.answers.get("up"), self.answers.get("labels"))
            diagnosed = diagnose(roll.missed, _SERIES[heartbeat], *known)
            found: Trouble = trouble_of(noun, roll, len(pods), diagnosed)
            raise NotKnown(found.reason, found.message)
        if bad := [pod for pod, beat in roll.beats.items() if beat.value is None]:
            name = f"{_SERIES[heartbeat]} of {min(bad)[1]}"
            raise NotKnown("NotANumber", f"{name} is NaN, negative or absurdly large")
        return roll

    def series(self, query: str, pod: PodKey, job: str) -> list[Series]:
        """Raise NotKnown."""
        return of_one_job(self.answer(query).of(pod), job)

    def missed(self, heartbeat: str, pods: Iterable[Pod]) -> list[PodKey]:
        """Pods that should be told of and are not; none where the question itself failed."""
        try:
            return list(roll_call(self.answer(heartbeat), list(pods), self.at_s).missed)
        except NotKnown:
            return []

    def without_series(self, query: str, pods: Collection[Pod]) -> list[PodKey]:
        """Engines that are told of, but not by this query."""
        try:
            answer = self.answer(query)
            seen = roll_call(self.answer(ENGINES), pods, self.at_s).beats
        except NotKnown:
            return []
        return [pod for pod in seen if not answer.of(pod)]

    def scrape_s(self, pods: Iterable[Pod]) -> float:
        """How often the slowest of the pods is scraped, as far as it is known."""
        keys = [pod.key for pod in pods]
        beats = [
            beat
            for query in (ENGINES, GATEWAYS)
            if (answer := self.answers.get(query)) is not None
            for beat in heartbeats(answer, keys).values()
        ]
        return scrape_interval_s(beats)
