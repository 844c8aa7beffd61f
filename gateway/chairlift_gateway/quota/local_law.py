"""The quota law while Redis is away: this gateway's own accounts, at its share of the limits. Pure.

An account outlives the outage, so that one that comes and goes fills no bucket anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from chairlift_gateway.quota.law import Account, Outcome, Progress
from chairlift_protocol.quota import Limits

MAX_ACCOUNTS: Final = 100_000
# A lease of ours ends with us; no renewals are needed.
LEASE_MS: Final = 7 * 24 * 3_600_000

# Of a holder whose limits this gateway never learnt: enough to go on with, far from unlimited.
UNLEARNT: Final = Limits(tokens_per_minute=20_000, requests_per_minute=120, concurrency=8)


def share_of(limits: Limits, num_gateways: int) -> Limits:
    """One gateway's part; at least one of what is not forbidden. Nothing is idle to be borrowed."""

    def part(bound: int | None) -> int | None:
        return None if bound is None else min(bound, max(1, bound // num_gateways))

    return Limits(
        part(limits.tokens_per_minute),
        part(limits.requests_per_minute),
        part(limits.concurrency),
        limits.burst_ms,
    )


class LocalLaw:
    def __init__(self) -> None:
        self._accounts: OrderedDict[str, Account] = OrderedDict()

    def reserve(
        self, holder: str, limits: Limits, request: Progress, running: Sequence[Progress],
        now_ms: int,
    ) -> Outcome:  # fmt: skip
        """running: what else this gateway runs for the holder, wherever it was admitted."""
        account = self._accounts.setdefault(holder, Account())
        self._accounts.move_to_end(holder)
        if len(self._accounts) > MAX_ACCOUNTS:
            self._accounts.popitem(last=False)
        account.renew(limits, running, LEASE_MS, now_ms)
        return account.reserve(limits, request.request_id, request.charge, LEASE_MS, now_ms)

    def settle(
        self, holder: str, limits: Limits, request_id: str, num_used: int, now_ms: int
    ) -> None:
        if account := self._accounts.get(holder):
            account.settle(limits, request_id, num_used, now_ms)
