"""What tenants should have been charged, from gateways' journals, beside what Redis says. Pure.

A journal is one gateway's lines, each written before the thing is done:
`ask ID HOLDER COST`, `grant ID CHARGE in_redis|local`, `seen ID TOKENS`, `settle ID TOKENS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Told:
    """One request, as its gateway told it. is_killed: the gateway did not live to settle all."""

    holder: str
    cost: int
    is_killed: bool
    charge: int | None = None
    is_local: bool = False
    num_seen: int = 0
    num_settled: int | None = None


@dataclass(frozen=True, slots=True)
class Redis:
    """used by holder; expired: what a request was charged whose lease ended, by its id."""

    used: Mapping[str, int]
    expired: Mapping[str, int]
    num_leases: int


@dataclass(slots=True)
class Verdict:
    num_requests: int = 0
    num_granted: int = 0
    num_local: int = 0
    num_killed: int = 0
    num_unbounded_killed: int = 0
    drift_tokens: int = 0
    num_leases: int = 0
    drifts: dict[str, int] = field(default_factory=dict)


def read_journal(lines: Iterable[str], is_killed: bool) -> dict[str, Told]:
    told: dict[str, Told] = {}
    for line in lines:
        words = line.split()
        if not line.endswith("\n"):  # cut off by the kill
            continue
        what, name, *rest = words
        if what == "ask":
            told[name] = Told(rest[0], int(rest[1]), is_killed)
        elif what == "grant":
            told[name].charge, told[name].is_local = int(rest[0]), rest[1] == "local"
        elif what == "seen":
            told[name].num_seen = int(rest[0])
        else:
            told[name].num_settled = int(rest[0])
    return told


def judge(told: Mapping[str, Told], redis: Redis) -> Verdict:
    """drift: by how much a tenant's account lies outside of what it can be. What Redis admitted has
    one true value; what a killed gateway admitted without Redis may never have reached it."""
    verdict = Verdict(num_leases=redis.num_leases)
    least: Counter[str] = Counter()
    unsure: Counter[str] = Counter()
    for name, each in told.items():
        verdict.num_requests += 1
        verdict.num_granted += each.charge is not None
        verdict.num_local += each.is_local
        expired = redis.expired.get(name)
        if not each.is_killed:
            least[each.holder] += each.num_settled or 0
            # A request that lived has been settled, so nothing else may be left of it.
            verdict.drift_tokens += expired or 0
        elif expired is not None:
            verdict.num_killed += 1
            verdict.num_unbounded_killed += not _is_bounded(each, expired)
            least[each.holder] += expired
        elif each.is_local:
            unsure[each.holder] += each.num_settled or 0
        else:
            # No lease ended, so Redis took the settlement; without one, it lost the request.
            verdict.num_unbounded_killed += each.charge is not None and each.num_settled is None
            least[each.holder] += each.num_settled or 0
    for holder in least.keys() | redis.used.keys():
        above = redis.used.get(holder, 0) - least[holder]
        drift = above if above < 0 else max(0, above - unsure[holder])
        if drift:
            verdict.drifts[holder] = drift
            verdict.drift_tokens += abs(drift)
    return verdict


def _is_bounded(each: Told, charged: int) -> bool:
    """Between what it had used at its last renewal, which reserving began, and all it had used."""
    lowest = 0 if each.charge is None or each.is_local else each.charge
    return lowest <= charged <= max(each.charge or each.cost, each.num_seen)
