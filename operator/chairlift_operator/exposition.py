"""One engine's `/metrics` text as numbers: pure, and strict about what is not there.

An absent series is None, never 0; a NaN, negative or absurdly large sample makes its whole metric
None and is named in `rejected`. Series of one engine (several engine ids in one process) are
reduced here, before anything is compared across replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from chairlift_operator.metric_lines import lines_of
from chairlift_operator.signals import checked
from chairlift_protocol import metrics
from chairlift_protocol.policy import Generation
from chairlift_protocol.wire import OTHER_TENANTS, RequestClass

NUM_REMEMBERED: Final = 4096  # engines and gateways of a thousand pools, and some


class ExpositionError(ValueError):
    """Text that is not Prometheus' exposition format."""


@dataclass(frozen=True, slots=True)
class SloCount:
    """Events counted so far against one threshold. A side whose series is absent is None."""

    objective: str
    threshold_ms: float
    request_class: str
    num_good: float | None
    num_bad: float | None


@dataclass(frozen=True, slots=True)
class ClassSample:
    """One request class on one engine; None where it did not say."""

    request_class: RequestClass
    num_running: float | None = None
    num_waiting: float | None = None
    oldest_waiting_s: float | None = None
    first_tokens: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class SlotHolder:
    """The tenant with the most running requests on one engine; an empty name while none runs.

    num_others_waiting: requests of everybody else that have no slot.
    """

    tenant: str
    num_running: float
    num_others_waiting: float

    @classmethod
    def among(cls, running: Mapping[str, float], waiting: Mapping[str, float]) -> Self:
        """By tenant. Those that are told of together are nobody in particular."""
        named = (t for t, count in running.items() if t != OTHER_TENANTS and count > 0)
        tenant = min(named, key=lambda t: (-running[t], t), default="")
        others = sum(count for t, count in waiting.items() if t != tenant)
        return cls(tenant, running.get(tenant, 0.0), others)


@dataclass(frozen=True, slots=True)
class GatewayClassSample:
    """One request class at the gateway: how many came so far, how many wait there for a replica."""

    request_class: RequestClass
    num_received: float
    num_held: float


@dataclass(frozen=True, slots=True)
class EngineSample:
    """An engine's counters and gauges at one moment; None where it did not say."""

    step_seconds: float | None = None
    num_steps: float | None = None
    step_decode_seqs: float | None = None
    step_prefill_tokens: float | None = None
    step_kv_tokens: float | None = None
    num_running: float | None = None
    num_waiting: float | None = None
    kv_usage: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    num_preemptions: float | None = None
    num_finished: float | None = None
    classes: tuple[ClassSample, ...] = ()
    slo_counts: tuple[SloCount, ...] = ()
    policy_generation: Generation | None = None
    slot_holder: SlotHolder | None = None
    rejected: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the series without which nothing may be decided."""
        return tuple(name for name, field in _NEEDED.items() if getattr(self, field) is None)

    def of(self, request_class: RequestClass) -> ClassSample:
        for own in self.classes:
            if own.request_class is request_class:
                return own
        return ClassSample(request_class)

    def slo_count(self, objective: str, threshold_ms: float, request_class: str) -> SloCount | None:
        """The count for exactly this threshold; one of another says nothing of it."""
        for count in self.slo_counts:
            if (
                count.objective == objective
                and count.request_class == request_class
                and math.isclose(count.threshold_ms, threshold_ms, rel_tol=1e-5)
            ):
                return count
        return None


_NEEDED: Final = {
    metrics.STEP_SECONDS: "step_seconds",
    metrics.STEPS: "num_steps",
    metrics.STEP_DECODE_SEQS: "step_decode_seqs",
    metrics.STEP_PREFILL_TOKENS: "step_prefill_tokens",
    metrics.STEP_KV_TOKENS: "step_kv_tokens",
    metrics.NUM_REQUESTS_RUNNING: "num_running",
    metrics.NUM_REQUESTS_WAITING: "num_waiting",
}
_BY_CLASS: Final = {
    metrics.REQUESTS_RUNNING: "num_running",
    metrics.REQUESTS_WAITING: "num_waiting",
    metrics.OLDEST_WAITING_SECONDS: "oldest_waiting_s",
    metrics.FIRST_TOKENS: "first_tokens",
    metrics.CLASS_PROMPT_TOKENS: "prompt_tokens",
    metrics.CLASS_GENERATION_TOKENS: "generation_tokens",
}


# All that is read of a gateway, and of an engine.
GATEWAY_SERIES: Final = (metrics.REQUESTS_RECEIVED, metrics.GATEWAY_HELD)
ENGINE_SERIES: Final = (
    *_NEEDED,
    *_BY_CLASS,
    metrics.KV_CACHE_USAGE,
    metrics.PROMPT_TOKENS,
    metrics.GENERATION_TOKENS,
    metrics.NUM_PREEMPTIONS,
    metrics.REQUEST_SUCCESS,
    metrics.SLO_EVENTS,
    metrics.POLICY_GENERATION,
    metrics.TENANT_RUNNING,
    metrics.TENANT_WAITING,
)


def parse_gateway_metrics(text: str) -> tuple[GatewayClassSample, ...]:
    """Raise ExpositionError unless arrivals and held requests of every class are there."""
    return _parsed_gateway(lines_of(text, GATEWAY_SERIES))


def parse_engine_metrics(text: str) -> EngineSample:
    return _parsed_engine(lines_of(text, ENGINE_SERIES))


# What rests says the same each time: parsing it is most of the cost of looking at it.
@lru_cache(maxsize=NUM_REMEMBERED)
def _parsed_gateway(lines: str) -> tuple[GatewayClassSample, ...]:
    return gateway_sample(_by_name(lines))


@lru_cache(maxsize=NUM_REMEMBERED)
def _parsed_engine(lines: str) -> EngineSample:
    return engine_sample(_by_name(lines))


def gateway_sample(by_name: Mapping[str, Sequence[Sample]]) -> tuple[GatewayClassSample, ...]:
    """Of one gateway's series, by their names. ExpositionError as `parse_gateway_metrics`."""
    reader, found = _Reader(by_name), []
    for request_class in RequestClass:
        received = reader.of_class(metrics.REQUESTS_RECEIVED, request_class)
        held = reader.of_class(metrics.GATEWAY_HELD, request_class)
        if received is None or held is None:
            name = metrics.REQUESTS_RECEIVED if received is None else metrics.GATEWAY_HELD
            raise ExpositionError(f"series {name} of class {request_class} is absent or no number")
        found.append(GatewayClassSample(request_class, received, held))
    return tuple(found)


