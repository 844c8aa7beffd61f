"""Which pods Prometheus tells of, how fresh, by which job, and how often they are scraped. Pure.

Read from a gauge that every engine has (a counter, for gateways), with its samples' own times.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from chairlift_operator.pool_windows import NOT_YET_SCRAPED, Trouble
from chairlift_operator.prometheus.queries import HEARTBEAT_S
from chairlift_operator.prometheus.series import INSTANCE, JOB, Answer, PodKey, Series
from chairlift_operator.signals import checked

FIRST_SCRAPE_S: Final = 60.0  # Prometheus' default, until it is known better
NUM_STALE_SCRAPES: Final = 3.0
# Until Prometheus has found a new pod, beyond the two scrapes that a rate needs.
DISCOVERY_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """job: the one whose series count. at_s: of its newest sample; of several targets, the oldest
    such. scrape_s: from sample to sample, None with one alone. value: the sum over the pod's
    series; None when one of them is no number."""

    job: str
    at_s: float
    scrape_s: float | None
    num_samples: int
    value: float | None

    @property
    def usual_s(self) -> float:
        """From sample to sample, as far as it is known."""
        return self.scrape_s or FIRST_SCRAPE_S


@dataclass(frozen=True, slots=True)
class Pod:
    """A Ready pod, as the watch knows it. ready_since_s: 0 when that is not known."""

    key: PodKey
    ready_since_s: float


def heartbeats(answer: Answer, pods: Iterable[PodKey]) -> dict[PodKey, Heartbeat]:
    beats = {}
    for pod in pods:
        by_job: dict[str, list[Series]] = {}
        for series in answer.of(pod):
            by_job.setdefault(series.labels.get(JOB, ""), []).append(series)
        if found := [_heartbeat(job, series) for job, series in sorted(by_job.items())]:
            beats[pod] = _preferred(found)
    return beats


def _preferred(beats: Sequence[Heartbeat]) -> Heartbeat:
    """Of jobs that are alive, the one that told most; of equals always the same."""
    newest_s = max(beat.at_s for beat in beats)
    alive = [b for b in beats if newest_s - b.at_s <= NUM_STALE_SCRAPES * b.usual_s]
    return max(alive, key=lambda beat: beat.num_samples)


def _heartbeat(job: str, series: list[Series]) -> Heartbeat:
    fresh = [s for group in _by_target(series) for s in of_last_scrape(group)]
    values = [checked(s.value) for s in fresh]
    known = [value for value in values if value is not None]
    return Heartbeat(
        job,
        min(s.latest[0] for s in fresh),
        max((usual for s in fresh if (usual := _usual_s(s)) is not None), default=None),
        max(len(s.points) for s in fresh),
        sum(known) if len(known) == len(values) else None,
    )


def _usual_s(series: Series) -> float | None:
    times_s = [at_s for at_s, _ in series.points]
    if len(times_s) < 2:
        return None
    return statistics.median(b - a for a, b in zip(times_s, times_s[1:], strict=False))


def _by_target(series: Iterable[Series]) -> list[list[Series]]:
    by_target: dict[str, list[Series]] = {}
    for one in series:
        by_target.setdefault(one.labels.get(INSTANCE, ""), []).append(one)
    return list(by_target.values())


def of_last_scrape(series: Collection[Series]) -> list[Series]:
    """One target's series that its newest scrape still had: all carry that scrape's time."""
    newest_s = max(s.latest[0] for s in series)
    return [s for s in series if s.latest[0] == newest_s]


def scrape_interval_s(beats: Iterable[Heartbeat]) -> float:
    """The slowest pod's."""
    known = [beat.scrape_s for beat in beats if beat.scrape_s is not None]
    return max(known, default=FIRST_SCRAPE_S)


@dataclass(frozen=True, slots=True)
class Roll:
    """Which of the pods are told of. missed: why, for each that should be and is not."""

    beats: Mapping[PodKey, Heartbeat]
    missed: Mapping[PodKey, Trouble]
    oldest_s: float

    @property
    def is_complete(self) -> bool:
        return bool(self.beats) and not self.missed


def roll_call(answer: Answer, pods: Collection[Pod], at_s: float) -> Roll:
    """at_s: as of when the question was asked. A pod that is just ready is not missed yet."""
    beats, missed = {}, {}
    seen = heartbeats(answer, [pod.key for pod in pods])
    scrape_s = scrape_interval_s(seen.values())
    for pod in pods:
        beat = seen.get(pod.key)
        why = _missed_because(beat, at_s)
        if why is None and beat is not None:
            beats[pod.key] = beat
        elif why is not None and at_s - pod.ready_since_s > 2 * scrape_s + DISCOVERY_S:
            missed[pod.key] = why
    oldest_s = min((beat.at_s for beat in beats.values()), default=at_s)
    return Roll(beats, missed, oldest_s)


def _missed_because(beat: Heartbeat | None, at_s: float) -> Trouble | None:
    if beat is None:
        return Trouble("SeriesMissing", f"no sample in the last {HEARTBEAT_S:.0f} s")
    age_s = at_s - beat.at_s
    if age_s > NUM_STALE_SCRAPES * beat.usual_s:
        return Trouble("Stale", f"its last sample is {age_s:.0f} s old")
    if beat.scrape_s is None:
        sentence = f"one sample in {HEARTBEAT_S:.0f} s, and a rate needs two"
        return Trouble("ScrapedTooRarely", f"{sentence}: scrape at least every 60 s")
    return None


def trouble_of(
    what: str, roll: Roll, num_pods: int, diagnosed: Mapping[PodKey, Trouble]
) -> Trouble:
    """Of a roll that is not complete."""
    if not roll.missed:
        return Trouble(NOT_YET_SCRAPED, f"no {what} has been scraped twice yet")
    pod = min(roll.missed)
    own = diagnosed.get(pod, roll.missed[pod])
    sentence = f"{pod[1]}: {own.message}"
    if not roll.beats:
        return Trouble(own.reason, sentence)
    return Trouble("Partial", f"{len(roll.beats)} of {num_pods} Ready {what}s are seen; {sentence}")
