"""Prometheus' answers as values: series of points with the samples' own times, sorted by pod. Pure.

An instant vector's points carry the evaluation time; those of a range selector their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

PodKey = tuple[str, str]  # namespace and name
NAMESPACE: Final = "namespace"
POD: Final = "pod"
JOB: Final = "job"
INSTANCE: Final = "instance"
NAME: Final = "__name__"


class AnswerError(ValueError):
    """An answer that is not what Prometheus answers; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Series:
    """points: time in s and value, oldest first, at least one. A value may be NaN or infinite."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def latest(self) -> tuple[float, float]:
        return self.points[-1]

    @property
    def value(self) -> float:
        return self.points[-1][1]

    @property
    def rise_per_s(self) -> float:
        """Of a counter, between its first and its last point here; at least two points. What it
        shows after it went back, it has counted since."""
        values = [value for _, value in self.points]
        steps = zip(values, values[1:], strict=False)
        risen = sum(after - before if after >= before else after for before, after in steps)
        return risen / (self.points[-1][0] - self.points[0][0])

    @property
    def pod(self) -> PodKey:
        """Empty words where a label is absent."""
        return self.labels.get(NAMESPACE, ""), self.labels.get(POD, "")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one query brought: series, or the failure that says why not."""

    query: str
    series: tuple[Series, ...] = ()
    failure: str | None = None
    _by_pod: dict[PodKey, list[Series]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for series in self.series:
            self._by_pod.setdefault(series.pod, []).append(series)

    def of(self, pod: PodKey) -> Sequence[Series]:
        return self._by_pod.get(pod, ())

    @property
    def source(self) -> str:
        return f"Prometheus: {self.query}"


def understood(query: str, body: object) -> Answer:
    """Raise AnswerError on anything but a whole vector or matrix."""
    if not isinstance(body, Mapping):
        raise AnswerError("the answer is no JSON object")
    if body.get("status") == "error":
        raise AnswerError(f"{body.get('errorType')}: {body.get('error')}")
    if body.get("status") != "success":
        raise AnswerError("that is no answer of Prometheus")
    if warnings := body.get("warnings"):  # such as stores behind it that did not answer
        raise AnswerError(f"the answer is partial: {warnings[0]}")
    try:
        data = body["data"]
        kind, result = data["resultType"], data["result"]
        if kind not in ("vector", "matrix"):
            raise AnswerError(f"the answer is a {kind}, not a vector")
        field_of = "value" if kind == "vector" else "values"
        return Answer(query, tuple(_series(item, field_of) for item in result))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, AnswerError):
            raise
        raise AnswerError(f"the answer lacks or garbles {error}") from error


def _series(item: Any, field_of: str) -> Series:
    points = [item["value"]] if field_of == "value" else item["values"]
    labels: dict[str, str] = item["metric"]
    if not points or not isinstance(labels, dict):
        raise TypeError("a series")
    return Series(labels, tuple((float(at_s), float(value)) for at_s, value in points))


def of_one_job(series: Iterable[Series], job: str | None) -> list[Series]:
    """Two jobs that scrape one pod tell everything twice."""
    return [s for s in series if job is None or s.labels.get(JOB, "") == job]
