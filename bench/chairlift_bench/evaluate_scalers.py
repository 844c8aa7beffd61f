"""What the controller's count of replicas is measured against: the usual autoscalers.

Each counts beside a knob law, which is the operator's own, so that only the count differs. Pure
functions of the same snapshots behind the simulation's `Law`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from chairlift_operator.decisions import Action, SetReplicas
from chairlift_operator.exposition import EngineSample
from chairlift_operator.snapshot import ReplicaSnapshot, Snapshot
from chairlift_operator.spec import InferencePool
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.laws import ChairliftLaw, Law, Ruled

INTERACTIVE = RequestClass.INTERACTIVE
SYNC_S: Final = 15.0  # an autoscaler's period
DOWN_WINDOW_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class ScalerState:
    knobs: Any
    asked: tuple[tuple[float, int], ...] = ()
    synced_at_s: float = -math.inf


class CountRule(Protocol):
    def wanted(self, serving: list[EngineSample], num_held: float, supply: int, ready: int) -> int:
        """How many replicas; supply: of which so many are there or start."""
        ...


@dataclass(frozen=True, slots=True)
class Scaled:
    """A knob law with an autoscaler beside it, with the brakes that a Kubernetes HPA has."""

    pool: InferencePool
    knobs: Law
    count: CountRule
    stabilised: bool = True

    def start(self) -> ScalerState:
        return ScalerState(self.knobs.start())

    def rule(self, snapshot: Snapshot, state: ScalerState) -> tuple[Ruled, ScalerState]:
        ruled, knobs = self.knobs.rule(snapshot, state.knobs)
        actions: tuple[Action, ...] = tuple(
            a for a in ruled.actions if not isinstance(a, SetReplicas)
        )
        state = replace(state, knobs=knobs)
        now_s = snapshot.taken_at_s
        if now_s - state.synced_at_s < SYNC_S:
            return replace(ruled, actions=actions), state
        own = [r for r in snapshot.replicas if r.request_class is INTERACTIVE and r.is_supply]
        samples = [r.sample for r in own if r.ready and r.sample is not None]
        held = sum(c.num_held for c in snapshot.gateway.classes if c.request_class is INTERACTIVE)
        bounds, supply = self.pool.spec.interactive.replicas, len(own)
        wanted = bounds.clamp(self.count.wanted(samples, held, supply, len(samples)))
        asked = (*state.asked, (now_s, wanted))
        asked = tuple(a for a in asked if a[0] > now_s - DOWN_WINDOW_S)
        state = replace(state, asked=asked, synced_at_s=now_s)
        if self.stabilised:
            wanted = min(max(count for _, count in asked), max(2 * supply, supply + 4))
        if wanted != supply:
            actions = (*actions, _to_count(self.pool, own, wanted))
        return replace(ruled, actions=actions), state


@dataclass(frozen=True, slots=True)
class HpaQueue:
    """AverageValue of waiting requests."""

    target: float = 5.0

    def wanted(self, serving: list[EngineSample], num_held: float, supply: int, ready: int) -> int:
        waiting = sum(s.num_waiting or 0.0 for s in serving) + num_held
        ratio = waiting / (self.target * supply) if supply else math.inf
        return supply if abs(ratio - 1) <= 0.1 else math.ceil(waiting / self.target)


@dataclass(frozen=True, slots=True)
class HpaKv:
    """AverageValue of KV memory in use."""

    target: float = 0.8

    def wanted(self, serving: list[EngineSample], num_held: float, supply: int, ready: int) -> int:
        if not serving:
            return max(1, supply)
        ratio = sum(s.kv_usage or 0.0 for s in serving) / supply / self.target
        return supply if abs(ratio - 1) <= 0.1 else math.ceil(supply * ratio)


@dataclass(frozen=True, slots=True)
class Wva:
    """llm-d's saturation steps: one up when little is spare, one down when the rest has enough.

    queue: waiting requests of a saturated replica; llm-d takes 5, and wants 3 of them to spare.
    """

    queue: float = 5.0

    def wanted(self, serving: list[EngineSample], num_held: float, supply: int, ready: int) -> int:
        if ready < supply or not serving:
            return supply  # not while replicas start
        usage = [s.kv_usage or 0.0 for s in serving]
        queue = [s.num_waiting or 0.0 for s in serving]
        calm = [k for k, q in zip(usage, queue, strict=True) if k <= 0.8 and q <= self.queue]
        spare_kv = sum(0.8 - k for k in calm) / len(calm) if calm else 0.0
        mean_queue = sum(queue) / len(queue)
        if not calm or spare_kv < 0.1 or mean_queue > 0.4 * self.queue:
            return supply + 1
        if supply > 1:
            fewer = sum(usage) / (supply - 1), sum(queue) / (supply - 1)
            if 0.8 - fewer[0] >= 0.1 and fewer[1] <= 0.4 * self.queue:
                return supply - 1
        return supply


@dataclass(frozen=True, slots=True)
class Always:
    num_replicas: int

    def wanted(self, serving: list[EngineSample], num_held: float, supply: int, ready: int) -> int:
        return self.num_replicas


@dataclass(frozen=True, slots=True)
class WithHeadroom:
    """The operator's plan, told that so many times the requests arrive."""

    pool: InferencePool
    factor: float
    plan: ChairliftLaw = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", ChairliftLaw(self.pool))

    def start(self) -> Any:
        return self.plan.start()

    def rule(self, snapshot: Snapshot, state: Any) -> tuple[Ruled, Any]:
        classes = tuple(
            replace(c, num_received=self.factor * c.num_received) for c in snapshot.gateway.classes
        )
        gateway = replace(snapshot.gateway, classes=classes)
        return self.plan.rule(replace(snapshot, gateway=gateway), state)


def _to_count(pool: InferencePool, own: list[ReplicaSnapshot], count: int) -> SetReplicas:
    """Those that start go first, then the least busy."""

    def busy(seen: ReplicaSnapshot) -> float:
        return (seen.sample.num_running or 0.0) if seen.sample else 0.0

    order = sorted(own, key=lambda seen: (seen.ready, busy(seen)))
    victims = tuple(seen.name for seen in order[: max(0, len(own) - count)])
    timeout_s = pool.spec.autoscaling.drain_timeout_s
    return SetReplicas(INTERACTIVE, count, victims, "", timeout_s)
