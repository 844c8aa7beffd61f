"""What the controller's count of replicas is measured against: the usual autoscalers.

Each counts beside a knob law, which is the operator's own, so that only the count differs. Pure
functions of the same snapshots behind the simulation's `Law`. Those that model latency are in
`evaluate_planners`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
KEEP_S: Final = 300.0  # the longest window that any of them looks at


@dataclass(frozen=True, slots=True)
class Seen:
    """What an autoscaler sees at one moment. serving: samples of those that are ready, by name.

    supply: replicas that are there or start. num_received: requests since the start, ever rising.
    """

    at_s: float
    serving: Mapping[str, EngineSample]
    supply: int
    num_held: float = 0.0
    num_received: float = 0.0

    @property
    def num_ready(self) -> int:
        return len(self.serving)


class CountRule(Protocol):
    def wanted(self, seen: Sequence[Seen]) -> int:
        """How many replicas. seen: of the last KEEP_S, now last."""
        ...


@dataclass(frozen=True, slots=True)
class Brakes:
    """What an HPA makes of a count: its stabilisation windows and its policies.

    growth_s: in so many seconds a pool may at most double, or grow by four. shrink_s: in so many
    one replica may go; 0: as many as the window lets.
    """

    up_window_s: float = 0.0
    down_window_s: float = KEEP_S
    growth_s: float = SYNC_S
    shrink_s: float = 0.0

    def count(self, seen: Sequence[Seen], asked: Sequence[tuple[float, int]]) -> int:
        """asked: times and counts wanted of the last KEEP_S, now last."""
        now = seen[-1]
        most = min(n for at_s, n in asked if at_s >= now.at_s - self.up_window_s)
        least = max(n for at_s, n in asked if at_s > now.at_s - self.down_window_s)
        count = min(max(now.supply, most), least)
        first = next(s.supply for s in seen if s.at_s > now.at_s - self.growth_s)
        count = min(count, max(2 * first, first + 4))
        if self.shrink_s:
            held = max(s.supply for s in seen if s.at_s > now.at_s - self.shrink_s)
            count = max(count, min(now.supply, held - 1))
        return count


@dataclass(frozen=True, slots=True)
class ScalerState:
    """seen and asked: as `Brakes.count` takes them."""

    knobs: Any
    seen: tuple[Seen, ...] = ()
    asked: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Scaled:
    """A knob law with an autoscaler beside it; without brakes for one that has its own."""

    pool: InferencePool
    knobs: Law
    count: CountRule
    brakes: Brakes | None = Brakes()

    def start(self) -> ScalerState:
        return ScalerState(self.knobs.start())

    def rule(self, snapshot: Snapshot, state: ScalerState) -> tuple[Ruled, ScalerState]:
        ruled, knobs = self.knobs.rule(snapshot, state.knobs)
        actions: tuple[Action, ...] = tuple(
            a for a in ruled.actions if not isinstance(a, SetReplicas)
        )
        state = replace(state, knobs=knobs)
        now_s = snapshot.taken_at_s
        if state.seen and now_s - state.seen[-1].at_s < SYNC_S:
            return replace(ruled, actions=actions), state
        own = [r for r in snapshot.replicas if r.request_class is INTERACTIVE and r.is_supply]
        seen = (*(s for s in state.seen if s.at_s > now_s - KEEP_S), _seen(snapshot, own))
        wanted = self.pool.spec.interactive.replicas.clamp(self.count.wanted(seen))
        asked = (*(a for a in state.asked if a[0] > now_s - KEEP_S), (now_s, wanted))
        count = wanted if self.brakes is None else self.brakes.count(seen, asked)
        if count != len(own):
            actions = (*actions, _to_count(self.pool, own, count))
        return replace(ruled, actions=actions), replace(state, seen=seen, asked=asked)


@dataclass(frozen=True, slots=True)
class HpaQueue:
    """AverageValue of waiting requests."""

    target: float = 5.0

    def wanted(self, seen: Sequence[Seen]) -> int:
        now = seen[-1]
        waiting = sum(s.num_waiting or 0.0 for s in now.serving.values()) + now.num_held
        ratio = waiting / (self.target * now.supply) if now.supply else math.inf
        return now.supply if abs(ratio - 1) <= 0.1 else math.ceil(waiting / self.target)


@dataclass(frozen=True, slots=True)
class HpaKv:
    """AverageValue of KV memory in use."""

    target: float = 0.8

    def wanted(self, seen: Sequence[Seen]) -> int:
        now = seen[-1]
        if not now.serving:
            return max(1, now.supply)
        used = sum(s.kv_usage or 0.0 for s in now.serving.values())
        ratio = used / now.supply / self.target
        return now.supply if abs(ratio - 1) <= 0.1 else math.ceil(now.supply * ratio)


@dataclass(frozen=True, slots=True)
class Wva:
    """llm-d's saturation steps: one up when little is spare, one down when the rest has enough.

    queue: waiting requests of a saturated replica; llm-d takes 5, and wants 3 of them to spare.
    """

    queue: float = 5.0

    def wanted(self, seen: Sequence[Seen]) -> int:
        now, supply = seen[-1], seen[-1].supply
        if now.num_ready < supply or not now.serving:
            return supply  # not while replicas start
        usage = [s.kv_usage or 0.0 for s in now.serving.values()]
        queue = [s.num_waiting or 0.0 for s in now.serving.values()]
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

    def wanted(self, seen: Sequence[Seen]) -> int:
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


def _seen(snapshot: Snapshot, own: Sequence[ReplicaSnapshot]) -> Seen:
    classes = [c for c in snapshot.gateway.classes if c.request_class is INTERACTIVE]
    return Seen(
        snapshot.taken_at_s,
        {r.name: r.sample for r in own if r.ready and r.sample is not None},
        len(own),
        sum(c.num_held for c in classes),
        sum(c.num_received for c in classes),
    )


def _to_count(pool: InferencePool, own: list[ReplicaSnapshot], count: int) -> SetReplicas:
    """Those that start go first, then the least busy."""

    def busy(seen: ReplicaSnapshot) -> float:
        return (seen.sample.num_running or 0.0) if seen.sample else 0.0

    order = sorted(own, key=lambda seen: (seen.ready, busy(seen)))
    victims = tuple(seen.name for seen in order[: max(0, len(own) - count)])
    timeout_s = pool.spec.autoscaling.drain_timeout_s
    return SetReplicas(INTERACTIVE, count, victims, "", timeout_s)
