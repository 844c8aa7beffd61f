"""`plan`: a pool's spec, a snapshot and a memory in; actions with reasons and the next memory out.

Pure and deterministic: no I/O, no clock, no randomness, so the journal can be replayed to the
letter. Knows nothing of HTTP or Kubernetes. Called each tick by `control_loop` and by replays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from chairlift_operator.conditions import conditions_of, ready_of, signals_of
from chairlift_operator.decisions import (
    BLIND,
    Action,
    Condition,
    Decision,
    Health,
    NamedSignal,
    ReplicaReport,
)
from chairlift_operator.memory import Memory, ReplicaMemory, TuningState
from chairlift_operator.policy_plan import FIRST_KNOBS, ReplicaPlan, Situation
from chairlift_operator.readings import failure_of
from chairlift_operator.replica_plan import plan_replica
from chairlift_operator.scaling import plan_replicas
from chairlift_operator.snapshot import Phase, ReplicaSnapshot, Snapshot
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import hardware_hash
from chairlift_operator.step_time import StepTimeModel
from chairlift_operator.windows import History
from chairlift_protocol.wire import RequestClass

FORGET_AFTER_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """actions are in a safe order: what shrinks comes before what grows."""

    actions: tuple[Action, ...]
    decisions: tuple[Decision, ...]
    memory: Memory
    health: Health
    replicas: tuple[ReplicaReport, ...]
    signals: tuple[NamedSignal, ...]
    conditions: tuple[Condition, ...]


def plan(pool: InferencePool, snapshot: Snapshot, memory: Memory, now_s: float) -> Plan:
    planned = []
    memory = memory.on(hardware_hash(pool), now_s)
    answering = [seen for seen in snapshot.replicas if seen.phase is not Phase.STARTING]
    for request_class in RequestClass:
        seen_ones = [seen for seen in answering if seen.request_class is request_class]
        here = _situation(pool, seen_ones, memory, now_s, request_class)
        here = replace(here, weights=snapshot.weights)
        planned += [_planned(here, memory.of(seen.name, now_s), seen) for seen in seen_ones]
    reports = tuple(p.report for p in planned)
    health = pool_health(reports)
    actions: list[Action] = [p.action for p in planned if p.action is not None]
    memory = _remember(memory, planned, now_s)
    scaling = plan_replicas(pool, snapshot, memory, reports, settled=not actions)
    actions += scaling.actions
    decisions = tuple(decision for p in planned for decision in p.decisions)
    starting = [_starting(seen) for seen in snapshot.replicas if seen.phase is Phase.STARTING]
    return Plan(
        actions=tuple(sorted(actions, key=lambda action: not action.shrinks)),
        decisions=decisions + scaling.decisions,
        memory=replace(memory, scaling=scaling.memory),
        health=health,
        replicas=(*reports, *starting),
        signals=signals_of(pool, reports, now_s, snapshot.windows),
        conditions=(
            ready_of((*reports, *starting)),
            *conditions_of(pool, reports, health, scaling.crowded, snapshot.windows),
        ),
    )


def _planned(here: Situation, memory: ReplicaMemory, seen: ReplicaSnapshot) -> ReplicaPlan:
    """One engine whose numbers defy arithmetic is held, and the others are planned for."""
    try:
        return plan_replica(here, memory, seen)
    except (ArithmeticError, ValueError) as error:
        held = f"its numbers cannot be reckoned with ({error})"
    report = ReplicaReport(
        seen.name, seen.ready, Health.MISSING, seen.request_class, seen.phase, held
    )
    # What led here may be in what was learned: begin anew, but keep what was pushed.
    kept = replace(
        memory,
        request_class=seen.request_class,
        history=History(num_restarts=memory.history.num_restarts),
        model=StepTimeModel(),
        learned_at_s=-math.inf,
        tuning=TuningState(),
        last_seen_s=here.now_s,
    )
    return ReplicaPlan(kept, report)


def _starting(seen: ReplicaSnapshot) -> ReplicaReport:
    return ReplicaReport(
        seen.name,
        False,
        Health.MISSING,
        seen.request_class,
        held=seen.stuck or seen.detail or "starting",
        phase=seen.phase,
    )


def pool_health(reports: tuple[ReplicaReport, ...]) -> Health:
    seen = [r.health for r in reports if r.health not in BLIND]
    if not seen:
        return Health.STALE if any(r.health is Health.STALE for r in reports) else Health.MISSING
    if any(r.ready and r.health in BLIND for r in reports):
        return Health.PARTIAL
    if all(health is Health.IDLE for health in seen):
        return Health.IDLE
    return Health.OK if Health.OK in seen else Health.LOW_SAMPLE


def _situation(
    pool: InferencePool,
    seen_ones: list[ReplicaSnapshot],
    memory: Memory,
    now_s: float,
    request_class: RequestClass,
) -> Situation:
    known = [m for m in memory.replicas.values() if m.request_class is request_class]
    good = [m.last_good for m in known if m.last_good is not None]
    ready = [seen for seen in seen_ones if seen.ready]
    return Situation(
        pool=pool,
        term=memory.term,
        now_s=now_s,
        # Of what served well elsewhere in the pool, the most cautious.
        start_knobs=min(good, key=lambda k: (k.step_tokens, k.batch_size), default=FIRST_KNOBS),
        may_grow=all(
            failure_of(seen, memory.of(seen.name, now_s).history, now_s) is None for seen in ready
        ),
        request_class=request_class,
    )


def _remember(memory: Memory, planned: list[ReplicaPlan], now_s: float) -> Memory:
    """Replicas out of sight are kept for a while: an engine that restarts keeps its model. What
    the pool has learned outlives them all."""
    known: dict[str, ReplicaMemory] = {
        name: replica
        for name, replica in memory.replicas.items()
        if now_s - replica.last_seen_s < FORGET_AFTER_S
    }
    known.update((p.report.name, p.memory) for p in planned)
    memory = replace(memory, replicas=MappingProxyType(known))
    return replace(memory, prior=memory.learned or memory.prior)
