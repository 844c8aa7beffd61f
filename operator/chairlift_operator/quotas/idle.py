"""Whether a pool has capacity that nobody uses, so that tenants may borrow tokens. Pure.

Only what is known counts: a replica that cannot be read, a gateway that does not answer and an
objective that is missed each mean that there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from chairlift_operator.decisions import Condition, Health, ReplicaReport, Truth
from chairlift_operator.snapshot import GatewaySnapshot, Phase

# Slots that must be free: borrowers are not to be what fills a pool.
FREE_SHARE: Final = 0.1
_SEEN: Final = (Health.OK, Health.IDLE, Health.LOW_SAMPLE)


def has_idle_capacity(
    reports: Sequence[ReplicaReport], gateway: GatewaySnapshot, conditions: Sequence[Condition]
) -> bool:
    """By one tick; how long that may be believed is the caller's to know."""
    serving = [r for r in reports if r.phase is Phase.SERVING and r.ready]
    within = {c.type: c.status for c in conditions}.get("WithinSLO", Truth.UNKNOWN)
    is_quiet = gateway.failure is None and all(c.num_held == 0 for c in gateway.classes)
    if not serving or not is_quiet or within is Truth.FALSE:
        return False
    num_running = num_slots = 0.0
    for report in serving:
        if report.health not in _SEEN or report.num_waiting != 0:
            return False
        if report.num_running is None or report.batch_size is None:
            return False
        num_running += report.num_running
        num_slots += report.batch_size
    return num_running <= (1 - FREE_SHARE) * num_slots
