"""What is said of a quota and of its pool's quotas: conditions, and what a tenant uses. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter

from chairlift_operator.decisions import Condition, Truth
from chairlift_operator.kube.status import timestamp
from chairlift_operator.quota_status_model import UNKNOWN, ClassUseStatus, TenantQuotaStatus
from chairlift_operator.quotas.ledger import Use
from chairlift_operator.quotas.roster import Verdict
from chairlift_operator.status_model import ConditionStatus
from chairlift_protocol.quota import DEFAULT_TENANT
from chairlift_protocol.wire import RequestClass

Json = dict[str, Any]
ENFORCED: Final = "QuotasEnforced"
NOT_LISTED: Final = Condition(
    ENFORCED,
    Truth.UNKNOWN,
    "NotListed",
    "TenantQuotas could not be listed yet: where that lasts, apply crds/, and give the operator "
    "the rights in docs/rbac.md.",
)
REACHABLE: Final = "RedisReachable"
LIMITED: Final = "Limited"
LOWERED: Final = "RatesLowered"
READY: Final = "Ready"
_STATUS: Final[TypeAdapter[TenantQuotaStatus]] = TypeAdapter(TenantQuotaStatus)
_WITHOUT: Final = {
    "Local": "each gateway goes by its share of the limits",
    "Allow": "gateways admit everybody, and charge afterwards",
    "Deny": "gateways admit nobody",
}


@dataclass(frozen=True, slots=True)
class Standing:
    """How a pool's quotas fared in a turn. redis: why Redis does not hold the limits. tenants: why
    gateways do not know the keys. None where all is well. lowered: the classes in which tenants may
    use fewer tokens than set for now."""

    num_quotas: int
    on_redis_failure: str
    redis: str | None = None
    tenants: str | None = None
    lowered: frozenset[RequestClass] = frozenset()


def pool_condition(standing: Standing) -> Condition:
    if standing.redis is not None:
        told = (
            f"{standing.redis}; while gateways cannot reach it either, "
            f"{_WITHOUT[standing.on_redis_failure]}."
        )
        return Condition(ENFORCED, Truth.FALSE, "RedisUnreachable", told)
    if standing.tenants is not None:
        told = f"Gateways cannot be told of changed API keys: {standing.tenants}."
        return Condition(ENFORCED, Truth.FALSE, "KeysNotWritten", told)
    told = f"Redis holds the limits of {standing.num_quotas} quotas, and gateways know their keys."
    if standing.lowered:
        whose = " and ".join(sorted(f"{c.value} work" for c in standing.lowered))
        told += f" Interactive requests wait: {whose} may use fewer tokens per minute than set."
    return Condition(ENFORCED, Truth.TRUE, "InRedis", told)


def quota_status(
    verdict: Verdict,
    standing: Standing | None,
    use: Mapping[RequestClass, Use],
    slot_share: float | None,
    before: TenantQuotaStatus,
    generation: int,
    now_s: float,
) -> TenantQuotaStatus:
    """standing: None where the pool has no quotas. slot_share: 0..1, of those who
    wait for a slot too; None where not known."""
    known = list(use.values()) if verdict.tenant not in (None, DEFAULT_TENANT) else []
    refused = _sum([each.num_refused for each in known])
    limited = _limited(refused)
    ready = _ready(verdict, standing)
    conditions = (
        verdict.accepted, verdict.keys_missing, _reachable(standing), limited,
        _lowered(verdict, standing, use), ready,
    )  # fmt: skip
    return TenantQuotaStatus(
        observed_generation=generation,
        ready=ready.status.value,
        limited=limited.status.value,
        used=_text(_sum([each.num_used for each in known])),
        refused=_text(refused),
        slot_share=UNKNOWN if slot_share is None or not known else f"{100 * slot_share:.0f} %",
        interactive=_class_use(use.get(RequestClass.INTERACTIVE)) if known else None,
        batch=_class_use(use.get(RequestClass.BATCH)) if known else None,
        conditions=tuple(_dated(c, before, generation, now_s) for c in conditions),
    )


def to_json(status: TenantQuotaStatus) -> Json:
    body: Json = _STATUS.dump_python(status, by_alias=True, mode="json", exclude_none=True)
    return body


def from_json(body: object) -> TenantQuotaStatus:
    """As far as it can be understood: another release may have written it."""
    try:
        return _STATUS.validate_python(body or {})
    except ValueError:
        return TenantQuotaStatus()


def _ready(verdict: Verdict, standing: Standing | None) -> Condition:
    if verdict.accepted.status is not Truth.TRUE or standing is None:
        return Condition(READY, Truth.FALSE, verdict.accepted.reason, verdict.accepted.message)
    if standing.redis is not None:
        told = f"Its limits may not be in Redis: {standing.redis}."
        return Condition(READY, Truth.FALSE, "RedisUnreachable", told)
    if standing.tenants is not None:
        told = f"Gateways may not know its keys: {standing.tenants}."
        return Condition(READY, Truth.FALSE, "KeysNotWritten", told)
    missing = verdict.keys_missing
    if missing.status is not Truth.FALSE:
        status = Truth.FALSE if missing.status is Truth.TRUE else Truth.UNKNOWN
        return Condition(READY, status, missing.reason, missing.message)
    return Condition(READY, Truth.TRUE, "InForce", "Its limits and keys are in force.")


def _reachable(standing: Standing | None) -> Condition:
    if standing is None:
        return Condition(REACHABLE, Truth.UNKNOWN, "NotAsked", "Its pool names no Redis.")
    if standing.redis is not None:
        return Condition(REACHABLE, Truth.FALSE, "RedisUnreachable", f"{standing.redis}.")
    return Condition(REACHABLE, Truth.TRUE, "Answered", "Redis holds the limits of its pool.")


def _limited(num_refused: int | None) -> Condition:
    if num_refused is None:
        told = "What was refused in the last minute is not known."
        return Condition(LIMITED, Truth.UNKNOWN, "NotKnown", told)
    if num_refused:
        told = f"Redis refused {num_refused} requests in the last minute."
        return Condition(LIMITED, Truth.TRUE, "OverLimit", told)
    told = "Redis refused no request in the last minute."
    return Condition(LIMITED, Truth.FALSE, "WithinLimits", told)


def _lowered(
    verdict: Verdict, standing: Standing | None, use: Mapping[RequestClass, Use]
) -> Condition:
    if verdict.accepted.status is not Truth.TRUE or standing is None:
        return Condition(LOWERED, Truth.UNKNOWN, "NotInForce", "Its limits are not in force.")
    if standing.redis is not None:
        told = f"Rates that were lowered end within seconds, in Redis: {standing.redis}."
        return Condition(LOWERED, Truth.UNKNOWN, "RedisUnreachable", told)
    lowered = {c: u.lowered_to for c, u in use.items() if u.lowered_to is not None}
    if not lowered:
        told = "It may use the tokens per minute that are set."
        return Condition(LOWERED, Truth.FALSE, "AsSet", told)
    parts = " and ".join(f"{c.value} work {rate}" for c, rate in sorted(lowered.items()))
    told = f"Interactive requests wait: {parts} tokens per minute at most for now."
    return Condition(LOWERED, Truth.TRUE, "PoolCongested", told)


def _dated(
    condition: Condition, before: TenantQuotaStatus, generation: int, now_s: float
) -> ConditionStatus:
    """lastTransitionTime moves only with the status."""
    known = {c.type: c for c in before.conditions}.get(condition.type)
    same = known is not None and known.status == condition.status.value
    return ConditionStatus(
        type=condition.type,
        status=condition.status.value,
        reason=condition.reason,
        message=condition.message,
        last_transition_time=known.last_transition_time if known and same else timestamp(now_s),
        observed_generation=generation,
    )


def _class_use(use: Use | None) -> ClassUseStatus:
    use = use or Use()
    return ClassUseStatus(_text(use.num_used), _text(use.num_refused), _text(use.num_running))


def _sum(counts: Sequence[int | None]) -> int | None:
    """Of things of which one is not known, the sum is not."""
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def _text(count: int | None) -> str:
    return UNKNOWN if count is None else str(count)
