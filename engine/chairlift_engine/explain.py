"""What each request is doing and what the waiting ones wait for, for a person to read. Pure.

Read between two steps; says what the step planned last came up against.
"""

from __future__ import annotations

from dataclasses import dataclass

from chairlift_engine.admission import Admission
from chairlift_engine.request import Obstacle, Phase, Request
from chairlift_engine.residency import BATCH, Residency


@dataclass(frozen=True, slots=True)
class Explanation:
    """obstacle: None for a running request."""

    request: Request
    phase: Phase
    obstacle: Obstacle | None


def explain(residency: Residency, admission: Admission) -> list[Explanation]:
    running = [Explanation(request, request.phase, None) for request in residency.running]
    waiting = [request for queue in residency.waiting.values() for request in queue]
    return running + [
        Explanation(request, Phase.WAITING, _obstacle(residency, admission, request))
        for request in waiting
    ]


def _obstacle(residency: Residency, admission: Admission, request: Request) -> Obstacle | None:
    if request.looked_at_in_step == residency.step:
        return request.obstacle
    account = residency.tenants.account_of(request)
    if not admission.tenant_has_slot(account, request.request_class):
        return Obstacle.TENANT_SLOTS
    if not admission.has_slot(request.request_class):
        is_full = len(residency.running) >= residency.policy.batch_size
        return Obstacle.SLOTS if is_full or request.request_class is not BATCH else Obstacle.SHARE
    return Obstacle.TURN
