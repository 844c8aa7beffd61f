"""The quota law: what a tenant may start now, and what it is charged. `quota.lua` is its twin.

A request *reserves* the tokens it is expected to use, is admitted or refused, and *settles* with
what it really used. Tokens and requests are buckets that fill with time; running requests are
leases, one for each request with an end of its own, that a living gateway renews.

- Whoever asks for more than a full bucket is admitted by a full one and owes the rest.
- Who asks for no tokens needs none: a debt does not refuse it, a rate of 0 does.
- A tenant that may borrow is not refused tokens while the pool is idle. What it owes never exceeds
  a full bucket of the limit that is set, whatever a congested pool lowers it to; the others owe
  what their requests used.
- No request counts as more than MAX_TOKENS, nor does anybody owe more: beyond that Redis writes
  numbers that it does not take as whole ones.
- A lease that ends unsettled is charged what it reserved, or had used at its last renewal if that
  was more. A settlement that comes after all, within LATE_MS, corrects it.
- Operations are idempotent by request id. A settlement whose reservation may never have been made
  (its answer was lost, or Redis was away) is charged once; that it was is remembered for LATE_MS.

Pure: time is an argument. Levels are whole numbers of 1/60000 token, a rate per minute times
milliseconds, so that nothing is ever rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from chairlift_protocol.quota import MAX_TOKENS, Limits, bounded_tokens

UNIT: Final = 60_000
LATE_MS: Final = 600_000
NO_RATE_RETRY_MS: Final = 60_000
CONCURRENCY_RETRY_MS: Final = 1_000


class Status(StrEnum):
    ADMITTED = "admitted"
    SETTLED = "settled"
    RENEWED = "renewed"
    SWEPT = "swept"
    GONE = "gone"  # no such reservation, or settled before
    UNKNOWN = "unknown"  # nobody knows the limits
    CONCURRENCY = "concurrency"  # these three: refused, and by which limit
    REQUESTS = "requests"
    TOKENS = "tokens"


REFUSALS: Final = frozenset((Status.CONCURRENCY, Status.REQUESTS, Status.TOKENS))


@dataclass(frozen=True, slots=True)
class Outcome:
    """number: tokens charged, or milliseconds until another try may succeed; of UNKNOWN, 1 where
    there are limits that say nothing, 0 where there are none."""

    status: Status
    number: int = 0
    tokens_left: int | None = None
    requests_left: int | None = None
    num_leases: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Of a running request: what it reserved and what it has used so far."""

    request_id: str
    charge: int
    num_used: int


@dataclass(slots=True)
class _Reservation:
    """until_ms: the lease's end; of one that is not live, when it is forgotten."""

    charge: int
    until_ms: int
    is_live: bool = True
    is_settled: bool = False

    def is_forgotten(self, now_ms: int) -> bool:
        return not self.is_live and self.until_ms <= now_ms


