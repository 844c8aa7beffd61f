"""How metrics are declared: with vLLM's labels, by class, or plain. Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from chairlift_protocol.wire import RequestClass


class Series:
    """A registry of its own, so that engines can share a process in tests."""

    def __init__(self, model_name: str, engine_id: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": engine_id}

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, list(self._labels), registry=self.registry).labels(**self._labels)

    def counter(self, name: str, text: str) -> Counter:
        counter = Counter(name, text, list(self._labels), registry=self.registry)
        return counter.labels(**self._labels)

    def counters(self, name: str, text: str, label: str, values: Sequence[str]) -> list[Counter]:
        """vLLM's labels and one more, whose values are known."""
        counter = Counter(name, text, [*self._labels, label], registry=self.registry)
        return [counter.labels(**self._labels, **{label: value}) for value in values]

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(
            name, text, list(self._labels), registry=self.registry, buckets=buckets
        )
        return histogram.labels(**self._labels)

    def plain_gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def plain_counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def plain_histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, registry=self.registry, buckets=buckets)

    def labelled_gauges(
        self, name: str, text: str, label: str, values: Sequence[str]
    ) -> dict[str, Gauge]:
        gauge = Gauge(name, text, [label], registry=self.registry)
        return {value: gauge.labels(value) for value in values}

    def labelled_counters(
        self, name: str, text: str, label: str, values: Sequence[str]
    ) -> dict[str, Counter]:
        counter = Counter(name, text, [label], registry=self.registry)
        return {value: counter.labels(value) for value in values}

    def class_gauges(self, name: str, text: str) -> dict[str, Gauge]:
        return self.labelled_gauges(name, text, "class", list(RequestClass))

    def class_counters(self, name: str, text: str) -> dict[str, Counter]:
        return self.labelled_counters(name, text, "class", list(RequestClass))
