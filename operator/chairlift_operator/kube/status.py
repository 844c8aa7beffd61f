"""A pool's status from its last tick: conditions, signals, decisions, replicas of each class. Pure.

What is written is what `status_model` describes; the CRD prunes anything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from pydantic import TypeAdapter

from chairlift_operator.decisions import Condition, Decision, NamedSignal, ReplicaReport, Truth
from chairlift_operator.explaining import inputs_of
from chairlift_operator.kube import names
from chairlift_operator.kube.rolling import RolloutState
from chairlift_operator.plan import Plan
from chairlift_operator.signals import Idle, Value
from chairlift_operator.snapshot import Phase
from chairlift_operator.status_model import (
    NUM_DECISIONS,
    NUM_SIGNALS,
    ClassStatus,
    ConditionStatus,
    DecisionStatus,
    GatewayStatus,
    PoolStatus,
    SignalStatus,
)
from chairlift_protocol.wire import RequestClass

Json = dict[str, Any]
_STATUS: Final[TypeAdapter[PoolStatus]] = TypeAdapter(PoolStatus)
_SLO: Final = {Truth.TRUE: "Met", Truth.FALSE: "Missed", Truth.UNKNOWN: "Unknown"}


@dataclass(frozen=True, slots=True)
class StatusInput:
    """made: the last plan, None before the first. accepted: why the spec is not, None when it is.
    refused: what the API server does not let the operator write, in its words.
    replicas: what the Deployments say. gateways: ready and wanted. quotas: how the limits of its
    tenants fare, None for a pool without."""

    namespace: str
    pool: str
    operator: str
    generation: int
    now_s: float
    accepted: str | None
    refused: tuple[str, ...]
    made: Plan | None
    replicas: Mapping[RequestClass, int]
    gateways: tuple[int, int]
    rollout: RolloutState
    quotas: Condition | None = None


def status_of(given: StatusInput, before: PoolStatus) -> PoolStatus:
    """before: as it was last written; decisions and times of transitions go on from it."""
    made = given.made
    if made is None and given.accepted is None and before.conditions:
        return _until_planned(given, before)
    conditions = _conditions(given)
    decisions = before.decisions
    if made is not None:
        fresh = [_decision(decision, made.replicas) for decision in made.decisions]
        decisions = (*decisions, *fresh)[-NUM_DECISIONS:]
    reports = made.replicas if made else ()
    progress = _progress(reports, given.rollout)
    within = {c.type: c.status for c in conditions}.get("WithinSLO", Truth.UNKNOWN)
    has_batch = given.replicas.get(RequestClass.BATCH) is not None
    return PoolStatus(
        observed_generation=given.generation,
        operator=given.operator,
        slo=_SLO[within],
        progress=progress,
        last_reason=decisions[-1].sentence if decisions else progress,
        interactive=_class(given, reports, RequestClass.INTERACTIVE),
        batch=_class(given, reports, RequestClass.BATCH) if has_batch else None,
        gateway=_gateway(given),
        conditions=tuple(_dated(c, given, before) for c in conditions),
        signals=tuple(_signal(s) for s in (made.signals if made else ()))[:NUM_SIGNALS],
        decisions=decisions,
    )


def _until_planned(given: StatusInput, before: PoolStatus) -> PoolStatus:
    """What an earlier leader saw stands until this one has looked: a change of leaders is no news
    of the pool, and must not look like an outage."""
    ours = tuple(_dated(c, given, before) for c in _conditions(given))
    types = {condition.type for condition in ours}
    kept = tuple(c for c in before.conditions if c.type not in types)
    return replace(
        before,
        observed_generation=given.generation,
        operator=given.operator,
        gateway=_gateway(given),
        conditions=(*ours, *kept),
    )


def _gateway(given: StatusInput) -> GatewayStatus:
    url = names.gateway_url(given.pool, given.namespace)
    return GatewayStatus(desired=given.gateways[1], ready=given.gateways[0], url=url)


def to_json(status: PoolStatus) -> Json:
    body: Json = _STATUS.dump_python(status, by_alias=True, mode="json", exclude_none=True)
    return body


def from_json(body: object) -> PoolStatus:
    """As far as it can be understood: another release may have written it."""
    try:
        return _STATUS.validate_python(body or {})
    except ValueError:
        return PoolStatus()


def differs(before: PoolStatus, after: PoolStatus) -> bool:
    """In more than measurements."""
    return replace(before, signals=()) != replace(after, signals=())


def measures_differ(before: PoolStatus, after: PoolStatus) -> bool:
    """In what was measured, not only in when."""
    return _timeless(before) != _timeless(after)


def _timeless(status: PoolStatus) -> list[SignalStatus]:
    return [replace(signal, observed_at="") for signal in status.signals]


def _conditions(given: StatusInput) -> list[Condition]:
    if given.accepted is not None:
        accepted = Condition("Accepted", Truth.FALSE, "Refused", given.accepted)
    else:
        accepted = Condition("Accepted", Truth.TRUE, "SpecValid", "The spec is being followed.")
    planned = {c.type: c for c in (given.made.conditions if given.made else ())}
    if given.rollout.interrupts is not None:
        planned["CapacityLimited"] = Condition(
            "CapacityLimited", Truth.TRUE, "RolloutInterrupts", f"{given.rollout.interrupts}."
        )
    quotas = [given.quotas] if given.quotas is not None else []
    return [accepted, _reconciled(given), *quotas, *planned.values()]


def _reconciled(given: StatusInput) -> Condition:
    if given.accepted is not None:
        return Condition("Reconciled", Truth.FALSE, "Refused", "It waits for a spec to follow.")
    if given.refused:
        return Condition("Reconciled", Truth.FALSE, "WriteRefused", "; ".join(given.refused))
    return Condition("Reconciled", Truth.TRUE, "AsSpecified", "Its objects are as the spec says.")


def _dated(condition: Condition, given: StatusInput, before: PoolStatus) -> ConditionStatus:
    """lastTransitionTime moves only with the status."""
    known = {c.type: c for c in before.conditions}.get(condition.type)
    same = known is not None and known.status == condition.status.value
    since = known.last_transition_time if known and same else timestamp(given.now_s)
    return ConditionStatus(
        type=condition.type,
        status=condition.status.value,
        reason=condition.reason,
        message=condition.message,
        last_transition_time=since,
        observed_generation=given.generation,
    )


def _class(
    given: StatusInput, reports: Sequence[ReplicaReport], request_class: RequestClass
) -> ClassStatus:
    own = [r for r in reports if r.request_class is request_class]
    serving = [r for r in own if r.phase is Phase.SERVING]
    ready, desired = sum(r.ready for r in serving), given.replicas.get(request_class, 0)
    return ClassStatus(
        desired=desired,
        ready=ready,
        starting=sum(r.phase is Phase.STARTING for r in own),
        draining=sum(r.phase is Phase.DRAINING for r in own),
        replicas=f"{ready}/{desired}",
        batch_size=min((r.batch_size for r in serving if r.batch_size is not None), default=None),
        step_tokens=min(
            (r.step_tokens for r in serving if r.step_tokens is not None), default=None
        ),
        batch_share_percent=min(
            (round(100 * r.batch_share, 1) for r in serving if r.batch_share is not None),
            default=None,
        ),
        policy_generation=_generation(given.made, serving),
    )


def _generation(made: Plan | None, serving: Sequence[ReplicaReport]) -> str | None:
    if made is None:
        return None
    known = [made.memory.replicas[r.name] for r in serving if r.name in made.memory.replicas]
    confirmed = [m.wanted.generation for m in known if m.wanted and not m.num_unverified]
    if not confirmed:
        return None
    newest = max(confirmed)
    return f"{newest.term}.{newest.counter}"


def _progress(reports: Sequence[ReplicaReport], rollout: RolloutState) -> str | None:
    under_way = [
        f"{r.name}: {r.held or r.phase.value}" for r in reports if r.phase is not Phase.SERVING
    ]
    return "; ".join([*rollout.progress, *under_way]) or None


def _signal(named: NamedSignal) -> SignalStatus:
    signal = named.signal
    if isinstance(signal, Value):
        state, value = "Value", f"{signal.value:.4g}"
    elif isinstance(signal, Idle):
        state, value = "Idle", None
    else:
        state, value = "Unknown", signal.reason
    return SignalStatus(
        name=named.name,
        state=state,  # type: ignore[arg-type]
        observed_at=timestamp(signal.observed_at_s),
        source=signal.source,
        effect=named.effect,
        value=value,
    )


def _decision(decision: Decision, reports: Sequence[ReplicaReport]) -> DecisionStatus:
    return DecisionStatus(
        at=timestamp(decision.at_s),
        target=decision.replica,
        field=decision.field,
        before=str(decision.before),
        after=str(decision.after),
        reason=decision.reason,
        sentence=decision.sentence,
        enforced=decision.enforced,
        inputs=inputs_of(decision, reports),
    )


def timestamp(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
