"""Metrics by tenant, bounded: the first tenants by name, all later ones together as `other`.

Whoever can name tenants could otherwise make a series for each. Counted as tokens come, rendered
only when somebody scrapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chairlift_engine.residency import Gauges
from chairlift_engine.scheduler import TokenEvent
from chairlift_protocol import metrics as names
from chairlift_protocol.wire import OTHER_TENANTS

MAX_TENANTS: Final = 64


class TenantMetrics(Collector):
    def __init__(self) -> None:
        self._named: dict[str, None] = {OTHER_TENANTS: None}  # in the order they came
        self._num_prompt_tokens: Counter[str] = Counter()
        self._num_generation_tokens: Counter[str] = Counter()
        self._gauges: Gauges | None = None

    def observe_gauges(self, gauges: Gauges) -> None:
        self._gauges = gauges
        for tenant in gauges.tenants or {}:
            self._label(tenant)

    def observe_token(self, event: TokenEvent) -> None:
        label = self._label(event.request.tenant)
        self._num_generation_tokens[label] += 1
        if event.gap_s is None:
            self._num_prompt_tokens[label] += event.request.num_prompt_tokens

    def collect(self) -> Iterator[Metric]:
        num_running: Counter[str] = Counter()
        num_waiting: Counter[str] = Counter()
        if self._gauges is not None:
            for tenant, gauge in (self._gauges.tenants or {}).items():
                num_running[self._label(tenant)] += gauge.num_running
                num_waiting[self._label(tenant)] += gauge.num_waiting
        gauges = (
            (names.TENANT_RUNNING, "Requests that hold a slot, by tenant.", num_running),
            (names.TENANT_WAITING, "Requests without a slot, by tenant.", num_waiting),
        )
        counters = (
            (
                names.TENANT_PROMPT_TOKENS,
                "Prompt tokens by tenant, at first token.",
                self._num_prompt_tokens,
            ),
            (
                names.TENANT_GENERATION_TOKENS,
                "Sampled tokens by tenant.",
                self._num_generation_tokens,
            ),
        )
        for name, text, values in gauges:
            yield self._filled(GaugeMetricFamily(name, text, labels=["tenant"]), values)
        for name, text, values in counters:
            yield self._filled(CounterMetricFamily(name, text, labels=["tenant"]), values)

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, values: Counter[str]
    ) -> Metric:
        for label in self._named:
            family.add_metric([label], values[label])
        return family

    def _label(self, tenant: str) -> str:
        if tenant not in self._named:
            if len(self._named) > MAX_TENANTS:
                return OTHER_TENANTS
            self._named[tenant] = None
        return tenant
