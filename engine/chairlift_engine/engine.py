"""The step loop: take commands, schedule, run, commit, report. No torch, no HTTP, no asyncio.

One thread owns the scheduler; every other thread speaks to it through commands that take effect
between two steps. What a step did is handed to a listener, on the engine's thread.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from chairlift_engine.clock import Clock
from chairlift_engine.request import FinishReason, Request
from chairlift_engine.residency import Gauges
from chairlift_engine.runner import Runner
from chairlift_engine.scheduler import Scheduler, StepPlan, TokenEvent
from chairlift_protocol.policy import Policy

logger = logging.getLogger(__name__)

IDLE_S = 0.5  # between two heartbeats of an engine that has nothing to do

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepSums:
    """What one step carried: the regressors of the step-time model and its time."""

    step_s: float
    num_decode_seqs: int
    num_prefill_tokens: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """Everything that changed since the last report. `sums` is None when no step ran."""

    now_s: float
    tokens: tuple[TokenEvent, ...]
    ended: tuple[tuple[Request, FinishReason], ...]  # aborted or failed; without a last token
    sums: StepSums | None
    num_preemptions: int
    gauges: Gauges


class Engine:
    """Owns scheduler and runner. Methods named `request_*` may be called from any thread.

    wait_s: how long the next step waits for a command; above 0 when there is nothing to compute.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Clock,
        on_report: Callable[[StepReport], None],
    ) -> None:
        self.scheduler = scheduler
        self.failure: BaseException | None = None
        self.heartbeat_s = clock.now_s()
        self._runner = runner
        self._clock = clock
        self._on_report = on_report
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended: list[tuple[Request, FinishReason]] = []
        self._stopping = False
        self.wait_s = IDLE_S

    def request_add(self, request: Request) -> None:
        self._commands.put(lambda: self.scheduler.add(request))

    def request_abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request between two steps; unknown ids are no error, they have just finished."""
        self._commands.put(lambda: self._abort(request_id, reason))

    def request_policy(self, policy: Policy) -> Future[Policy]:
        """Resolves to the policy in force, or raises StalePolicy or PolicyOutOfRange."""

        def take(scheduler: Scheduler) -> Policy:
            scheduler.set_policy(policy)
            return policy

        return self.request_snapshot(take)

    def request_snapshot(self, read: Callable[[Scheduler], T]) -> Future[T]:
        """Run `read` between two steps, where the scheduler's state is consistent."""
        done: Future[T] = Future()

        def apply() -> None:
            try:
                done.set_result(read(self.scheduler))
            except Exception as error:
                done.set_exception(error)

        self._commands.put(apply)
        return done

    def request_stop(self) -> None:
        self._commands.put(self._stop)

    def run(self) -> None:
        """Step until stopped. A failure is kept in `failure` and raised."""
        try:
            while not self._stopping:
                self.step()
        except BaseException as error:
            self.failure = error
            logger.exception("engine thread died")
            raise

    def step(self) -> None:
        """One turn of the loop. Waits for a command when there is nothing to compute."""
        had_commands = self._take_commands(self.wait_s)
        started_s = self.heartbeat_s = self._clock.now_s()
        plan = self.scheduler.schedule(started_s)
        # Also when work waits that may not run yet: a command or the plan's own time changes that.
        self.wait_s = 0.0 if plan.chunks else min(plan.retry_after_s or IDLE_S, IDLE_S)
        if plan.chunks:
            self._compute(plan, started_s)
        elif had_commands:
            self._report(started_s, (), None, plan.num_preemptions)

    def _compute(self, plan: StepPlan, started_s: float) -> None:
        sampled = self._runner.execute(plan.chunks)
        now_s = self._clock.now_s()
        tokens = self.scheduler.commit(plan, sampled, now_s)
        sums = StepSums(
            step_s=now_s - started_s,
            num_decode_seqs=plan.num_decode_seqs,
            num_prefill_tokens=plan.num_prefill_tokens,
            kv_tokens=plan.kv_tokens,
        )
        self._report(now_s, tokens, sums, plan.num_preemptions)

    def _report(
        self,
        now_s: float,
        tokens: tuple[TokenEvent, ...],
        sums: StepSums | None,
        num_preemptions: int,
    ) -> None:
        ended, self._ended = tuple(self._ended), []
        gauges = self.scheduler.residency.gauges()
        self._on_report(StepReport(now_s, tokens, ended, sums, num_preemptions, gauges))

    def _take_commands(self, wait_s: float) -> bool:
        taken = False
        try:
            if wait_s > 0:
                self._commands.get(timeout=wait_s)()
                taken = True
            while True:
                self._commands.get_nowait()()
                taken = True
        except queue.Empty:
            return taken

    def _abort(self, request_id: str, reason: FinishReason) -> None:
        request = self.scheduler.abort(request_id)
        if request is not None:
            self._ended.append((request, reason))

    def _stop(self) -> None:
        self._stopping = True
