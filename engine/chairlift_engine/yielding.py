"""Who yields when slots or KV blocks run out, and is recomputed later (vLLM, SOSP'23). Pure.

Batch work before interactive; then the tenant furthest over its share, then the least computed
work. Never the oldest of a class while another can yield, so that somebody always advances; never
one that ends in this step anyway; never one that was given all its blocks after yielding
`residency.MAX_PREEMPTIONS` times.
"""

from __future__ import annotations

from collections.abc import Iterable

from chairlift_engine.request import Phase, Request
from chairlift_engine.residency import BATCH, INTERACTIVE, Residency


def batch_in_yielding_order(residency: Residency) -> list[Request]:
    """What interactive work may take slots and blocks from; those in guaranteed seats last."""
    batch = residency.running_of(BATCH)
    oldest = min(batch, key=_arrival, default=None)
    order = _Order(residency)
    return sorted(
        (r for r in batch if _may_yield(r)),
        key=lambda r: (r.holds_seat, r is oldest, order.of(r)),
    )


def grow(residency: Residency, request: Request, now_s: float) -> bool:
    """Room for a decoding request's next token, from others' blocks if need be.

    False when it does not compute in this step: it yielded itself, or keeps what it has and waits,
    since everybody else's blocks are spoken for.
    """
    if request.phase is not Phase.DECODE:
        return False  # yielded to an earlier one in this step
    if len(request.block_ids) * residency.blocks.block_tokens >= request.num_tokens:
        return True
    while residency.blocks.num_free == 0:
        victim = _victim_for(residency, request)
        if victim is None:
            return False
        residency.preempt(victim, now_s)
        if victim is request:
            return False
    residency.grow(request)
    return True


def _victim_for(residency: Residency, request: Request) -> Request | None:
    order = _Order(residency)
    batch, oldest_batch = _without_oldest(residency.running_of(BATCH))
    if request.request_class is INTERACTIVE:
        own, _ = _without_oldest(residency.running_of(INTERACTIVE))
        groups: tuple[Iterable[Request], ...] = (batch, oldest_batch, own)
    else:
        groups = (batch,)
    for group in groups:
        candidates = [r for r in group if _may_yield(r)]
        if candidates:
            return min(candidates, key=lambda r: (r.holds_seat, order.of(r)))
    return None


def _without_oldest(requests: list[Request]) -> tuple[list[Request], list[Request]]:
    oldest = min(requests, key=_arrival, default=None)
    return [r for r in requests if r is not oldest], [r for r in requests if r is oldest]


def _may_yield(request: Request) -> bool:
    ends = request.phase is Phase.DECODE and request.num_tokens + 1 >= request.num_final_tokens
    return not (request.is_protected or ends)


class _Order:
    """Sorts who yields first to the front."""

    def __init__(self, residency: Residency) -> None:
        self._tenants = residency.tenants

    def of(self, request: Request) -> tuple[float, int, int]:
        served = self._tenants.account_of(request).served
        return -served, request.num_computed_tokens, -request.number


def _arrival(request: Request) -> int:
    return request.number
