"""How a pool stands, as a Kubernetes status says it: conditions and tri-state signals. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chairlift_operator.decisions import (
    BLIND,
    Condition,
    Health,
    NamedSignal,
    ReplicaReport,
    Truth,
)
from chairlift_operator.mistakes import mistakes_of
from chairlift_operator.pool_windows import LONG_S, PoolWindows, WindowedShare
from chairlift_operator.signals import Idle, Signal, Unknown, Value
from chairlift_operator.snapshot import Phase
from chairlift_operator.spec import InferencePool, Objective
from chairlift_operator.windows import Attainment, events_to_claim
from chairlift_protocol.wire import RequestClass


def conditions_of(
    pool: InferencePool,
    reports: Sequence[ReplicaReport],
    health: Health,
    crowded: str | None,
    windows: PoolWindows | None = None,
) -> tuple[Condition, ...]:
    return (
        _ready(reports),
        _metrics_available(reports, health, windows),
        _within_slo(pool, reports, windows),
        _capacity_limited(pool, reports, crowded),
        _tuned(pool, reports),
        *mistakes_of(pool, reports),
    )


def signals_of(
    pool: InferencePool,
    reports: Sequence[ReplicaReport],
    now_s: float,
    windows: PoolWindows | None = None,
) -> tuple[NamedSignal, ...]:
    """The pool's own first: a status has room for so many."""
    of_pool = _pool_signals(pool, windows) if windows is not None else []
    of_replicas = [signal for report in reports for signal in _replica_signals(report, now_s)]
    return (*of_pool, *of_replicas)


def _pool_signals(pool: InferencePool, windows: PoolWindows) -> list[NamedSignal]:
    found = []
    for share in windows.shares:
        burn = share.name.replace("goodPercent", "burnRate")
        found += [
            NamedSignal(share.name, share.signal, _share_effect(share)),
            NamedSignal(burn, _burn_rate(pool, share), _effect(share.signal)),
        ]
    found += [NamedSignal(q.name, q.signal, _effect(q.signal)) for q in windows.quantities]
    return found


def _share_effect(share: WindowedShare) -> str:
    if share.boundary_ms is None or not isinstance(share.signal, Value):
        return _effect(share.signal)
    least, most = 100 * (1 - share.bad_upper), 100 * (1 - share.bad_lower)
    return (
        f"used: counted at the bucket boundary {share.boundary_ms:g} ms, so between {least:.1f} "
        f"and {most:.1f} %"
    )


def _effect(signal: Signal) -> str:
    return "held: replicas do not shrink" if isinstance(signal, Unknown) else "used"


def _burn_rate(pool: InferencePool, share: WindowedShare) -> Signal:
    """How many times as fast as allowed bad events come: 1 just keeps the objective."""
    if not isinstance(share.signal, Value):
        return share.signal
    slo = pool.spec.aims(share.request_class).slo
    objective = slo.inter_token_latency if share.objective == "itl" else slo.time_to_first_token
    burn_rate = (1 - share.signal.value / 100) / objective.bad_budget
    return replace(share.signal, value=max(0.0, burn_rate))


def _replica_signals(report: ReplicaReport, now_s: float) -> list[NamedSignal]:
    effect = f"held: {report.held}" if report.held else "used"
    shares: dict[str, Attainment | None] = {
        "interTokenLatency.goodPercent": report.inter_token,
        "timeToFirstToken.goodPercent": report.first_token,
    }
    numbers = {
        "running": report.num_running,
        "waiting": report.num_waiting,
        "kvUsage": report.kv_usage,
        "stepSeconds": report.step_s,
        **{name: a.good_percent if a else None for name, a in shares.items()},
    }
    return [
        NamedSignal(f"{report.name}/{name}", _signal(report, name, number, now_s), effect)
        for name, number in numbers.items()
    ]


def _signal(report: ReplicaReport, name: str, number: float | None, now_s: float) -> Signal:
    observed_at_s = now_s if report.observed_at_s is None else report.observed_at_s
    if report.health in BLIND:
        return Unknown(report.held or "no usable metrics", observed_at_s, report.source)
    if number is not None:
        return Value(number, observed_at_s, report.source)
    if report.health is Health.IDLE:
        return Idle(observed_at_s, report.source)
    return Unknown(f"{name} has no samples yet", observed_at_s, report.source)


def _ready(reports: Sequence[ReplicaReport]) -> Condition:
    interactive = [r for r in reports if r.request_class is RequestClass.INTERACTIVE]
    num_ready = sum(r.ready for r in interactive)
    message = f"{num_ready} of {len(interactive)} interactive replicas are ready."
    if num_ready:
        return Condition("Ready", Truth.TRUE, "ReplicasReady", message)
    return Condition("Ready", Truth.FALSE, "NoReplicaReady", message)


def _metrics_available(
    reports: Sequence[ReplicaReport], health: Health, windows: PoolWindows | None
) -> Condition:
    # One that drains may be gone the next moment; nothing is decided by it.
    blind = [r for r in reports if r.health in BLIND and r.phase is not Phase.DRAINING]
    trouble = windows.trouble if windows is not None else None
    if not blind and reports and trouble is not None and not trouble.is_passing:
        message = f"{trouble.message}; replicas do not shrink until it is known."
        return Condition("MetricsAvailable", Truth.FALSE, trouble.reason, message)
    if not blind and reports:
        message = "Every replica's metrics are fresh and complete."
        return Condition("MetricsAvailable", Truth.TRUE, _camel(health), message)
    if not reports:
        return Condition("MetricsAvailable", Truth.FALSE, "NoReplica", "There is no replica yet.")
    first = blind[0]
    message = f"{first.name}: {first.held or 'no usable metrics'}; limits hold until they return."
    return Condition("MetricsAvailable", Truth.FALSE, _camel(health), message)


