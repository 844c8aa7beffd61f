"""Who runs, who waits and who yields: the slots and KV blocks of one engine. Pure bookkeeping.

A request is resident while it holds a slot and blocks. Interactive requests take both from batch
ones when they must; among equals only exhausted blocks make somebody yield, and then the victim is
recomputed later (vLLM, SOSP'23). Knows no budget and no time; called by `scheduler.Scheduler` only.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from chairlift_engine.blocks import BlockPool
from chairlift_engine.config import Capacity
from chairlift_engine.request import Request
from chairlift_protocol.policy import Policy
from chairlift_protocol.wire import RequestClass

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH


@dataclass(frozen=True, slots=True)
class TenantGauge:
    num_running: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class Gauges:
    """The state between two steps, by class where it differs."""

    num_running: dict[RequestClass, int]
    num_waiting: dict[RequestClass, int]
    oldest_arrival_s: dict[RequestClass, float | None]  # of the waiting ones
    waiting_prefill_tokens: int
    num_free_blocks: int
    num_cached_blocks: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    tenants: dict[str, TenantGauge] | None = None


class Residency:
    """running: interactive first, then by arrival. waiting: by arrival, so resumes come first."""

    def __init__(self, capacity: Capacity, policy: Policy) -> None:
        self.blocks = BlockPool(capacity.num_blocks, capacity.block_tokens)
        self.policy = policy
        self.running: list[Request] = []
        self.waiting: dict[RequestClass, list[Request]] = {INTERACTIVE: [], BATCH: []}
        self.num_preemptions = 0
        self._waiting_prefill_tokens = 0
        self._requests: dict[str, Request] = {}

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def enqueue(self, request: Request) -> None:
        assert request.id not in self._requests, f"request id {request.id!r} is in use"
        self._requests[request.id] = request
        self._queue(request)

    def forget(self, request_id: str) -> Request | None:
        """Drop a request wherever it is and free what it holds; None when it is unknown."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if request.block_ids:
            self.running.remove(request)
            self._release(request)
        else:
            self._unqueue(request)
        return request

    def retire(self, finished: Sequence[Request]) -> None:
        """Drop running requests that have their last token."""
        for request in finished:
            self._release(request)
            del self._requests[request.id]
        self.running = [r for r in self.running if r.block_ids]

    def may_start(self, request_class: RequestClass) -> bool:
        """Whether a waiting request of this class could have a slot, blocks aside."""
        num_batch = len(self.running_of(BATCH))
        if request_class is BATCH and num_batch >= self._num_batch_slots:
            return False
        is_free = len(self.running) < self.policy.batch_size
        return is_free or (request_class is INTERACTIVE and num_batch > 0)

    def make_room(self, request: Request) -> bool:
        """Give a request that may start a slot and blocks, taking them from batch work if it may;
        False when there are not enough."""
        victims: list[Request] = []
        if request.request_class is INTERACTIVE:
            victims = sorted(self.running_of(BATCH), key=_least_work_first)
        num_slots = self.policy.batch_size - len(self.running)
        # One block more for each neighbour, so that an admission does not preempt at the next step.
        num_blocks = self.blocks.num_free - len(self.running) - self._num_blocks_for(request)
        chosen: list[Request] = []
        while num_slots <= 0 or num_blocks < 0:
            if not victims:
                return False
            chosen.append(victims.pop(0))
            num_slots += 1
            num_blocks += len(chosen[-1].block_ids) + 1
        for victim in chosen:
            self.preempt(victim)
        return True

    def start(self, request: Request, now_s: float) -> None:
        """Give a waiting request, for which there is room, its slot and its tokens' blocks."""
        self._unqueue(request)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now_s
        request.block_ids = self.blocks.allocate(self.blocks.blocks_for(request.num_tokens))
        insort(self.running, request, key=_service_order)

    def grow(self, request: Request) -> bool:
        """Room for a decoding request's next token; False if it had to yield itself."""
        if not request.block_ids:
            return False  # preempted by an earlier one in this step
        num_missing = self.blocks.blocks_for(request.num_tokens) - len(request.block_ids)
        while num_missing > self.blocks.num_free:
            victim = self._victim_for(request)
            self.preempt(victim)
            if victim is request:
                return False
        if num_missing > 0:
            request.block_ids += self.blocks.allocate(num_missing)
        return True

    def preempt(self, request: Request) -> None:
        """Back to waiting, to be recomputed; its tokens stay, so its stream goes on unchanged."""
        self.running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._queue(request)

    def running_of(self, request_class: RequestClass) -> list[Request]:
        return [r for r in self.running if r.request_class is request_class]

    def gauges(self) -> Gauges:
        num_batch = len(self.running_of(BATCH))
        queues = self.waiting.items()
        return Gauges(
            num_running={INTERACTIVE: len(self.running) - num_batch, BATCH: num_batch},
            num_waiting={c: len(queue) for c, queue in queues},
            oldest_arrival_s={c: queue[0].arrival_s if queue else None for c, queue in queues},
            waiting_prefill_tokens=self._waiting_prefill_tokens,
            num_free_blocks=self.blocks.num_free,
            tenants=self._tenant_gauges(),
        )

    def _tenant_gauges(self) -> dict[str, TenantGauge]:
        running = Counter(r.tenant for r in self.running)
        waiting = Counter(r.tenant for queue in self.waiting.values() for r in queue)
        return {t: TenantGauge(running[t], waiting[t]) for t in running | waiting}

    def _victim_for(self, request: Request) -> Request:
        """Batch work before interactive, then least computed work; never the oldest of its class,
        so that somebody always advances and every request becomes the oldest in time."""
        batch = self.running_of(BATCH)
        own = self.running_of(request.request_class)
        candidates = batch[1:] or (batch if request.request_class is INTERACTIVE else [])
        return min(candidates or own[1:] or [request], key=_least_work_first)

    def _num_blocks_for(self, request: Request) -> int:
        return self.blocks.blocks_for(request.num_tokens + 1)

    @property
    def _num_batch_slots(self) -> int:
        share = self.policy.batch_class_share
        return max(1, int(share * self.policy.batch_size)) if share > 0 else 0

    def _queue(self, request: Request) -> None:
        insort(self.waiting[request.request_class], request, key=_service_order)
        self._waiting_prefill_tokens += request.num_tokens

    def _unqueue(self, request: Request) -> None:
        self.waiting[request.request_class].remove(request)
        self._waiting_prefill_tokens -= request.num_tokens

    def _release(self, request: Request) -> None:
        self.blocks.free(request.block_ids)
        request.block_ids = []


def _service_order(request: Request) -> tuple[bool, float]:
    return request.request_class is BATCH, request.arrival_s


def _least_work_first(request: Request) -> tuple[int, float]:
    return request.num_computed_tokens, -request.arrival_s
