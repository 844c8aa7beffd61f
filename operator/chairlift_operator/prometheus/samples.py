"""What a pod's own /metrics would say, from Prometheus: for pods that cannot be asked. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.samples import Sample

from chairlift_operator.exposition import (
    EngineSample,
    ExpositionError,
    GatewayClassSample,
    engine_sample,
    gateway_sample,
)
from chairlift_operator.prometheus.heartbeats import of_last_scrape
from chairlift_operator.prometheus.series import INSTANCE, JOB, NAME, Series


@dataclass(frozen=True, slots=True)
class PodSeries:
    """The series of one pod's newest scrape, and when that was."""

    at_s: float
    by_name: dict[str, list[Sample]]

    def engine(self) -> EngineSample:
        return engine_sample(self.by_name)

    def gateway(self) -> tuple[GatewayClassSample, ...] | None:
        try:
            return gateway_sample(self.by_name)
        except ExpositionError:
            return None


def pod_series(series: Sequence[Series]) -> PodSeries | None:
    """One job's: two that scrape one pod tell everything twice. None without any series."""
    by_job: dict[str, dict[str, list[Series]]] = {}
    for one in series:
        targets = by_job.setdefault(one.labels.get(JOB, ""), {})
        targets.setdefault(one.labels.get(INSTANCE, ""), []).append(one)
    found = [_newest(list(targets.values())) for _, targets in sorted(by_job.items())]
    return max(found, key=lambda one: one.at_s) if found else None


def _newest(targets: list[list[Series]]) -> PodSeries:
    """A pod of several targets is as old as its oldest."""
    by_name: dict[str, list[Sample]] = {}
    times_s = []
    for target in targets:
        current = of_last_scrape(target)
        times_s.append(current[0].latest[0])
        for one in current:
            name = one.labels.get(NAME, "")
            by_name.setdefault(name, []).append(Sample(name, dict(one.labels), one.value))
    return PodSeries(min(times_s), by_name)
