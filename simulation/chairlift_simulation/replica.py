"""One engine replica in virtual time: the engine's own loop and scheduler at modelled step times.

No model, no sockets, no waiting: what happens in an hour is computed in seconds, and the same every
time. Knows no planner and no objective; `fleet` and the simulated benchmarks drive it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from chairlift_engine.clock import VirtualClock
from chairlift_engine.config import Capacity
from chairlift_engine.engine import Engine, StepReport
from chairlift_engine.request import Request, SamplingParams
from chairlift_engine.scheduler import Scheduler
from chairlift_engine.simulator import SimulatorRunner
from chairlift_engine.simulator_profile import Profile
from chairlift_protocol.policy import Policy
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.arrival_traces import PREFIX_BLOCK_TOKENS

ANYBODY: Final = "anonymous"
# Token ids that no answer and no other kind of prompt has.
_FIRST_BLOCK_ID: Final = 1 << 20
_FIRST_OWN_ID: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class VirtualRequest:
    """A request in numbers; its answer is exactly output_tokens long.

    due_s: when it arrived at the pool. prefix_blocks: what its prompt consists of; without, it has
    no token in common with another's.
    """

    due_s: float
    prompt_tokens: int
    output_tokens: int
    request_class: RequestClass = RequestClass.INTERACTIVE
    tenant: str = ANYBODY
    prefix_blocks: tuple[int, ...] = ()


class VirtualReplica:
    """Requests may be submitted at any time, also by `on_report`, from start_s on."""

    def __init__(
        self,
        capacity: Capacity,
        policy: Policy,
        profile: Profile,
        seed: int = 0,
        on_report: Callable[[StepReport], None] = lambda report: None,
        start_s: float = 0.0,
    ) -> None:
        self.clock = VirtualClock(start_s)
        runner = SimulatorRunner(profile, self.clock, seed)
        self._engine = Engine(Scheduler(capacity, policy), runner, self.clock, on_report)
        self._due: list[tuple[float, int, VirtualRequest]] = []
        self._num_submitted = 0
        self._is_awake = False

    @property
    def scheduler(self) -> Scheduler:
        return self._engine.scheduler

    @property
    def is_done(self) -> bool:
        return not self._due and not self.scheduler.residency.num_requests

    def submit(self, request: VirtualRequest) -> str:
        """Let a request arrive when it is due, or at once when that is past; its id."""
        number = self._num_submitted
        heapq.heappush(self._due, (request.due_s, number, request))
        self._num_submitted += 1
        return str(number)

    def abort(self, request_id: str) -> None:
        """End it before the next step; unknown ids are no error."""
        self._engine.request_abort(request_id)
        self._is_awake = True

    def set_policy(self, policy: Policy) -> None:
        """Takes effect before the next step; raises what the scheduler says against it."""
        self.scheduler.set_policy(policy)
        self._wake()

    def advance(self, until_s: float) -> None:
        """Step until that time; the last step may end after it."""
        clock = self.clock
        while (now_s := clock.now_s()) < until_s:
            if self.is_done and not self._is_awake:
                clock.sleep(until_s - now_s)
            else:
                self.step(until_s)

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

    def _arrive(self) -> None:
        now_s = self.clock.now_s()
        while self._due and self._due[0][0] <= now_s:
            _, number, request = heapq.heappop(self._due)
            made = Request(
                str(number),
                _token_ids(request, number),
                SamplingParams(max_tokens=request.output_tokens),
                request.due_s,
                request.request_class,
                request.tenant,
            )
            if not request.prefix_blocks:
                num_tokens = request.prompt_tokens + request.output_tokens
                num_full = num_tokens // self.scheduler.capacity.block_tokens
                made.block_keys = _own_keys(number, num_full)
            self._engine.request_add(made)
            self._is_awake = True

    def _wake(self) -> None:
        """Give the engine a command: without one, and with nothing to do, it waits in real time."""
        self._engine.request_snapshot(lambda scheduler: None)
        self._is_awake = True


def _token_ids(request: VirtualRequest, number: int) -> list[int]:
    if not request.prefix_blocks:
        return [_FIRST_OWN_ID + number] * request.prompt_tokens
    ids: list[int] = []
    for block in request.prefix_blocks:
        ids += [_FIRST_BLOCK_ID + block] * PREFIX_BLOCK_TOKENS
    num_left = request.prompt_tokens - len(ids)
    return ids[: request.prompt_tokens] + [_FIRST_OWN_ID + number] * max(0, num_left)


def _own_keys(number: int, num_blocks: int) -> list[bytes]:
    """Names for the blocks of a prompt that no other begins with, and of its answer; digests of
    them cost more than scheduling it."""
    return [b"%d/%d" % (number, index) for index in range(num_blocks)]
