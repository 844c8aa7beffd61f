"""One replica in virtual time and what its clients see: every gap of every request.

The replica is `chairlift_simulation`'s; the simulated benchmarks of a single engine drive it here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chairlift_bench.outcomes import Outcome
from chairlift_engine.config import Capacity
from chairlift_engine.engine import StepReport
from chairlift_engine.request import Request
from chairlift_engine.simulator_profile import Profile
from chairlift_protocol.policy import Policy
from chairlift_simulation.replica import VirtualReplica, VirtualRequest


@dataclass(frozen=True, slots=True)
class Served:
    """A request that has ended, and what its client saw."""

    request: VirtualRequest
    outcome: Outcome


class BenchReplica(VirtualReplica):
    """Used once. Requests may be submitted at any time, also by `on_report` and `on_end`."""

    def __init__(
        self,
        capacity: Capacity,
        policy: Policy,
        profile: Profile,
        seed: int = 0,
        on_report: Callable[[StepReport], None] = lambda report: None,
        on_end: Callable[[Served], None] = lambda served: None,
    ) -> None:
        super().__init__(capacity, policy, profile, seed, self._take)
        self.served: list[Served] = []
        self._listen = on_report
        self._on_end = on_end
        self._open: dict[str, tuple[VirtualRequest, list[float]]] = {}

    def submit(self, request: VirtualRequest) -> str:
        name = super().submit(request)
        self._open[name] = request, []
        return name

    def run(self, until_s: float = math.inf) -> list[Served]:
        """Step until everything submitted has ended, or until that time; all that has ended."""
        while self._open and self.clock.now_s() < until_s:
            self.step(until_s)
        return self.served

    def _take(self, report: StepReport) -> None:
        self._listen(report)
        is_open = self._open
        for event in report.tokens:
            if event.gap_s is not None:
                is_open[event.request.id][1].append(event.gap_s)
            if event.finish_reason is not None:
                self._end(event.request, None)
        for ended, reason in report.ended:  # the step that it was in failed
            self._end(ended, str(reason))

    def _end(self, state: Request, error: str | None) -> None:
        request, gaps_s = self._open.pop(state.id)
        served = Served(request, _outcome(state, request, gaps_s, error, self.clock.now_s()))
        self.served.append(served)
        self._on_end(served)


def _outcome(
    state: Request,
    request: VirtualRequest,
    gaps_s: Sequence[float],
    error: str | None,
    now_s: float,
) -> Outcome:
    first_s = state.first_token_s
    return Outcome(
        due_s=request.due_s,
        ttft_s=None if first_s is None else first_s - request.due_s,
        gaps_s=tuple(gaps_s),
        elapsed_s=now_s - request.due_s,
        text="",
        finish_reason="length" if error is None else None,
        prompt_tokens=request.prompt_tokens,
        output_tokens=state.num_output_tokens,
        error=error,
    )
