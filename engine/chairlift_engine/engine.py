"""The step loop: take commands, schedule, run, commit, report. No torch, no HTTP, no asyncio.

One thread owns the scheduler; every other thread speaks to it through commands that take effect
between two steps. What a step did is handed to a listener, on the engine's thread.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple, TypeVar

from chairlift_engine.clock import Clock
from chairlift_engine.memory_limit import MemoryLimit, is_out_of_memory
from chairlift_engine.request import FinishReason, Request
from chairlift_engine.residency import Gauges
from chairlift_engine.runner import Runner
from chairlift_engine.scheduler import Scheduler, StepPlan, TokenEvent
from chairlift_protocol.policy import Generation, Policy

logger = logging.getLogger(__name__)

IDLE_S = 0.5  # between two heartbeats of an engine that has nothing to do

T = TypeVar("T")


class StepSums(NamedTuple):
    """What one step carried: the regressors of the step-time model and its time."""

    generation: Generation  # of the policy that it was planned under
    step_s: float
    num_seqs: int
    num_decode_seqs: int
    num_prefill_tokens: int
    kv_tokens: int


class StepReport(NamedTuple):
    """Everything that changed since the last report. `sums` is None when no step was computed.

    Named tuples, as all that is made anew in each step: a frozen dataclass takes three times as
    long to make.
    """

    now_s: float
    tokens: tuple[TokenEvent, ...]
    ended: tuple[tuple[Request, FinishReason], ...]  # aborted or failed; without a last token
    sums: StepSums | None
    num_preemptions: int
    gauges: Gauges
    policy: Policy
    ran_out_of_memory: bool = False


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
        self._memory_limit: MemoryLimit | None = None  # the last one, in force or not
        self._stopping = False
        self.wait_s = IDLE_S

    def request_add(self, request: Request) -> None:
        self._commands.put(lambda: self.scheduler.add(request))

    def request_abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request between two steps; unknown ids are no error, they have just finished."""
        self._commands.put(lambda: self._abort(request_id, reason))

    def request_expire(self, request: Request, *, also_started: bool) -> None:
        """Its time is over: end it if it has not started, or also if it has. Never starts it."""
        self._commands.put(lambda: self._expire(request, also_started))

    def request_policy(self, policy: Policy) -> Future[Policy]:
        """Resolves to this policy once it is desired, or raises StalePolicy or PolicyOutOfRange."""

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
        self._lift_memory_limit(started_s)
        plan = self.scheduler.schedule(started_s)
        # Also when work waits that may not run yet: a command or the plan's own time changes that.
        self.wait_s = 0.0 if plan.chunks else min(plan.retry_after_s or IDLE_S, IDLE_S)
        if plan.chunks:
            if self._ended:  # whoever was ended need not wait for others' step to hear of it
                self._report(started_s, (), None, 0)
            self._compute(plan, started_s)
        elif had_commands:
            self._report(started_s, (), None, plan.num_preemptions)

    def _compute(self, plan: StepPlan, started_s: float) -> None:
        try:
            sampled = self._runner.execute(plan.chunks)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._run_out_of_memory(plan, error)
            return
        now_s = self._clock.now_s()
        tokens = self.scheduler.commit(plan, sampled, now_s)
        sums = StepSums(
            generation=self.scheduler.policy.generation,
            step_s=now_s - started_s,
            num_seqs=len(plan.chunks),
            num_decode_seqs=plan.num_decode_seqs,
            num_prefill_tokens=plan.num_prefill_tokens,
            kv_tokens=plan.kv_tokens,
        )
        self._report(now_s, tokens, sums, plan.num_preemptions)

    def _run_out_of_memory(self, plan: StepPlan, error: Exception) -> None:
        """What the step carried is lost, and the next ones carry less."""
        failed = self.scheduler.fail(plan)  # without the rows that only pad a static batch
        now_s = self._clock.now_s()
        self._memory_limit = MemoryLimit.after_failure(
            self._memory_limit,
            len(failed),
            plan.num_prefill_tokens,
            self.scheduler.capacity,
            now_s,
        )
        self.scheduler.set_limit(self._memory_limit)
        policy = self.scheduler.policy
        logger.error(
            "a step of %d sequences ran out of memory (%s): %d requests failed; for %.0f s the "
            "batch size is at most %d and a step carries at most %d tokens",
            len(plan.chunks), error, len(failed), self._memory_limit.hold_s,
            policy.batch_size, policy.step_tokens,
        )  # fmt: skip
        self._ended += ((request, FinishReason.MEMORY) for request in failed)
        self._report(now_s, (), None, plan.num_preemptions, ran_out_of_memory=True)

    def _lift_memory_limit(self, now_s: float) -> None:
        limit = self._memory_limit
        if limit is not None and self.scheduler.limit is limit and now_s >= limit.until_s:
            self.scheduler.set_limit(None)
            logger.info("the limits that a lack of memory had set are lifted")

    def _report(
        self,
        now_s: float,
        tokens: tuple[TokenEvent, ...],
        sums: StepSums | None,
        num_preemptions: int,
        ran_out_of_memory: bool = False,
    ) -> None:
        ended, self._ended = tuple(self._ended), []
        report = StepReport(
            now_s,
            tokens,
            ended,
            sums,
            num_preemptions,
            self.scheduler.residency.gauges(),
            self.scheduler.policy,
            ran_out_of_memory,
        )
        self._on_report(report)

    def _take_commands(self, wait_s: float) -> bool:
        taken = False
        if wait_s > 0:
            with suppress(queue.Empty):
                self._commands.get(timeout=wait_s)()
                taken = True
        while not self._commands.empty():  # nobody else takes from it
            self._commands.get_nowait()()
            taken = True
        return taken

    def _abort(self, request_id: str, reason: FinishReason) -> None:
        request = self.scheduler.abort(request_id)
        if request is not None:
            self._ended.append((request, reason))

    def _expire(self, request: Request, also_started: bool) -> None:
        if request.first_scheduled_s is None:
            self._abort(request.id, FinishReason.QUEUE_TIMEOUT)
        elif also_started:
            self._abort(request.id, FinishReason.DEADLINE)

    def _stop(self) -> None:
        self._stopping = True
