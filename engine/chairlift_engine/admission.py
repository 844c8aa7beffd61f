"""Which waiting requests start: slots, KV blocks, tenants' caps, and whom to put back for it. Pure.

Called for one request at a time, in the order that `prompts` chooses; holds what is only known
while one step is planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from chairlift_engine.request import Phase, Request
from chairlift_engine.residency import BATCH, INTERACTIVE, MAX_PREEMPTIONS, Residency
from chairlift_engine.tenancy import Account
from chairlift_engine.yielding import batch_in_yielding_order
from chairlift_protocol.wire import RequestClass


class Obstacle(StrEnum):
    """Why a waiting request cannot start now."""

    SHARE = "batch work may hold no more"
    SLOTS = "every slot is taken"
    TENANT_SLOTS = "its tenant runs as many as it may"
    TENANT_KV = "its tenant holds as much KV memory as it may"
    BLOCKS = "too few free KV blocks"
    SEAT = "after yielding too often it waits for a guaranteed seat"
    YIELDED = "it yielded in this step"
    PREFIX = "another request is computing a prefix that it shares"


class Admission:
    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._victims: list[Request] | None = None
        self.now_s = 0.0
        # Prefix keys of the blocks that the step being planned computes, and for whom.
        self._computing: dict[bytes, Request] = {}

    def begin_step(self, now_s: float) -> None:
        self.now_s = now_s
        self._victims = None
        self._computing.clear()

    def has_slot(self, request_class: RequestClass) -> bool:
        """Free, or held by batch work that yields to an interactive request."""
        residency = self._residency
        if residency.has_slot(request_class):
            return True
        if request_class is BATCH:
            return False
        return residency.num_running[BATCH] > residency.num_seats_held

    def tenant_has_slot(self, account: Account, request_class: RequestClass) -> bool:
        """Also one of its own batch requests' for an interactive one."""
        tenants = self._residency.tenants
        if tenants.has_slot(account.tenant):
            return True
        return request_class is INTERACTIVE and self._own_victim(account.tenant.name) is not None

    def start(self, request: Request, found: list[int], as_seat: bool = False) -> Obstacle | None:
        """Start a request whose class and tenant have a slot, or say what it has to wait for.

        found: its cached blocks. as_seat: it takes one of batch work's guaranteed seats.
        """
        residency = self._residency
        if request.yielded_in_step == residency.step:
            return Obstacle.YIELDED
        is_protected = self._needs_all_blocks(request)
        if is_protected and request.request_class is BATCH and not as_seat:
            return Obstacle.SEAT
        num_blocks = self._num_blocks(request, is_protected)
        tenant = residency.tenants.account_of(request).tenant
        if not residency.tenants.has_kv(tenant, num_blocks, residency.blocks.block_tokens):
            return Obstacle.TENANT_KV
        victims = self._victims_for(request, num_blocks, found)
        if isinstance(victims, Obstacle):
            return victims
        for victim in victims:
            residency.preempt(victim, self.now_s)
        request.is_protected, request.holds_seat = is_protected, as_seat
        residency.start(request, found, num_blocks, self.now_s)
        return None

    def shares_with(self, request: Request, num_found: int) -> Request | None:
        """Whoever computes in this step the block that this request would compute first."""
        if (num_found + 1) * self._residency.blocks.block_tokens >= request.num_tokens:
            return None
        return self._computing.get(self._residency.prefix_key(request, num_found))

    def note_computing(self, request: Request, start: int, end: int) -> None:
        block_tokens = self._residency.blocks.block_tokens
        for index in range(start // block_tokens, end // block_tokens):
            self._computing.setdefault(self._residency.prefix_key(request, index), request)

    def _needs_all_blocks(self, request: Request) -> bool:
        if request.num_preemptions < MAX_PREEMPTIONS:
            return False
        # The oldest interactive request yields to nobody in any case.
        is_interactive = request.request_class is INTERACTIVE
        return not (is_interactive and self._residency.is_oldest(request))

    def _num_blocks(self, request: Request, is_protected: bool) -> int:
        blocks = self._residency.blocks
        if is_protected:  # the last token of an answer is never computed
            return blocks.blocks_for(max(request.num_tokens, request.num_final_tokens - 1))
        return blocks.blocks_for(request.num_tokens)

    def _victims_for(
        self, request: Request, num_blocks: int, found: list[int]
    ) -> list[Request] | Obstacle:
        """Whom to put back so that there is room, if that is enough."""
        residency = self._residency
        num_running = len(residency.running)
        # With its next token, and one block more for each neighbour, so that an admission does not
        # preempt at the next step.
        num_missing = max(num_blocks, residency.blocks.blocks_for(request.num_tokens + 1))
        num_missing += num_running - residency.blocks.num_held(found) - residency.blocks.num_free
        num_slots = residency.policy.batch_size - num_running
        tenant = residency.tenants.account_of(request).tenant
        own = None if residency.tenants.has_slot(tenant) else self._own_victim(tenant.name)
        if own is None and num_slots > 0 and num_missing <= 0:
            return []
        chosen: list[Request] = []
        for victim in self._in_order(request, own):
            if victim.holds_seat and num_slots <= 0:
                break
            chosen.append(victim)
            num_slots += 1
            num_missing -= self._num_freed(victim, found)
            if num_slots > 0 and num_missing <= 0:
                return chosen
        return Obstacle.SLOTS if num_slots <= 0 else Obstacle.BLOCKS

    def _in_order(self, request: Request, first: Request | None) -> Iterator[Request]:
        if first is not None:
            yield first
        if request.request_class is INTERACTIVE:
            yield from (victim for victim in self._yielding() if victim is not first)

    def _num_freed(self, victim: Request, kept: list[int]) -> int:
        """Its own blocks, and the one kept for its growth."""
        freed = set(victim.block_ids).difference(kept)
        return self._residency.blocks.num_freed_with(freed) + 1

    def _own_victim(self, tenant: str) -> Request | None:
        return next((r for r in self._yielding() if r.tenant == tenant and not r.holds_seat), None)

    def _yielding(self) -> list[Request]:
        """Sorted once a step: what changes in it is who is left."""
        if self._victims is None:
            self._victims = batch_in_yielding_order(self._residency)
        self._victims = [r for r in self._victims if r.phase is not Phase.WAITING]
        return self._victims
