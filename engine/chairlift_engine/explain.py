"""What each request is doing and what the waiting ones wait for, for a person to read. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift_engine.request import Phase, Request
from chairlift_engine.residency import Residency


@dataclass(frozen=True, slots=True)
class Explanation:
    request: Request
    phase: Phase
    obstacle: str | None


def explain(residency: Residency) -> list[Explanation]:
    running = [Explanation(request, request.phase, None) for request in residency.running]
    waiting = [request for queue in residency.waiting.values() for request in queue]
    return running + [Explanation(request, Phase.WAITING, None) for request in waiting]