def engine_sample(by_name: Mapping[str, Sequence[Sample]]) -> EngineSample:
    """Of one engine's series, by their names, all of one moment."""
    reader = _Reader(by_name)
    return EngineSample(
        **{attribute: reader.reduced(name, sum) for name, attribute in _NEEDED.items()},
        kv_usage=reader.reduced(metrics.KV_CACHE_USAGE, _mean),
        prompt_tokens=reader.reduced(metrics.PROMPT_TOKENS, sum),
        generation_tokens=reader.reduced(metrics.GENERATION_TOKENS, sum),
        num_preemptions=reader.reduced(metrics.NUM_PREEMPTIONS, sum),
        num_finished=reader.reduced(metrics.REQUEST_SUCCESS, sum),
        classes=tuple(
            ClassSample(c, **{field: reader.of_class(name, c) for name, field in _BY_CLASS.items()})
            for c in RequestClass
        ),
        slo_counts=reader.slo_counts(),
        policy_generation=reader.policy_generation(),
        slot_holder=reader.slot_holder(),
        rejected=tuple(sorted(reader.rejected)),
    )


def _by_name(text: str) -> dict[str, list[Sample]]:
    by_name: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                by_name.setdefault(sample.name, []).append(sample)
    except (ValueError, KeyError, IndexError) as error:
        raise ExpositionError(f"not Prometheus text: {error}") from error
    return by_name


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


class _Reader:
    def __init__(self, by_name: Mapping[str, Sequence[Sample]]) -> None:
        self._by_name = by_name
        self.rejected: set[str] = set()

    def reduced(self, name: str, reduce: Callable[[list[float]], float]) -> float | None:
        return self._reduce(name, self._by_name.get(name, ()), reduce)

    def of_class(self, name: str, request_class: RequestClass) -> float | None:
        samples = self._by_name.get(name, ())
        own = [s for s in samples if s.labels.get("class") == request_class]
        return self._reduce(name, own, sum)

    def slo_counts(self) -> tuple[SloCount, ...]:
        groups: dict[tuple[str, float, str], dict[str, list[Sample]]] = {}
        for sample in self._by_name.get(metrics.SLO_EVENTS, ()):
            labels = sample.labels
            try:
                key = (labels["objective"], float(labels["threshold_ms"]), labels["class"])
                result = labels["result"]
            except (KeyError, ValueError):
                self.rejected.add(metrics.SLO_EVENTS)  # a label is absent: whose events are these?
                continue
            groups.setdefault(key, {}).setdefault(result, []).append(sample)
        return tuple(
            SloCount(
                *key,
                num_good=self._reduce(metrics.SLO_EVENTS, results.get("good", ()), sum),
                num_bad=self._reduce(metrics.SLO_EVENTS, results.get("bad", ()), sum),
            )
            for key, results in sorted(groups.items())
        )

    def slot_holder(self) -> SlotHolder | None:
        running, waiting = (
            self._by_tenant(name) for name in (metrics.TENANT_RUNNING, metrics.TENANT_WAITING)
        )
        return SlotHolder.among(running, waiting) if running and waiting else None

    def _by_tenant(self, name: str) -> dict[str, float] | None:
        """None where it is not told, or not of each."""
        groups: dict[str, list[Sample]] = {}
        for sample in self._by_name.get(name, ()):
            groups.setdefault(sample.labels.get("tenant", ""), []).append(sample)
        counts = {tenant: self._reduce(name, group, sum) for tenant, group in groups.items()}
        known = {tenant: count for tenant, count in counts.items() if count is not None}
        return known if known and len(known) == len(counts) else None

    def policy_generation(self) -> Generation | None:
        parts = {
            sample.labels.get("part"): checked(sample.value)
            for sample in self._by_name.get(metrics.POLICY_GENERATION, ())
        }
        term, counter = parts.get("term"), parts.get("counter")
        return None if term is None or counter is None else Generation(int(term), int(counter))

    def _reduce(
        self, name: str, samples: Sequence[Sample], reduce: Callable[[list[float]], float]
    ) -> float | None:
        numbers = [number for s in samples if (number := checked(s.value)) is not None]
        if len(numbers) < len(samples):
            self.rejected.add(name)  # a sum over the rest would be a wrong number
            return None
        return reduce(numbers) if numbers else None
