"""One engine replica in virtual time: the engine's own loop and scheduler at modelled step times.

No model, no sockets, no waiting: what happens in an hour is computed in seconds, and the same every
time. Knows no planner and no objective; `rehearsal` and the simulated benchmarks drive it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from chairlift_bench.outcomes import Outcome
from chairlift_engine.clock import VirtualClock
from chairlift_engine.config import Capacity
from chairlift_engine.engine import Engine, StepReport
from chairlift_engine.request import Request, SamplingParams
from chairlift_engine.runner import ScheduledChunk
from chairlift_engine.scheduler import Scheduler
from chairlift_engine.simulator import SimulatorRunner
from chairlift_engine.simulator_profile import Profile
from chairlift_protocol.policy import Policy
from chairlift_protocol.wire import RequestClass

ANYBODY: Final = "anonymous"


@dataclass(frozen=True, slots=True)
class VirtualRequest:
    """A request in numbers; its answer is exactly output_tokens long. No two share a prompt."""

    due_s: float
    prompt_tokens: int
    output_tokens: int
    request_class: RequestClass = RequestClass.INTERACTIVE
    tenant: str = ANYBODY


@dataclass(frozen=True, slots=True)
class Served:
    """A request that has ended, and what its client saw."""

    request: VirtualRequest
    outcome: Outcome


class VirtualReplica:
    """Used once. Requests may be submitted at any time, also by `on_report` and `on_end`.

    num_computed_tokens: of each tenant, prompt and output alike, recomputed ones included.
    """

    def __init__(
        self,
        capacity: Capacity,
        policy: Policy,
        profile: Profile,
        seed: int = 0,
        on_report: Callable[[StepReport], None] = lambda report: None,
        on_end: Callable[[Served], None] = lambda served: None,
    ) -> None:
        self.clock = VirtualClock()
        self.served: list[Served] = []
        self.num_computed_tokens: dict[str, int] = {}
        self._runner = SimulatorRunner(profile, self.clock, seed)
        self._engine = Engine(Scheduler(capacity, policy), self, self.clock, self._take)
        self._on_report = on_report
        self._on_end = on_end
        self._due: list[tuple[float, int, VirtualRequest]] = []
        self._num_submitted = 0
        self._open: dict[str, tuple[VirtualRequest, list[float]]] = {}
        self._is_awake = False

    @property
    def scheduler(self) -> Scheduler:
        return self._engine.scheduler

    @property
    def is_done(self) -> bool:
        return not self._due and not self._open

    def submit(self, request: VirtualRequest) -> str:
        """Let a request arrive when it is due, or at once when that is past; its id."""
        number = self._num_submitted
        heapq.heappush(self._due, (request.due_s, number, request))
        self._num_submitted += 1
        return str(number)

    def set_policy(self, policy: Policy) -> None:
        """Takes effect before the next step; raises what the scheduler says against it."""
        self.scheduler.set_policy(policy)
        self._wake()

    def run(self, until_s: float = math.inf) -> list[Served]:
        """Step until everything submitted has ended, or until that time; all that has ended."""
        while not self.is_done and self.clock.now_s() < until_s:
            self.step(until_s)
        return self.served

    def step(self, until_s: float = math.inf) -> None:
        """One turn of the engine's loop; with nothing to compute, time passes instead, at most
        until until_s."""
        self._arrive()
        if self._engine.wait_s > 0 and not self._is_awake:
            now_s = self.clock.now_s()
            next_due_s = self._due[0][0] if self._due else math.inf
            wakes_s = min(next_due_s, until_s, now_s + self._engine.wait_s)
            self.clock.sleep(max(0.0, wakes_s - now_s))
            self._arrive()
            self._wake()
        self._is_awake = False
        self._engine.step()

    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[int]:
        """The engine's runner is asked through here, to know who got what."""
        computed = self.num_computed_tokens
        for request, _, num_tokens in chunks:
            computed[request.tenant] = computed.get(request.tenant, 0) + num_tokens
        return self._runner.execute(chunks)

    def _arrive(self) -> None:
        now_s = self.clock.now_s()
        while self._due and self._due[0][0] <= now_s:
            _, number, request = heapq.heappop(self._due)
            name = str(number)
            self._open[name] = request, []
            self._engine.request_add(
                Request(
                    name,
                    [number] * request.prompt_tokens,
                    SamplingParams(max_tokens=request.output_tokens),
                    request.due_s,
                    request.request_class,
                    request.tenant,
                )
            )
            self._is_awake = True

    def _wake(self) -> None:
        """Give the engine a command: without one, and with nothing to do, it waits in real time."""
        self._engine.request_snapshot(lambda scheduler: None)
        self._is_awake = True

    def _take(self, report: StepReport) -> None:
        self._on_report(report)
        for event in report.tokens:
            if event.gap_s is not None:
                self._open[event.request.id][1].append(event.gap_s)
            if event.finish_reason is not None:
                request, gaps_s = self._open.pop(event.request.id)
                served = Served(request, _outcome(event.request, request, gaps_s))
                self.served.append(served)
                self._on_end(served)


def _outcome(state: Request, request: VirtualRequest, gaps_s: Sequence[float]) -> Outcome:
    assert state.first_token_s is not None and state.last_token_s is not None
    return Outcome(
        due_s=request.due_s,
        ttft_s=state.first_token_s - request.due_s,
        gaps_s=tuple(gaps_s),
        elapsed_s=state.last_token_s - request.due_s,
        text="",
        finish_reason="length",
        prompt_tokens=request.prompt_tokens,
        output_tokens=state.num_output_tokens,
        error=None,
    )
