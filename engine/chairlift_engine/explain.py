"""What each request is doing and what the waiting ones wait for, for a person to read. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift_engine.request import Phase, Request
from chairlift_engine.residency import Residency


@dataclass(frozen=True, slots=True)
class Explanation:
    """obstacle: None for a running request."""

    request: Request
    phase: Phase
    obstacle: str | None


def explain(residency: Residency) -> list[Explanation]:
    is_full = len(residency.running) >= residency.policy.batch_size
    obstacle = "every slot is taken" if is_full else "the steps so far had no room for it"
    running = [Explanation(request, request.phase, None) for request in residency.running]
    waiting = [request for queue in residency.waiting.values() for request in queue]
    return running + [Explanation(request, Phase.WAITING, obstacle) for request in waiting]
