"""Requests that were admitted and are not settled yet, and settlements that Redis still owes us.

Pure bookkeeping; times are arguments. `keeper` writes it, `upkeep` reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from chairlift_gateway.quota.law import LATE_MS, Progress

# Longer than a pause of the gateway or a slow round of renewals; a killed one's requests hold their
# places for so long.
LEASE_MS: Final = 30_000
RENEW_AFTER_S: Final = 5.0
RENEWED_TOGETHER: Final = 100
MAX_OWED: Final = 100_000


@dataclass(slots=True, eq=False)
class Lease:
    """One admitted request. num_used grows while it runs.

    num_unanswered: calls to Redis about it whose fate is not known; with one of those, Redis may or
    may not have heard of it.
    """

    holder: str
    fallback: str
    request_id: str
    charge: int
    renewed_at_s: float
    num_used: int = 0
    num_unanswered: int = 0
    is_local: bool = False

    @property
    def progress(self) -> Progress:
        return Progress(self.request_id, self.charge, self.num_used)


@dataclass(frozen=True, slots=True)
class Settlement:
    lease: Lease
    num_used: int
    made_at_s: float


@dataclass(slots=True)
class Leases:
    _by_holder: defaultdict[str, dict[str, Lease]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _owed: dict[str, Settlement] = field(default_factory=dict)

    @property
    def num_owed(self) -> int:
        return len(self._owed)

    def add(self, lease: Lease) -> None:
        self._by_holder[lease.holder][lease.request_id] = lease

    def remove(self, lease: Lease) -> bool:
        """Say whether it was there: a second settlement is none."""
        leases = self._by_holder.get(lease.holder, {})
        was_there = leases.pop(lease.request_id, None) is not None
        if not leases:
            self._by_holder.pop(lease.holder, None)
        return was_there

    def of(self, holder: str) -> list[Lease]:
        return list(self._by_holder.get(holder, {}).values())

    def due(self, now_s: float, *, all_of_them: bool = False) -> Iterator[list[Lease]]:
        """Those to be renewed, some of one holder at a time."""
        for leases in list(self._by_holder.values()):
            due = [
                lease
                for lease in leases.values()
                if all_of_them or now_s - lease.renewed_at_s >= RENEW_AFTER_S
            ]
            for first in range(0, len(due), RENEWED_TOGETHER):
                yield due[first : first + RENEWED_TOGETHER]

    def owe(self, settlement: Settlement) -> None:
        self._owed[settlement.lease.request_id] = settlement
        if len(self._owed) > MAX_OWED:
            del self._owed[next(iter(self._owed))]

    def pay(self, now_s: float) -> Iterable[Settlement]:
        """All that are owed, to be tried again; what Redis would not know any more is let go."""
        owed, self._owed = self._owed, {}
        return [each for each in owed.values() if (now_s - each.made_at_s) * 1000 < LATE_MS]
