"""Walks a residency from end to end: AssertionError names what does not add up.

For tests, the fuzzer and a drained server; far too slow for every step of a large engine.
"""

from __future__ import annotations

from chairlift_engine.request import Phase
from chairlift_engine.residency import Residency


def audit(residency: Residency) -> None:
    residency.blocks.check([request.block_ids for request in residency.running])
    _audit_queues(residency)
    _audit_running(residency)
    _audit_tenants(residency)


def _audit_queues(residency: Residency) -> None:
    waiting = [request for queue in residency.waiting.values() for request in queue]
    gauges = residency.gauges()
    assert len({*waiting, *residency.running}) == residency.num_requests
    assert residency.num_requests == len(waiting) + len(residency.running)
    assert len(waiting) == sum(gauges.num_waiting.values())
    assert all(not r.block_ids and r.phase is Phase.WAITING for r in waiting)
    assert gauges.waiting_prefill_tokens == sum(r.num_tokens for r in waiting)


def _audit_running(residency: Residency) -> None:
    prefilling = [request for own in residency.prefilling.values() for request in own]
    assert residency.running.keys() == {*residency.decoding, *prefilling}
    assert residency.num_seats_held == sum(request.holds_seat for request in residency.running)
    for request in residency.running:
        num_slots = len(request.block_ids) * residency.blocks.block_tokens
        assert request.num_computed_tokens <= num_slots, f"{request} writes past its blocks"
        assert request in residency.outgrown or request.num_tokens <= num_slots, f"{request}"


def _audit_tenants(residency: Residency) -> None:
    waiting = [request for queue in residency.waiting.values() for request in queue]
    for name, tenant in residency.tenants.with_work.items():
        own = [request for request in residency.running if request.tenant == name]
        assert tenant.num_running == len(own)
        assert tenant.num_blocks == sum(len(request.block_ids) for request in own)
        assert tenant.num_waiting == sum(request.tenant == name for request in waiting)