@dataclass(slots=True)
class Account:
    """One holder's state. num_used counts what was charged for good, and expired leases."""

    num_used: int = 0
    num_refused: int = 0
    _at_ms: int | None = None
    _tokens: int | None = None
    _requests: int | None = None
    _reservations: dict[str, _Reservation] = field(default_factory=dict)

    @property
    def num_reserved(self) -> int:
        """Tokens that running requests hold."""
        return sum(each.charge for each in self._reservations.values() if each.is_live)

    @property
    def num_leases(self) -> int:
        return sum(each.is_live for each in self._reservations.values())

    def reserve(
        self, limits: Limits, request_id: str, cost: int, lease_ms: int, now_ms: int,
        *, is_idle: bool = False,
    ) -> Outcome:  # fmt: skip
        cost = bounded_tokens(cost)
        self._advance(limits, now_ms)
        known = self._known(request_id, now_ms)
        if known is not None:
            status = Status.ADMITTED if known.is_live else Status.GONE
            return self._outcome(status, known.charge)
        refusal = self._refusal(limits, cost, is_idle)
        if refusal is not None:
            self.num_refused += 1
            return self._outcome(*refusal)
        charge = cost
        if self._tokens is not None and limits.may_borrow:
            charge = min(cost, max(0, (self._tokens + _most_owed(limits)) // UNIT))
        self._take(limits, charge)
        if self._requests is not None:
            self._requests -= UNIT
        self._reservations[request_id] = _Reservation(charge, now_ms + lease_ms)
        return self._outcome(Status.ADMITTED, charge)

    def settle(
        self, limits: Limits, request_id: str, num_used: int, now_ms: int,
        *, may_be_unknown: bool = False,
    ) -> Outcome:  # fmt: skip
        num_used = bounded_tokens(num_used)
        self._advance(limits, now_ms)
        known = self._known(request_id, now_ms)
        if known is None and may_be_unknown:
            known = _Reservation(0, 0)
        if known is None or known.is_settled:
            return self._outcome(Status.GONE)
        self._take(limits, num_used - known.charge)
        self.num_used += num_used - (0 if known.is_live else known.charge)
        self._reservations.pop(request_id, None)
        if may_be_unknown:
            self._reservations[request_id] = _Reservation(
                0, now_ms + LATE_MS, is_live=False, is_settled=True
            )
        return self._outcome(Status.SETTLED, known.charge)

    def renew(
        self, limits: Limits, running: Sequence[Progress], lease_ms: int, now_ms: int
    ) -> Outcome:
        """One that is not known is entered: Redis may have lost it, or not been there."""
        self._advance(limits, now_ms)
        for each in running:
            known = self._known(each.request_id, now_ms)
            if known is not None and known.is_settled:
                continue
            held = 0 if known is None else known.charge
            charge = bounded_tokens(max(each.charge if known is None else held, each.num_used))
            if known is not None and not known.is_live:
                self.num_used -= held
            self._take(limits, charge - held)
            self._reservations[each.request_id] = _Reservation(charge, now_ms + lease_ms)
        return self._outcome(Status.RENEWED)

    def sweep(self, limits: Limits, now_ms: int) -> Outcome:
        """Only this lets go of what is forgotten: a clock set back may bring it to mind again."""
        self._advance(limits, now_ms)
        for request_id, each in list(self._reservations.items()):
            if each.is_forgotten(now_ms):
                del self._reservations[request_id]
        return self._outcome(Status.SWEPT)

    def _advance(self, limits: Limits, now_ms: int) -> None:
        """Fill the buckets up to now and end what is over. A clock set back fills nothing."""
        passed_ms = 0 if self._at_ms is None else max(0, now_ms - self._at_ms)
        self._tokens = _refilled(limits, self._tokens, limits.tokens_per_minute, passed_ms)
        self._requests = _refilled(limits, self._requests, limits.requests_per_minute, passed_ms)
        self._at_ms = now_ms
        for each in self._reservations.values():
            if each.is_live and each.until_ms <= now_ms:
                self.num_used += each.charge
                each.is_live, each.until_ms = False, now_ms + LATE_MS

    def _known(self, request_id: str, now_ms: int) -> _Reservation | None:
        known = self._reservations.get(request_id)
        return None if known is None or known.is_forgotten(now_ms) else known

    def _refusal(self, limits: Limits, cost: int, is_idle: bool) -> tuple[Status, int] | None:
        if limits.concurrency is not None and self.num_leases >= limits.concurrency:
            return Status.CONCURRENCY, CONCURRENCY_RETRY_MS
        if self._requests is not None:
            rate = limits.requests_per_minute or 0
            if rate == 0 or self._requests < UNIT:
                return Status.REQUESTS, _wait_ms(UNIT - self._requests, rate)
        if self._tokens is not None and not (limits.may_borrow and is_idle):
            rate = limits.tokens_per_minute or 0
            needed = min(cost * UNIT, _capacity(limits, rate))
            if rate == 0 or (cost > 0 and self._tokens < needed):
                return Status.TOKENS, _wait_ms(needed - self._tokens, rate)
        return None

    def _take(self, limits: Limits, num_tokens: int) -> None:
        if self._tokens is None:
            return
        full = _capacity(limits, limits.tokens_per_minute or 0)
        most_owed = _most_owed(limits) if limits.may_borrow else MAX_TOKENS * UNIT
        self._tokens = max(-most_owed, min(full, self._tokens - num_tokens * UNIT))

    def _outcome(self, status: Status, number: int = 0) -> Outcome:
        tokens, requests = self._tokens, self._requests
        return Outcome(
            status,
            number,
            None if tokens is None else tokens // UNIT,
            None if requests is None else requests // UNIT,
            self.num_leases,
        )


def _capacity(limits: Limits, rate: int) -> int:
    """At least one: else a small rate with a short burst would never admit anything."""
    return max(UNIT, rate * limits.burst_ms)


def _most_owed(limits: Limits) -> int:
    """By one that may borrow."""
    return _capacity(limits, limits.lowered_from or limits.tokens_per_minute or 0)


def _refilled(limits: Limits, level: int | None, rate: int | None, passed_ms: int) -> int | None:
    if rate is None:
        return None
    full = _capacity(limits, rate)
    return full if level is None else min(full, level + passed_ms * rate)


def _wait_ms(missing: int, rate: int) -> int:
    return math.ceil(missing / rate) if rate else NO_RATE_RETRY_MS
