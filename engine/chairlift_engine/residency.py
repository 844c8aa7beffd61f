"""Who runs and who waits: the slots and KV blocks of one engine. Pure bookkeeping.

A request is resident while it holds a slot and blocks. Every change of that state is a method here,
so that queues, counts, tenants' holdings and blocks move together. Decides nothing: who starts is
`admission`'s business, who yields `yielding`'s. Knows no budget and no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from chairlift_engine.blocks import BlockPool
from chairlift_engine.config import Capacity
from chairlift_engine.prefix_keys import extend_keys
from chairlift_engine.request import Phase, Request
from chairlift_engine.tenancy import CACHED_COST, Tenants
from chairlift_protocol.policy import Policy
from chairlift_protocol.wire import RequestClass

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
# After yielding so often a request starts again only with all the blocks it can ever need.
MAX_PREEMPTIONS = 4
MAX_SIZE_BITS = 64  # of a prompt's length in tokens


class TenantGauge(NamedTuple):
    num_running: int
    num_waiting: int


class Gauges(NamedTuple):
    """The state between two steps, by class where it differs.

    num_free_blocks: cached ones included. prefix_query_tokens, prefix_hit_tokens: prompt tokens of
    all requests started so far, and how many of them were found in the prefix cache.
    """

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
    """running, decoding, prefilling: ordered sets, by the time of their start."""

    def __init__(self, capacity: Capacity, policy: Policy) -> None:
        self.capacity = capacity
        self.policy = policy
        self.blocks = BlockPool(capacity.num_blocks, capacity.block_tokens)
        self.tenants = Tenants(policy)
        self.running: dict[Request, None] = {}
        self.decoding: dict[Request, None] = {}
        self.prefilling: dict[RequestClass, dict[Request, None]] = {INTERACTIVE: {}, BATCH: {}}
        self.num_running = {INTERACTIVE: 0, BATCH: 0}
        self.num_waiting = {INTERACTIVE: 0, BATCH: 0}
        self.num_seats_held = 0
        self.num_preemptions = 0
        self.step = 0  # the one being planned
        self.outgrown: dict[Request, None] = {}  # decoding beyond their last block
        self._requests: dict[str, Request] = {}
        self._num_enqueued = 0
        self._waiting_prefill_tokens = 0
        self._num_waiting_of_size = {INTERACTIVE: [0] * MAX_SIZE_BITS, BATCH: [0] * MAX_SIZE_BITS}
        self._prefix_query_tokens = self._prefix_hit_tokens = 0

    def set_policy(self, policy: Policy) -> None:
        self.policy = policy
        self.tenants.set_policy(policy)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_batch_slots(self) -> int:
        """Most that batch work may hold."""
        share = self.policy.batch_class_share
        return max(1, int(share * self.policy.batch_size)) if share > 0 else 0

    def has_slot(self, request_class: RequestClass) -> bool:
        """Whether one is free that a request of this class may take."""
        if request_class is BATCH and self.num_running[BATCH] >= self.num_batch_slots:
            return False
        return len(self.running) < self.policy.batch_size

    @property
    def waiting(self) -> dict[RequestClass, list[Request]]:
        """By tenant; each tenant's in the order they will start."""
        ledgers = self.tenants.ledgers.items()
        return {c: [r for a in ledger.active.values() for r in a.waiting] for c, ledger in ledgers}

    def enqueue(self, request: Request) -> None:
        assert request.id not in self._requests, f"request id {request.id!r} is in use"
        self._requests[request.id] = request
        self._num_enqueued += 1
        request.number = self._num_enqueued
        self.tenants.open_account(request)
        self._queue(request)

    def forget(self, request_id: str) -> Request | None:
        """Drop a request wherever it is and free what it holds; None when it is unknown."""
        request = self._requests.get(request_id)
        if request is not None:
            leave = self._unqueue if request.phase is Phase.WAITING else self._stop
            leave(request)
            self._end(request)
        return request

    def retire(self, finished: Sequence[Request]) -> None:
        """Drop running requests that have their last token."""
        for request in finished:
            self._stop(request)
            self._end(request)

    def find_prefix(self, request: Request) -> list[int]:
        """Cached blocks that hold its first tokens; never all of them, since the last token must
        be computed to know the next."""
        found: list[int] = []
        if not request.reads_prefix_cache:
            return found
        num_full = (request.num_tokens - 1) // self.blocks.block_tokens
        for index in range(num_full):
            block = self.blocks.find(self.prefix_key(request, index))
            if block is None:
                break
            found.append(block)
        return found

    def prefix_key(self, request: Request, index: int) -> bytes:
        """Of its block number `index`, which is full."""
        if index >= len(request.block_keys):
            shared = self.capacity.share_prefixes
            extend_keys(request, index + 1, self.blocks.block_tokens, shared)
        return request.block_keys[index]

    def start(self, request: Request, found: Sequence[int], num_blocks: int, now_s: float) -> None:
        """Give a waiting request a slot and blocks, of which `found` hold its first tokens."""
        self._unqueue(request)
        self.blocks.share(found)  # first, so that no allocation takes them
        request.block_ids = [*found, *self.blocks.allocate(num_blocks - len(found))]
        num_cached_tokens = len(found) * self.blocks.block_tokens
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now_s
            request.num_cached_tokens = num_cached_tokens
            self._prefix_query_tokens += request.num_tokens
            self._prefix_hit_tokens += num_cached_tokens
        request.num_computed_tokens = num_cached_tokens
        request.num_published_blocks = len(found)
        request.phase = Phase.PREFILL
        account = self.tenants.account_of(request)
        account.charge(CACHED_COST * max(0, num_cached_tokens - request.num_charged_tokens))
        request.num_charged_tokens = max(request.num_charged_tokens, num_cached_tokens)
        account.num_running += 1
        account.tenant.num_running += 1
        account.tenant.num_blocks += num_blocks
        self.num_running[request.request_class] += 1
        self.num_seats_held += request.holds_seat
        self.running[request] = None
        self.prefilling[request.request_class][request] = None

    def begin_decoding(self, request: Request) -> None:
        """All its tokens but the one just sampled are computed."""
        request.phase = Phase.DECODE
        del self.prefilling[request.request_class][request]
        self.decoding[request] = None
        account = self.tenants.account_of(request)
        account.num_decoding += 1
        self.tenants.ledgers[request.request_class].decoding[account] = None
        self.note_growth(request)

    def note_growth(self, request: Request) -> None:
        """Call when a decoding request has computed the last token of a block."""
        if len(request.block_ids) * self.blocks.block_tokens < request.num_tokens:
            self.outgrown[request] = None

    def grow(self, request: Request) -> None:
        """One block more, for which there must be room."""
        request.block_ids += self.blocks.allocate(1)
        self.tenants.account_of(request).tenant.num_blocks += 1
        self.outgrown.pop(request, None)

    def publish(self, request: Request) -> None:
        """Let others find the blocks that it has filled."""
        num_full = request.num_computed_tokens // self.blocks.block_tokens
        if num_full > request.num_published_blocks:
            self.prefix_key(request, num_full - 1)
            for index in range(request.num_published_blocks, num_full):
                self.blocks.publish(request.block_ids[index], request.block_keys[index])
            request.num_published_blocks = num_full

    def preempt(self, request: Request, now_s: float, by_policy: bool = False) -> None:
        """Back to waiting, to be recomputed; its tokens stay, so its stream goes on unchanged.

        by_policy: it yields to nobody, so it is not one of `MAX_PREEMPTIONS`.
        """
        self._stop(request)
        request.num_charged_tokens = max(request.num_charged_tokens, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.num_preemptions += not by_policy
        request.waiting_since_s = now_s
        request.yielded_in_step = self.step
        self.num_preemptions += 1
        self._queue(request)

    def is_oldest(self, request: Request) -> bool:
        """Of its class, whether they wait or run."""
        own = (
            r.number for r in self._requests.values() if r.request_class is request.request_class
        )
        return request.number == min(own)

    def running_of(self, request_class: RequestClass) -> list[Request]:
        return [r for r in self.running if r.request_class is request_class]

    def has_shorter_prompt(self, request: Request) -> bool:
        """Whether a prompt of its class that waits or has begun is much shorter than its rest."""
        size = request.num_uncomputed_tokens.bit_length()
        begun = self.prefilling[request.request_class]
        return any(self._num_waiting_of_size[request.request_class][:size]) or any(
            other.num_uncomputed_tokens.bit_length() < size for other in begun
        )

    def gauges(self) -> Gauges:
        return Gauges(
            num_running=dict(self.num_running),
            num_waiting=dict(self.num_waiting),
            oldest_arrival_s={c: self._oldest_arrival_s(c) for c in (INTERACTIVE, BATCH)},
            waiting_prefill_tokens=self._waiting_prefill_tokens,
            num_free_blocks=self.blocks.num_free,
            num_cached_blocks=self.blocks.num_cached,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            tenants={
                name: TenantGauge(t.num_running, t.num_waiting)
                for name, t in self.tenants.with_work.items()
            },
        )

    def _oldest_arrival_s(self, request_class: RequestClass) -> float | None:
        if not self.num_waiting[request_class]:
            return None
        accounts = self.tenants.ledgers[request_class].active.values()
        return min((r.arrival_s for a in accounts for r in a.heads), default=None)

    def _queue(self, request: Request) -> None:
        request.phase = Phase.WAITING
        request_class = request.request_class
        account = self.tenants.account_of(request)
        self.tenants.ledgers[request_class].enqueue(account, request)
        account.tenant.num_waiting += 1
        self.num_waiting[request_class] += 1
        self._num_waiting_of_size[request_class][request.num_tokens.bit_length()] += 1
        self._waiting_prefill_tokens += request.num_tokens

    def _unqueue(self, request: Request) -> None:
        request_class = request.request_class
        account = self.tenants.account_of(request)
        self.tenants.ledgers[request_class].dequeue(account, request)
        account.tenant.num_waiting -= 1
        self.num_waiting[request_class] -= 1
        self._num_waiting_of_size[request_class][request.num_tokens.bit_length()] -= 1
        self._waiting_prefill_tokens -= request.num_tokens

    def _stop(self, request: Request) -> None:
        """Take a running request's slot and blocks."""
        account = self.tenants.account_of(request)
        if request.phase is Phase.DECODE:
            del self.decoding[request]
            self.outgrown.pop(request, None)
            account.num_decoding -= 1
            if account.num_decoding == 0:
                del self.tenants.ledgers[request.request_class].decoding[account]
        else:
            del self.prefilling[request.request_class][request]
        del self.running[request]
        account.num_running -= 1
        account.tenant.num_running -= 1
        account.tenant.num_blocks -= len(request.block_ids)
        self.num_running[request.request_class] -= 1
        self.num_seats_held -= request.holds_seat
        request.holds_seat = request.is_protected = False
        self.blocks.free(request.block_ids)
        request.block_ids = []

    def _end(self, request: Request) -> None:
        request.phase = Phase.ENDED
        del self._requests[request.id]
        self.tenants.settle(request)
