"""Whether a pool is at rest, so that only its gateways need be asked each tick. Pure.

At rest is what is idle, as its spec has it, and has nothing left to be done. Arrivals end it within
a tick; what only engines could tell is seen at the next whole look. Used by `pool_controller`.
"""

from __future__ import annotations

from chairlift_operator.decisions import Health, ReplicaReport
from chairlift_operator.plan import Plan
from chairlift_operator.policy_plan import max_share
from chairlift_operator.snapshot import GatewaySnapshot, Phase, Snapshot
from chairlift_operator.spec import InferencePool
from chairlift_protocol.wire import RequestClass


def is_at_rest(pool: InferencePool, seen: Snapshot, made: Plan) -> bool:
    """As far as these tell; what was not measured is not at rest."""
    return (
        not made.actions
        and not made.decisions
        and seen.gateway.failure is None
        and not _holds(seen.gateway)
        and all(_is_still(pool, report) for report in made.replicas)
        and all(_is_least(pool, seen, request_class) for request_class in RequestClass)
    )


def stirs(before: GatewaySnapshot, now: GatewaySnapshot) -> bool:
    """Something arrived or is held, a gateway restarted, or none can tell."""
    return now.failure is not None or now.classes != before.classes or _holds(now)


def _holds(gateway: GatewaySnapshot) -> bool:
    return not gateway.classes or any(c.num_held > 0 for c in gateway.classes)


def _is_still(pool: InferencePool, report: ReplicaReport) -> bool:
    """Idle, and with the policy that an idle one shall have."""
    lends = pool.spec.batch is not None and pool.spec.mode == "Enforce"
    share = max_share(pool, report.request_class)
    return (
        report.health is Health.IDLE
        and report.phase is Phase.SERVING
        and report.ready
        and report.num_unverified == 0
        and (not lends or (report.batch_share is not None and report.batch_share >= share))
    )


def _is_least(pool: InferencePool, seen: Snapshot, request_class: RequestClass) -> bool:
    """No replica is there that an idle class would be rid of."""
    if pool.spec.mode != "Enforce" or pool.spec.autoscaling.mode == "External":
        return True
    count = sum(replica.request_class is request_class for replica in seen.replicas)
    return count == pool.spec.replicas(request_class).min
