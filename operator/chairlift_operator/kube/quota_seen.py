"""What a pool's controller tells of it to those who look after its tenants. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chairlift_operator.congestion import strain_of
from chairlift_operator.kube.settings import TICK_S
from chairlift_operator.plan import Plan
from chairlift_operator.quotas.idle import has_idle_capacity
from chairlift_operator.quotas.rates import Strain
from chairlift_operator.snapshot import GatewaySnapshot, Phase
from chairlift_operator.spec import InferencePool

# What a tick saw is believed for so long.
SEEN_S: Final = 3 * TICK_S


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """num_slots: of all replicas that serve, None where one's is not known. strain: None of a pool
    without quotas."""

    is_idle: bool
    num_slots: int | None
    at_s: float
    strain: Strain | None = None

    def is_fresh(self, now_s: float) -> bool:
        return now_s - self.at_s <= SEEN_S


def pool_seen(pool: InferencePool, made: Plan, gateway: GatewaySnapshot, at_s: float) -> PoolSeen:
    sizes = [r.batch_size for r in made.replicas if r.phase is Phase.SERVING]
    known = [size for size in sizes if size is not None]
    return PoolSeen(
        has_idle_capacity(made.replicas, gateway, made.conditions),
        sum(known) if known and len(known) == len(sizes) else None,
        at_s,
        strain_of(pool, made.replicas, made.memory, gateway, at_s) if pool.spec.quotas else None,
    )
