"""One tick's observations by class, as the replicas part of a plan asks for them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chairlift_operator.decisions import BLIND, ReplicaReport
from chairlift_operator.memory import Memory, ReplicaMemory
from chairlift_operator.replica_law import Supply
from chairlift_operator.snapshot import Phase, ReplicaSnapshot, Snapshot
from chairlift_operator.spec import InferencePool
from chairlift_protocol.wire import RequestClass


@dataclass(frozen=True, slots=True)
class ScalingView:
    """A tick as `scaling` sees it. settled: no policy moves in it."""

    pool: InferencePool
    snapshot: Snapshot
    memory: Memory
    reports: Sequence[ReplicaReport]
    now_s: float
    settled: bool

    def seen(self, request_class: RequestClass) -> list[ReplicaSnapshot]:
        return [r for r in self.snapshot.replicas if r.request_class is request_class]

    def supply(self, request_class: RequestClass) -> Supply:
        seen = self.seen(request_class)
        ready = sum(r.is_supply and r.ready for r in seen)
        pending = sum(r.is_pending for r in seen)
        return Supply(ready, pending, len(seen) - ready - pending)

    def serving(self, request_class: RequestClass) -> dict[str, ReplicaMemory]:
        replicas = self.memory.replicas
        return {
            r.name: replicas[r.name]
            for r in self.seen(request_class)
            if r.phase is Phase.SERVING and r.name in replicas
        }

    def rate_per_s(self, request_class: RequestClass) -> float | None:
        """Arrivals as the gateways told just now; where these are out of reach, as Prometheus last
        scraped them."""
        told = self.memory.scaling.arrivals.rate_per_s(request_class, self.now_s)
        windows = self.snapshot.windows
        return (
            told if told is not None or windows is None else windows.arrivals_per_s(request_class)
        )

    def num_held(self, request_class: RequestClass) -> float:
        """Requests that gateways hold; 0 where nobody tells."""
        arrivals = self.memory.scaling.arrivals
        return arrivals.num_held(request_class) if arrivals.is_fresh(self.now_s) else 0.0

    def is_certain(self, request_class: RequestClass) -> bool:
        """All that speaks for fewer replicas was read, over minutes and hours too."""
        if not self._allow_windows(request_class):
            return False
        seen_well = {r.name for r in self.reports if r.health not in BLIND}
        return self.rate_per_s(request_class) is not None and all(
            r.name in seen_well for r in self.seen(request_class) if r.is_supply
        )

    def _allow_windows(self, request_class: RequestClass) -> bool:
        """What Prometheus was asked and did not tell is no reason to shrink; nor is a pool that
        uses up its budget of bad events."""
        windows, slo = self.snapshot.windows, self.pool.spec.aims(request_class).slo
        if windows is None:
            return True
        budgets = {
            "itl": slo.inter_token_latency.bad_budget,
            "ttft": slo.time_to_first_token.bad_budget,
        }
        return windows.is_known and not any(
            windows.is_burning(request_class, objective, budget)
            for objective, budget in budgets.items()
        )
