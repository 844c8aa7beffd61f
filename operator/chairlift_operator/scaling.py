"""The replicas part of a plan: demand, each class's count, one capacity for both. Pure.

Interactive demand is arrivals at the gateway, what queues, and KV memory; batch demand is what must
be done before `maximumWait`, beyond what borrowed replicas do. Called by `plan`, after the policies
of this tick are known: replicas are the last lever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from chairlift_operator import law
from chairlift_operator.decisions import Decision, ReplicaReport, SetReplicas
from chairlift_operator.memory import Memory, ScalingMemory
from chairlift_operator.replica_law import (
    FALLEN_FILL,
    KEPT_FILL,
    KEPT_KV,
    KV_FILL,
    Scale,
    ScaleInput,
    Want,
    allot,
    fill,
    forecast,
    num_backlogged,
    replicas_for_rate,
    rounded_up,
    scale,
)
from chairlift_operator.scaling_view import ScalingView
from chairlift_operator.snapshot import Phase, Snapshot
from chairlift_operator.spec import InferencePool
from chairlift_operator.windows import ObjectiveKey, attainment
from chairlift_operator.workload import Workload, batch_work_per_s, rate_per_replica
from chairlift_protocol.wire import RequestClass

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
MIN_EVENTS: Final = 60
LEAST_SLACK: Final = 0.1  # of the maximum wait: what is late already is not hopeless
_WARM_UP_WEIGHT: Final = 0.5


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """crowded: the sentence on interactive demand that found no room, None when it did."""

    actions: tuple[SetReplicas, ...]
    decisions: tuple[Decision, ...]
    memory: ScalingMemory
    crowded: str | None


def plan_replicas(
    pool: InferencePool,
    snapshot: Snapshot,
    memory: Memory,
    reports: Sequence[ReplicaReport],
    settled: bool,
) -> ScalingPlan:
    now_s = snapshot.taken_at_s
    memory = replace(memory, scaling=_observed(memory.scaling, snapshot))
    view = ScalingView(pool, snapshot, memory, reports, now_s, settled)
    scales = {c: scale(_input(view, c)) for c in (INTERACTIVE, BATCH)}
    supplies = (view.supply(INTERACTIVE), view.supply(BATCH))
    if pool.spec.autoscaling.mode == "External":
        # Somebody else counts what the spec has; what it has no more is ours to end.
        counts = {} if pool.spec.replicas(BATCH).max else {BATCH: 0}
        return _planned(view, scales, counts, _excess(view))
    granted = allot(
        pool.spec.num_replicas - snapshot.num_reserved,
        (scales[INTERACTIVE].count, scales[BATCH].count),
        supplies,
        max(0, pool.spec.replicas(BATCH).min - snapshot.num_reserved),  # batch work yields first
    )
    counts = {BATCH: granted.batch, INTERACTIVE: granted.interactive}
    return _planned(view, scales, counts, _crowded(view, scales[INTERACTIVE]))


def _planned(
    view: ScalingView,
    scales: Mapping[RequestClass, Scale],
    counts: Mapping[RequestClass, int],
    crowded: str | None,
) -> ScalingPlan:
    now_s, memory = view.now_s, view.memory
    enforces = view.pool.spec.mode == "Enforce"
    actions: list[SetReplicas] = []
    decisions: list[Decision] = []
    told = dict(memory.scaling.told)
    for c, count in counts.items():
        action = _action(view, c, count, scales[c], scales[INTERACTIVE])
        if action is None:
            told.pop(c, None)
            continue
        if told.get(c) != (action.count, enforces):  # else it is tried again
            told[c] = (action.count, enforces)
            change = (view.supply(c).count, action.count, action.reason)
            decisions.append(Decision(now_s, c.value, "replicas", *change, enforces))
        actions += [action] if enforces else []
    scaling = replace(
        memory.scaling,
        states=MappingProxyType({c: outcome.state for c, outcome in scales.items()}),
        told=MappingProxyType(told),
    )
    return ScalingPlan(tuple(actions), tuple(decisions), scaling, crowded)


def _excess(view: ScalingView) -> str | None:
    num_held, limit = len(view.snapshot.replicas), view.pool.spec.num_replicas
    if num_held <= limit:
        return None
    return (
        f"{num_held} replicas run and capacity.replicas allows {limit}: lower the external "
        "autoscaler's maximum or raise capacity.replicas"
    )


def _observed(scaling: ScalingMemory, snapshot: Snapshot) -> ScalingMemory:
    """Take in arrivals, and how long replicas took to become ready."""
    now_s, starting, warm_up_s = snapshot.taken_at_s, {}, scaling.warm_up_s
    grown_at_s = scaling.grown_at_s
    for seen in snapshot.replicas:
        since_s = scaling.starting.get(seen.name)
        if seen.phase is Phase.STARTING:
            starting[seen.name] = now_s if since_s is None else since_s
        elif since_s is not None and seen.ready:
            warm_up_s += _WARM_UP_WEIGHT * (now_s - since_s - warm_up_s)
            grown_at_s = now_s if seen.request_class is INTERACTIVE else grown_at_s
    return replace(
        scaling,
        arrivals=scaling.arrivals.with_snapshot(snapshot.gateway),
        starting=MappingProxyType(starting),
        warm_up_s=warm_up_s,
        grown_at_s=grown_at_s,
    )


def _input(view: ScalingView, request_class: RequestClass) -> ScaleInput:
    spec, scaling = view.pool.spec, view.memory.scaling
    is_interactive = request_class is INTERACTIVE
    return ScaleInput(
        bounds=spec.replicas(request_class),
        supply=view.supply(request_class),
        want=_interactive_want(view) if is_interactive else _batch_want(view),
        complaint=_complaint(view) if is_interactive else None,
        is_certain=view.is_certain(request_class),
        is_managed=spec.autoscaling.mode == "Managed",
        window_s=spec.autoscaling.scale_down_window_s,
        warm_up_s=scaling.warm_up_s,
        state=scaling.of(request_class),
        now_s=view.now_s,
        stuck=tuple(f"{r.name}: {r.stuck}" for r in view.seen(request_class) if r.stuck),
    )


def _interactive_want(view: ScalingView) -> Want | None:
    arrivals, now_s = view.memory.scaling.arrivals, view.now_s
    rate = view.rate_per_s(INTERACTIVE)
    if rate is None:
        return None
    load = Workload.of(INTERACTIVE, view.serving(INTERACTIVE))
    num_held = view.num_held(INTERACTIVE)
    num_queued = load.num_waiting + num_held
    if rate == 0 and num_queued == 0 and load.num_running == 0:
        return Want(0, "no request arrives")
    per_replica = _interactive_rate(view)
    if not per_replica:
        return None
    supply, warm_up_s = view.supply(INTERACTIVE), view.memory.scaling.warm_up_s
    expected = forecast(rate, arrivals.slope_per_s(INTERACTIVE, now_s), warm_up_s)
    num_behind = num_backlogged(load.queues, num_held, per_replica, supply.count, warm_up_s)
    # What queues while replicas start is no sign that still more are needed.
    num_extra = 0 if supply.num_pending else num_behind
    need = replicas_for_rate(expected, per_replica, num_extra, warm_up_s)
    reason = f"{rate:.2g} requests/s arrive"
    if num_queued:
        reason += f" and {num_queued:.0f} wait"
    reason += f", a replica carries {per_replica:.2g}/s within the objectives"
    count, kv_tokens = rounded_up(need, supply), load.kv_tokens
    tokens = load.kv_tokens_needed if num_extra else load.kv_tokens_held
    by_memory = math.ceil(tokens / (KV_FILL * kv_tokens)) if kv_tokens else 0
    if by_memory > count:
        count = by_memory
        reason = f"{tokens:.0f} tokens of context need room, a replica holds {kv_tokens:.0f}"
    fewer = max(1, supply.count - 1)
    filled = expected / (fewer * per_replica * fill(warm_up_s))
    has_room = load.kv_tokens_needed <= KEPT_KV * fewer * kv_tokens and num_queued <= supply.count
    return Want(count, reason, filled <= KEPT_FILL and has_room, filled <= FALLEN_FILL and has_room)


def _interactive_rate(view: ScalingView) -> float | None:
    target_s = law.MARGIN * view.pool.spec.interactive.slo.inter_token_latency.threshold_s
    batch_max = view.pool.spec.interactive.batch_size.max
    return rate_per_replica(INTERACTIVE, view.serving(INTERACTIVE), target_s, batch_max)


def _batch_want(view: ScalingView) -> Want | None:
    """Enough to start every queued item before it has waited too long."""
    arrivals, batch = view.memory.scaling.arrivals, view.pool.spec.batch
    if batch is None:
        return Want(0, "the spec has no batch section")
    if not arrivals.is_fresh(view.now_s):
        return None
    own, lenders = view.serving(BATCH), view.serving(INTERACTIVE)
    here, borrowed = Workload.of(BATCH, own), Workload.of(BATCH, lenders)
    num_queued = here.num_waiting + borrowed.num_waiting + arrivals.num_held(BATCH)
    busy = math.ceil(here.num_running / batch.batch_size.max)
    if num_queued == 0:
        return Want(busy, f"{here.num_running:.0f} batch requests run, none waits")
    waited_s = max(here.oldest_waiting_s, borrowed.oldest_waiting_s)
    longest_s = batch.slo.maximum_wait_s
    slack_s = max(longest_s - waited_s, LEAST_SLACK * longest_s)
    lent_per_s = batch_work_per_s(lenders, view.now_s)
    missing_per_s = num_queued / slack_s - lent_per_s
    reason = f"{num_queued:.0f} batch requests must start within {slack_s:.0f} s"
    if lent_per_s:
        reason += f", borrowed replicas start {lent_per_s:.2g}/s"
    if missing_per_s <= 0:
        return Want(busy, reason)
    target_s = law.MARGIN * view.pool.spec.aims(BATCH).slo.inter_token_latency.threshold_s
    known = own or lenders
    per_replica = rate_per_replica(BATCH, known, target_s, batch.batch_size.max)
    if not per_replica:
        return Want(max(1, view.supply(BATCH).count), reason)
    need = missing_per_s / (KEPT_FILL * per_replica)
    reason += f", a replica starts {per_replica:.2g}/s"
    return Want(max(1, busy, rounded_up(need, view.supply(BATCH))), reason)


def _complaint(view: ScalingView) -> str | None:
    """First tokens come late, requests queue, and no faster lever is left.

    Those that waited while replicas started say nothing of how many are there now: what counts is
    from a warm-up after the newest became ready.
    """
    objective = view.pool.spec.interactive.slo.time_to_first_token
    serving = view.serving(INTERACTIVE)
    key = ObjectiveKey("ttft", objective.threshold_ms, INTERACTIVE.value)
    histories = [memory.history for memory in serving.values()]
    scaling = view.memory.scaling
    since_s = scaling.grown_at_s + scaling.warm_up_s
    seen = attainment(histories, key, objective.bad_budget, view.now_s, since_s)
    if seen is None or seen.num_events < MIN_EVENTS or seen.lower <= objective.bad_budget:
        return None
    lends = any(r.batch_share and r.num_borrowing for r in view.reports)
    load = Workload.of(INTERACTIVE, serving)
    if lends or not view.settled or load.num_waiting == 0:
        return None
    share = 100 * seen.bad_share
    return (
        f"{share:.0f} % of first tokens over {objective.threshold_ms:g} ms, "
        "step tokens, batch size and batch share are at their limits"
    )


def _action(
    view: ScalingView, request_class: RequestClass, count: int, own: Scale, interactive: Scale
) -> SetReplicas | None:
    supply = view.supply(request_class)
    if count == supply.count:
        return None
    reason = own.reason
    if count < min(own.count, supply.count):
        if request_class is BATCH:
            reason = f"interactive work needs the room: {interactive.reason}"
        elif view.snapshot.num_reserved:
            reason = "a replica is replaced, and its successor needs a place of the capacity"
    timeout_s = view.pool.spec.autoscaling.drain_timeout_s
    num_victims = max(0, supply.count - count)
    victims = tuple(_victims(view, request_class)[:num_victims])
    return SetReplicas(request_class, count, victims, reason, timeout_s)


def _victims(view: ScalingView, request_class: RequestClass) -> list[str]:
    """Who goes first: those not yet ready, then the least busy, then the youngest by name."""
    busy = {r.name: (r.num_running or 0.0) + (r.num_waiting or 0.0) for r in view.reports}
    candidates = [r for r in view.seen(request_class) if r.is_supply]
    youngest = sorted(candidates, key=lambda r: (len(r.name), r.name), reverse=True)
    return [r.name for r in sorted(youngest, key=lambda r: (r.ready, busy.get(r.name, 0.0)))]


def _crowded(view: ScalingView, wish: Scale) -> str | None:
    supply = view.supply(INTERACTIVE)
    want = _interactive_want(view)
    if wish.state.is_blocked(view.now_s):
        return wish.state.blocked_because
    limit = min(view.pool.spec.replicas(INTERACTIVE).max, view.pool.spec.num_replicas)
    if want is None or want.count <= limit or supply.count < limit:
        return None
    return f"{want.count} interactive replicas are asked for, {limit} may run: {wish.reason}"
