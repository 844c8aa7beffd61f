"""Who may come in, and for how long: bounds on what is received, what waits and how long it may.

A request over a bound is refused at once, with the time after which it is worth another try. One
that has come in is ended when its time is over. Lives on the event loop; knows no bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from chairlift_engine.clock import Clock
from chairlift_engine.config import MAX_WAITING
from chairlift_engine.queue_room import tenants_room
from chairlift_engine.request import FinishReason, Request
from chairlift_engine.residency import TenantGauge
from chairlift_engine.server import errors
from chairlift_engine.server.bridge import Bridge
from chairlift_engine.server.metrics import Metrics
from chairlift_engine.server.origin import ANONYMOUS, Origin
from chairlift_protocol.policy import TenantPolicy
from chairlift_protocol.wire import RequestClass


@dataclass(frozen=True, slots=True)
class Bounds:
    """max_waiting: requests of one class, beyond what the free slots take; so that batch work
        never shuts interactive work out.
    queue_timeout_s: how long an interactive request may wait here to be started; None for as long
        as it takes. Batch work waits by design; its clients state their own limits.
    """

    max_waiting: int = MAX_WAITING
    queue_timeout_s: float | None = None


class Door:
    def __init__(self, bounds: Bounds, bridge: Bridge, metrics: Metrics, clock: Clock) -> None:
        self._bounds = bounds
        self._bridge = bridge
        self._metrics = metrics
        self._clock = clock

    def check(self, origin: Origin, num_requests: int = 1) -> None:
        """Raise ApiError when so many requests more would be too many."""
        gauges = self._bridge.gauges
        # What finds a free slot only passes through the queue.
        num_taken = gauges.num_running[RequestClass.INTERACTIVE]
        if origin.request_class is RequestClass.BATCH:  # which yields its slots to the other
            num_taken += gauges.num_running[RequestClass.BATCH]
        num_free_slots = max(0, self._bridge.policy.batch_size - num_taken)
        num_waiting = gauges.num_waiting[origin.request_class]
        if num_waiting + num_requests > self._bounds.max_waiting + num_free_slots:
            raise errors.queue_full(num_waiting, self._bridge.retry_after_s)
        self._check_tenant(origin, num_requests, num_waiting, num_free_slots)

    def _check_tenant(
        self, origin: Origin, num_requests: int, num_waiting: int, num_free_slots: int
    ) -> None:
        policy = self._bridge.policy.tenants.get(origin.tenant, TenantPolicy())
        bounds = [] if policy.waiting is None else [policy.waiting]
        if origin.tenant != ANONYMOUS:  # which is everybody
            bounds.append(tenants_room(self._bounds.max_waiting, num_waiting))
        if not bounds:
            return
        own = (self._bridge.gauges.tenants or {}).get(origin.tenant) or TenantGauge(0, 0)
        if policy.slots is not None:
            num_free_slots = max(0, min(num_free_slots, policy.slots - own.num_running))
        if own.num_waiting + num_requests > min(bounds) + num_free_slots:
            raise errors.tenant_queue_full(origin.tenant, min(bounds), self._bridge.retry_after_s)

    @contextmanager
    def timed(self, requests: Sequence[Request], origin: Origin) -> Iterator[None]:
        """End what is not started or not finished in its time; raise ApiError if that is over.

        Enter it before the requests are handed over.
        """
        now_s = self._clock.now_s()
        start_by_s, end_by_s = self._start_by_s(origin), origin.end_by_s
        if any(by_s is not None and by_s <= now_s for by_s in (start_by_s, end_by_s)):
            self._metrics.observe_missed_deadline(FinishReason.QUEUE_TIMEOUT, len(requests))
            raise errors.queue_timeout(self._bridge.retry_after_s)
        loop = asyncio.get_running_loop()
        timers = [
            loop.call_later(by_s - now_s, self._bridge.expire, requests, also_started)
            for by_s, also_started in ((start_by_s, False), (end_by_s, True))
            if by_s is not None
        ]
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()

    def _start_by_s(self, origin: Origin) -> float | None:
        timeout_s = self._bounds.queue_timeout_s
        if timeout_s is None or origin.request_class is not RequestClass.INTERACTIVE:
            return None
        return origin.received_s + timeout_s
