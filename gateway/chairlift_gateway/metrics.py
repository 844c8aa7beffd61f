"""What the gateway counts, as the client sees it. docs/protocol.md says what each series means.

Only requests for tokens (completions and chat completions) are counted: arrivals feed the number
of replicas, and listing models is no demand. Each gateway has its own registry. `proxy`, `upstream`
and `holding` write; `app` shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from chairlift_protocol import metrics as names
from chairlift_protocol.wire import OTHER_TENANTS, RequestClass

# An interactive objective lies between tens of milliseconds and a few seconds; a held request may
# wait half a minute.
TTFT_BUCKETS_S = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    3.0,
    5.0,
    7.5,
    10.0,
    15.0,
    20.0,
    30.0,
    45.0,
    60.0,
)
GAP_BUCKETS_S = (
    0.005,
    0.01,
    0.015,
    0.02,
    0.025,
    0.03,
    0.04,
    0.05,
    0.06,
    0.075,
    0.1,
    0.125,
    0.15,
    0.2,
    0.25,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
)

MAX_TENANTS = 64  # so many are named in metrics, the others together

# Nginx's code for a client that left before its answer was complete; no such answer is sent.
CLIENT_LEFT = 499


@dataclass(frozen=True, slots=True)
class ClassSeries:
    """A class's own series; to look them up costs more than to count."""

    received: Counter
    in_flight: Gauge
    held: Gauge
    ttft: Histogram
    gap: Histogram


class GatewayMetrics:
    """Both classes show from the start, because an absent series is not a zero.

    on_change: hears of every arrival, and of every request that is held or let go.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._registry = registry = CollectorRegistry()
        received = Counter(
            names.REQUESTS_RECEIVED,
            "Requests that arrived, refused ones too.",
            ["class"],
            registry=registry,
        )
        self.responses = Counter(
            names.GATEWAY_RESPONSES,
            "Outcomes by status code; 499: the client left, 502: also a stream that broke off.",
            ["class", "code"],
            registry=registry,
        )
        ttft = Histogram(
            names.GATEWAY_TTFT_SECONDS,
            "Arrival to the first token of a stream.",
            ["class"],
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        gap = Histogram(
            names.GATEWAY_GAP_SECONDS,
            "Time between two tokens of a stream.",
            ["class"],
            buckets=GAP_BUCKETS_S,
            registry=registry,
        )
        in_flight = Gauge(
            names.GATEWAY_IN_FLIGHT,
            "Requests between arrival and outcome.",
            ["class"],
            registry=registry,
        )
        held = Gauge(
            names.GATEWAY_HELD,
            "Requests that wait for a replica to become ready.",
            ["class"],
            registry=registry,
        )
        self.upstream_failures = Counter(
            names.GATEWAY_UPSTREAM_FAILURES,
            "Replicas that failed, before or after an answer began.",
            ["stage"],
            registry=registry,
        )
        self._named_tenants = {OTHER_TENANTS}
        self.tenant_tokens = Counter(
            names.GATEWAY_TENANT_TOKENS,
            "Tokens that requests of a tenant used, prompts included.",
            ["tenant", "class"],
            registry=registry,
        )
        self.tenant_refused = Counter(
            names.GATEWAY_TENANT_REFUSED,
            "Requests over a tenant's limits, by the limit.",
            ["tenant", "class", "reason"],
            registry=registry,
        )
        self._by_class = {
            each: ClassSeries(
                received=received.labels(each.value),
                in_flight=in_flight.labels(each.value),
                held=held.labels(each.value),
                ttft=ttft.labels(each.value),
                gap=gap.labels(each.value),
            )
            for each in RequestClass
        }
        for stage in ("before_answer", "in_answer"):
            self.upstream_failures.labels(stage)

    def of(self, request_class: RequestClass) -> ClassSeries:
        return self._by_class[request_class]

    def count_arrival(self, request_class: RequestClass) -> None:
        self.of(request_class).received.inc()
        self._on_change()

    def count_held(self, request_class: RequestClass, more: int) -> None:
        self.of(request_class).held.inc(more)
        self._on_change()

    def count_tenant_tokens(self, tenant: str, request_class: RequestClass, more: int) -> None:
        self.tenant_tokens.labels(self._named(tenant), request_class.value).inc(more)

    def count_tenant_refused(self, tenant: str, request_class: RequestClass, why: str) -> None:
        self.tenant_refused.labels(self._named(tenant), request_class.value, why).inc()

    def watch_replicas(self, num_left_out: Callable[[RequestClass], float]) -> None:
        gauge = Gauge(
            names.GATEWAY_REPLICAS_OUT,
            "Replicas that get nothing for a while because they failed.",
            ["class"],
            registry=self._registry,
        )
        for request_class in RequestClass:
            read = partial(num_left_out, request_class)
            gauge.labels(request_class.value).set_function(read)

    def watch_quotas(
        self, is_kept: Callable[[], float], num_owed: Callable[[], float],
        num_without: Callable[[], float],
    ) -> None:  # fmt: skip
        """What only a gateway with quotas shows."""
        for name, text, read in (
            (names.GATEWAY_QUOTA_REDIS_UP, "1 while quotas are kept in Redis.", is_kept),
            (names.GATEWAY_QUOTA_OWED, "Settlements that Redis has not taken yet.", num_owed),
            (names.GATEWAY_QUOTA_WITHOUT, "Requests decided without Redis.", num_without),
        ):
            Gauge(name, text, registry=self._registry).set_function(read)

    def _named(self, tenant: str) -> str:
        """Whoever can name tenants could otherwise make a series for each."""
        if tenant not in self._named_tenants:
            if len(self._named_tenants) > MAX_TENANTS:
                return OTHER_TENANTS
            self._named_tenants.add(tenant)
        return tenant

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def arrivals(self) -> bytes:
        """The part of it that tells how much is asked of the pool."""
        told = [names.REQUESTS_RECEIVED, names.GATEWAY_HELD]
        return generate_latest(self._registry.restricted_registry(told))


class TokenClock:
    """Times one stream's tokens as they pass."""

    def __init__(self, metrics: GatewayMetrics, request_class: RequestClass, arrived_s: float):
        self._ttft, self._gap = metrics.of(request_class).ttft, metrics.of(request_class).gap
        self._arrived_s = arrived_s
        self._last_s: float | None = None

    def tokens(self, num_tokens: int, now_s: float) -> None:
        """Tokens that passed together: to the client, the later ones have no gap."""
        for _ in range(num_tokens):
            if self._last_s is None:
                self._ttft.observe(now_s - self._arrived_s)
            else:
                self._gap.observe(now_s - self._last_s)
            self._last_s = now_s
