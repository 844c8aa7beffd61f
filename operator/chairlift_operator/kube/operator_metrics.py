"""What the operator says of itself in Prometheus' format: is it leading, does it keep up, what does
it cost the API server, what did it decide.
"""

from __future__ import annotations

from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from chairlift_operator.plan import Plan
from chairlift_operator.prometheus.series import Answer
from chairlift_operator.snapshot import Snapshot

_BUCKETS_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class OperatorMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        kept: dict[str, Any] = {"registry": self.registry}
        self.leading = Gauge("chairlift_operator_leading", "1 while this replica leads", **kept)
        self.pools = Gauge("chairlift_operator_pools", "pools looked after", **kept)
        self.reconcile_s = Histogram(
            "chairlift_operator_reconcile_seconds",
            "a pool's turn, by kind: tick or change",
            ["kind"],
            buckets=_BUCKETS_S,
            **kept,
        )
        self.queue_age_s = Histogram(
            "chairlift_operator_queue_age_seconds",
            "how long a changed pool waited for its turn",
            buckets=_BUCKETS_S,
            **kept,
        )
        self.failures = Counter("chairlift_operator_failures", "turns that an error ended", **kept)
        self.api_calls = Counter(
            "chairlift_operator_api_calls", "calls to the API server", ["verb", "code"], **kept
        )
        self.decisions = Counter(
            "chairlift_operator_decisions", "decisions by what they change", ["field"], **kept
        )
        self.queries = Counter(
            "chairlift_operator_prometheus_queries",
            "queries to Prometheus by name and outcome: answered or failed",
            ["query", "outcome"],
            **kept,
        )
        self.rejected = Counter(
            "chairlift_operator_rejected_samples",
            "samples from Prometheus that were no numbers, as often as a tick met them",
            **kept,
        )

    def serve(self, port: int) -> None:
        start_http_server(port, registry=self.registry)

    def count_call(self, verb: str, status: int) -> None:
        self.api_calls.labels(verb, str(status)).inc()

    def count_plan(self, made: Plan) -> None:
        for decision in made.decisions:
            self.decisions.labels(decision.field).inc()

    def count_answer(self, answer: Answer) -> None:
        self.queries.labels(answer.query, "failed" if answer.failure else "answered").inc()

    def count_snapshot(self, snapshot: Snapshot) -> None:
        if snapshot.windows is not None:
            self.rejected.inc(snapshot.windows.num_rejected)