def _camel(health: Health) -> str:
    return health.value.title().replace("_", "")


def _within_slo(
    pool: InferencePool, reports: Sequence[ReplicaReport], windows: PoolWindows | None
) -> Condition:
    """Of minutes; where too little happened in them, of an hour."""
    missed, met = _over_minutes(pool, reports)
    if not missed and not met and windows is not None:
        missed, met = _over_an_hour(pool, windows)
    if missed:
        return Condition("WithinSLO", Truth.FALSE, "ObjectiveMissed", "; ".join(missed) + ".")
    if met:
        return Condition("WithinSLO", Truth.TRUE, "ObjectiveMet", "; ".join(met) + ".")
    return Condition("WithinSLO", Truth.UNKNOWN, "TooFewSamples", "Too few requests to tell.")


def _over_minutes(
    pool: InferencePool, reports: Sequence[ReplicaReport]
) -> tuple[list[str], list[str]]:
    """Sentences on objectives that were missed, and on those that were met."""
    missed, met = [], []
    for noun in ("gaps", "first tokens"):
        for report in reports:
            slo = pool.spec.aims(report.request_class).slo
            if noun == "gaps":
                objective, seen = slo.inter_token_latency, report.inter_token
            else:
                objective, seen = slo.time_to_first_token, report.first_token
            if seen is None or report.health in BLIND:
                continue
            sentence = f"{report.name}: {_share_met(seen.good_percent, noun, objective)}"
            if seen.lower > objective.bad_budget:
                missed.append(sentence)
            elif not seen.low_sample:
                met.append(sentence)
    return missed, met


def _over_an_hour(pool: InferencePool, windows: PoolWindows) -> tuple[list[str], list[str]]:
    missed, met = [], []
    for share in windows.shares:
        if share.window_s < LONG_S or not isinstance(share.signal, Value):
            continue
        slo = pool.spec.aims(share.request_class).slo
        is_gaps = share.objective == "itl"
        objective = slo.inter_token_latency if is_gaps else slo.time_to_first_token
        told = _share_met(share.signal.value, "gaps" if is_gaps else "first tokens", objective)
        sentence = f"{share.request_class.value}: {told}, over an hour"
        if share.bad_lower > objective.bad_budget:
            missed.append(sentence)
        elif share.num_events >= events_to_claim(objective.bad_budget):
            met.append(sentence)
    return missed, met


def _share_met(good_percent: float, noun: str, objective: Objective) -> str:
    return (
        f"{good_percent:.1f} % of {noun} within {objective.threshold_ms:g} ms, "
        f"{objective.percent:g} % wanted"
    )


def _capacity_limited(
    pool: InferencePool, reports: Sequence[ReplicaReport], crowded: str | None
) -> Condition:
    if crowded is not None:
        return Condition("CapacityLimited", Truth.TRUE, "ReplicasExhausted", f"{crowded}.")
    for report in reports:
        aims = pool.spec.aims(report.request_class)
        if report.infeasible and report.costs is not None:
            costs = report.costs
            floor = aims.step_tokens.min
            return Condition(
                "CapacityLimited",
                Truth.TRUE,
                "ObjectiveInfeasible",
                f"{report.name}: even a step of {floor} tokens takes "
                f"{1e3 * costs.step_s(1, floor - 1, 0):.0f} ms; raise interTokenLatency.threshold, "
                "lower stepTokens.min or use faster hardware.",
            )
        if report.request_class is RequestClass.BATCH:
            continue  # a backlog is what batch replicas are for
        full = report.batch_size is not None and (report.num_running or 0) >= report.batch_size
        if full and report.num_own_waiting > 0:
            return Condition(
                "CapacityLimited",
                Truth.TRUE,
                "BatchFull",
                f"{report.name}: all {report.batch_size} slots run and "
                f"{report.num_own_waiting:.0f} requests wait; the objectives allow no more.",
            )
    return Condition("CapacityLimited", Truth.FALSE, "Enough", "No request waits for a slot.")


def _tuned(pool: InferencePool, reports: Sequence[ReplicaReport]) -> Condition:
    if pool.spec.mode == "Recommend":
        message = "mode is Recommend: nothing is changed."
        return Condition("Tuned", Truth.FALSE, "Recommend", message)
    for report in reports:
        if report.phase is Phase.DRAINING:
            continue
        if report.num_unverified >= 2:
            message = (
                f"{report.name}: the policy was written but not read back for "
                f"{report.num_unverified} ticks ({report.held}); check its admin port and token."
            )
            return Condition("Tuned", Truth.FALSE, "PolicyUnverified", message)
        if report.held is not None and report.batch_size is None:
            return Condition(
                "Tuned", Truth.FALSE, "PolicyUnreadable", f"{report.name}: {report.held}."
            )
    if not reports:
        return Condition("Tuned", Truth.UNKNOWN, "NoReplica", "There is no replica yet.")
    return Condition("Tuned", Truth.TRUE, "PolicyInForce", "Every replica runs the planned policy.")
