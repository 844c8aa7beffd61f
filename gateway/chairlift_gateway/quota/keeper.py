"""May this request start, and what did it cost: asked by the proxy, answered by Redis or without.

A settlement never waits and never fails: it is handed over, and tried until Redis has taken it. So
nothing that happens to a request, not even its cancellation, loses one. `upkeep` keeps it going.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from typing import Final

from chairlift_gateway.quota.breaker import Breaker
from chairlift_gateway.quota.connection import TIMEOUT_S
from chairlift_gateway.quota.law import REFUSALS, Outcome, Progress, Status
from chairlift_gateway.quota.leases import LEASE_MS, Lease, Leases, Settlement
from chairlift_gateway.quota.local_law import UNLEARNT, LocalLaw, share_of
from chairlift_gateway.quota.patience import Deadline
from chairlift_gateway.quota.store import RedisFailure, Store
from chairlift_protocol.quota import Limits, LimitsError, default_holder, holder_of
from chairlift_protocol.wire import RequestClass

UNMETERED: Final = Outcome(Status.ADMITTED)

logger = logging.getLogger("chairlift_gateway.quota")


class OnRedisFailure(StrEnum):
    """local: an own account at the share of the limits; allow: whoever asks, charged afterwards."""

    LOCAL = "local"
    ALLOW = "allow"
    DENY = "deny"


class QuotaExceeded(Exception):
    def __init__(self, limits: Limits, outcome: Outcome) -> None:
        super().__init__(outcome.status.value)
        self.limits = limits
        self.outcome = outcome


class NobodyAdmitted(Exception):
    """Limits of 0, which no waiting helps against."""


class QuotaUnavailable(Exception):
    """Redis is away, and the pool admits nobody without it."""


@dataclass(frozen=True, slots=True)
class Grant:
    lease: Lease
    limits: Limits
    outcome: Outcome


class Keeper:
    """num_gateways and limits are what `upkeep` last learnt of them; unread: whose limits in Redis
    say nothing that could be understood."""

    def __init__(self, mode: OnRedisFailure) -> None:
        self.breaker = Breaker(is_open=True)
        self.leases = Leases()
        self.limits: dict[str, Limits] = {}
        self.unread: set[str] = set()
        self.num_gateways = 1
        self.num_without_redis = 0
        self._mode = mode
        self._local = LocalLaw()
        self._store: Store | None = None
        self._woken = asyncio.Event()
        self._said: str | None = None

    def use(self, store: Store) -> None:
        self._store = store

    @property
    def store(self) -> Store:
        assert self._store is not None
        return self._store

    async def reserve(
        self, tenant: str, request_class: RequestClass, request_id: str, cost: int
    ) -> Grant:
        """Raise QuotaExceeded, NobodyAdmitted or QuotaUnavailable."""
        lease = Lease(
            holder_of(tenant, request_class), default_holder(request_class), request_id, cost,
            time.monotonic(),
        )  # fmt: skip
        try:
            answer = None if self.breaker.is_open else await self._ask(lease)
        except LimitsError:  # Redis is there, for everybody else
            return self._without_redis(lease, OnRedisFailure.LOCAL)
        if answer is None:
            return self._without_redis(lease, self._mode)
        outcome, limits = answer
        if outcome.status in REFUSALS:
            raise NobodyAdmitted if limits.admits_nobody else QuotaExceeded(limits, outcome)
        lease.charge = outcome.number
        self.leases.add(lease)
        return Grant(lease, limits, outcome)

    def settle(self, lease: Lease, num_used: int) -> None:
        if not self.leases.remove(lease):
            return
        now_s = time.monotonic()
        if lease.is_local:
            limits = self._share(lease)
            self._local.settle(lease.holder, limits, lease.request_id, num_used, _ms(now_s))
        if self.breaker.is_open:
            # Redis may lose the reservation before it is asked, and is to charge all the same.
            lease.num_unanswered += 1
        self.hand_over(Settlement(lease, num_used, now_s))

    def hand_over(self, settlement: Settlement) -> None:
        lease = settlement.lease
        if self.breaker.is_open:
            self.leases.owe(settlement)
            return
        may_be_unknown = int(lease.num_unanswered > 0)
        call = self.store.submit_later(
            lease.holder, lease.fallback, "settle",
            lease.request_id, settlement.num_used, may_be_unknown,
        )  # fmt: skip
        call.future.add_done_callback(partial(self._settled, settlement))

    def failed(self, why: str) -> None:
        if self.breaker.failed():
            self._opened(why)

    def stays_without(self, why: str) -> None:
        """Said once for each reason, however often a probe meets it."""
        if why != self._said:
            logger.warning("quotas without Redis (%s): %s", self._mode.value, why)
        self._said = why

    async def opened(self) -> None:
        """Return once the breaker has opened."""
        await self._woken.wait()
        self._woken.clear()

    def _opened(self, why: str) -> None:
        self._said = None
        self.stays_without(why)
        self._woken.set()

    def _settled(self, settlement: Settlement, future: asyncio.Future[tuple[Outcome, str]]) -> None:
        if future.cancelled() or future.exception() is not None:
            self.leases.owe(settlement)

    async def _ask(self, lease: Lease) -> tuple[Outcome, Limits] | None:
        """None without an answer that helps. Raise LimitsError where there are limits that say
        nothing."""
        call = self.store.submit(
            lease.holder, lease.fallback, "reserve", lease.request_id, lease.charge, LEASE_MS
        )
        lease.num_unanswered += 1
        deadline = Deadline(TIMEOUT_S, partial(call.fail, "no answer in time"))
        try:
            outcome, text = await call.future
        except RedisFailure:
            lease.num_unanswered -= not call.is_sent
            return None
        except asyncio.CancelledError:
            self.leases.add(lease)
            self.settle(lease, 0)
            raise
        finally:
            deadline.cancel()
        if outcome.status is Status.UNKNOWN:
            lease.num_unanswered -= 1
            if outcome.number:
                raise LimitsError("limits: cannot be read")
            if self.breaker.failed(at_once=True):
                self._opened("it does not hold this pool's limits")
            return None
        limits = _parsed(text)  # else Redis may have admitted it, by what it made of them
        lease.num_unanswered -= 1
        return outcome, limits

    def _without_redis(self, lease: Lease, mode: OnRedisFailure) -> Grant:
        self.num_without_redis += 1
        # It is to be charged later, by a Redis that may never have heard of it.
        lease.num_unanswered += 1
        if self._known(lease).admits_nobody:
            self._withdraw(lease)
            raise NobodyAdmitted
        if mode is OnRedisFailure.DENY:
            self._withdraw(lease)
            raise QuotaUnavailable
        limits, outcome = self._share(lease), UNMETERED
        if mode is OnRedisFailure.LOCAL:
            request = Progress(lease.request_id, lease.charge, 0)
            running = [each for each in self.leases.of(lease.holder) if not each.is_local]
            outcome = self._local.reserve(
                lease.holder, limits, request, [each.progress for each in running],
                _ms(time.monotonic()),
            )  # fmt: skip
            for each in running:
                each.is_local = True
            if outcome.status in REFUSALS:
                self._withdraw(lease)
                raise QuotaExceeded(limits, outcome)
            lease.is_local = True
        self.leases.add(lease)
        return Grant(lease, limits, outcome)

    def _withdraw(self, lease: Lease) -> None:
        """Redis may have admitted what is refused now."""
        if lease.num_unanswered > 1:
            self.hand_over(Settlement(lease, 0, time.monotonic()))

    def _known(self, lease: Lease) -> Limits:
        return self.limits.get(lease.holder) or self.limits.get(lease.fallback) or UNLEARNT

    def _share(self, lease: Lease) -> Limits:
        return share_of(self._known(lease), self.num_gateways)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Limits:
    return Limits.from_json(text)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
