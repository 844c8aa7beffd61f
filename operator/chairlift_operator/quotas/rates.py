"""The tokens per minute that tenants may use while interactive requests wait: batch work yields
first. Pure.

What batch work may use all together falls while the pool is congested, to the twentieth of it that
engines guarantee batch work and what batch replicas carry by themselves. It is drawn by weight: who
asks for less than its part is left alone, the others have the same tokens per weight. Interactive
tenants yield only when that has not helped, and only what they use beyond their part of the
capacity. Everything comes back the other way round, and nothing is ever more than what is set.

A rate begins with what its tenant uses, and falls and rises by a fifth in ten seconds, so that it
neither bites at once nor comes too late. What is not known lowers nothing: rates stay as they were
until Redis forgets them. Called by `lowering`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from chairlift_protocol.wire import RequestClass

STEP: Final = 0.2
STEP_S: Final = 10.0
BATCH_FLOOR: Final = 0.05  # as the engines' `batch_min_share`
# Congestion that lasts so long with batch work at its least is interactive work's own.
PERSISTS_S: Final = 30.0
# How long a rate that was told holds, and so how long what was seen or decided is believed.
TOLD_S: Final = 15.0
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Strain:
    """A pool as one tick of its controller saw it.

    is_crowded: interactive requests wait for too long; None where that is not known. carried: the
    tokens a minute that replicas for interactive work carry, prompts included; batch_carried: that
    batch replicas do beside them. None where no model can be trusted to tell.
    """

    at_s: float
    is_crowded: bool | None
    carried: float | None = None
    batch_carried: float | None = None


@dataclass(frozen=True, slots=True)
class Asker:
    """Who holds an account and asks for tokens. limit: tokens a minute, as set. demand: those that
    it asks for; None where that is not known."""

    holder: str
    request_class: RequestClass
    limit: int
    demand: float | None
    weight: float = 1.0

    @property
    def asked(self) -> float:
        """As far as the limit allows; all of it where it is not known to be less."""
        if self.demand is None or not self.demand >= 0:
            return float(self.limit)
        return min(self.demand, float(self.limit))


@dataclass(frozen=True, slots=True)
class Lowered:
    """What a round leaves to the next. rates: by holder, tokens a minute of those that are lowered.
    told: the same in whole numbers, for Redis; empty where nothing is to be told.

    at_s: of the last round that knew something. budget: what batch work may use all together, None
    without a bound. crowded_since_s, floored_since_s: since when requests wait, and since when
    nothing more can be taken from batch work.
    """

    at_s: float = -math.inf
    rates: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    told: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    budget: float | None = None
    crowded_since_s: float | None = None
    floored_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Round:
    """One class in one round. least: what its askers have all together, whatever happens. fall,
    rise: the factors by which a rate may move; 1 for one that may not."""

    askers: Sequence[Asker]
    before: Lowered
    most: float
    least: float
    fall: float
    rise: float

    def rates(self, budget: float | None) -> dict[str, float]:
        """budget: what they may use all together, None for all that is set."""
        level = math.inf if budget is None else water_level(self.askers, budget)
        weights = math.fsum(asker.weight for asker in self.askers)
        found = {}
        for asker in self.askers:
            rate = self._rate(asker, asker.weight * level)
            rate = max(rate, 1.0, self.least * asker.weight / weights)
            if rate < asker.limit:
                found[asker.holder] = rate
        return found

    def _rate(self, asker: Asker, target: float) -> float:
        known = self.before.rates.get(asker.holder)
        if known is None:  # what it does not use may go at once
            return max(target, self.fall * min(asker.asked, self.most))
        return min(max(target, self.fall * known), self.rise * known)


def lower(askers: Sequence[Asker], strain: Strain | None, before: Lowered, now_s: float) -> Lowered:
    """askers: those that ask for tokens now, of both classes, each with a limit above zero."""
    if now_s - before.at_s > TOLD_S:
        before = Lowered()
    if strain is None or strain.is_crowded is None or now_s - strain.at_s > TOLD_S:
        return replace(before, told=MappingProxyType({}))
    before = _noting(before, strain)
    since_s = before.crowded_since_s
    is_congested = since_s is not None and strain.at_s > since_s  # in two ticks in a row
    passed_s = min(max(0.0, now_s - before.at_s), STEP_S)
    fall, rise = (1 - STEP) ** (passed_s / STEP_S), (1 + STEP) ** (passed_s / STEP_S)
    if not is_congested:
        after = _raised(askers, before, rise)
    elif (carried := _carried(strain)) is None:
        after = replace(before, rates=MappingProxyType(_kept(askers, before)))
    else:
        after = _yielding(askers, before, carried, fall, now_s)
    limits = {asker.holder: asker.limit for asker in askers}
    told = {holder: math.ceil(rate) for holder, rate in after.rates.items()}
    told = {holder: rate for holder, rate in told.items() if rate < limits[holder]}
    return replace(after, at_s=now_s, told=MappingProxyType(told))


def water_level(askers: Sequence[Asker], budget: float) -> float:
    """Tokens for each of weight at which what they ask for, and no more than that, fills the
    budget; infinite where all together ask for no more."""
    if math.fsum(asker.asked for asker in askers) <= budget:
        return math.inf
    left, weights = budget, math.fsum(asker.weight for asker in askers)
    for asker in sorted(askers, key=lambda asker: asker.asked / asker.weight):
        level = left / max(weights, asker.weight)
        if asker.asked > level * asker.weight:
            return max(0.0, level)
        left, weights = left - asker.asked, weights - asker.weight
    return math.inf


def _noting(before: Lowered, strain: Strain) -> Lowered:
    if not strain.is_crowded:
        return replace(before, crowded_since_s=None, floored_since_s=None)
    if before.crowded_since_s is None:
        return replace(before, crowded_since_s=strain.at_s)
    return before


def _carried(strain: Strain) -> tuple[float, float] | None:
    known = [
        number
        for number in (strain.carried, strain.batch_carried)
        if number is not None and 0 <= number < math.inf
    ]
    return (known[0], known[1]) if len(known) == 2 and known[0] > 0 else None


def _yielding(
    askers: Sequence[Asker],
    before: Lowered,
    carried: tuple[float, float],
    fall: float,
    now_s: float,
) -> Lowered:
    most = sum(carried)
    batch, interactive = _split(askers)
    least = BATCH_FLOOR * carried[0] + carried[1]
    asked = math.fsum(asker.asked for asker in batch)
    budget = min(asked, most) if before.budget is None else before.budget * fall
    budget = max(budget, least)
    rates = _Round(batch, before, most, least, fall, 1.0).rates(budget)
    is_floored = budget <= least and _have_come_down(batch, rates, budget)
    known_s = before.floored_since_s
    floored_since_s = (now_s if known_s is None else known_s) if is_floored else None
    persists = floored_since_s is not None and now_s - floored_since_s >= PERSISTS_S
    # The part of each by weight, w_i / sum(w) of the capacity, is its own.
    squeezed = _Round(interactive, before, most, carried[0], fall, 1.0)
    rates |= squeezed.rates(carried[0]) if persists else _kept(interactive, before)
    return replace(
        before, rates=MappingProxyType(rates), budget=budget, floored_since_s=floored_since_s
    )


def _have_come_down(batch: Sequence[Asker], rates: Mapping[str, float], budget: float) -> bool:
    """Not only the budget: a rate falls no faster than it may."""
    level = water_level(batch, budget)
    return all(
        rates.get(asker.holder, asker.limit) <= max(1.0, level * asker.weight) * (1 + _ROUNDING)
        for asker in batch
    )


def _raised(askers: Sequence[Asker], before: Lowered, rise: float) -> Lowered:
    """Interactive tenants come first. None falls: who begins to ask begins where it stands."""
    batch, interactive = _split(askers)
    rates = _Round(interactive, before, math.inf, 0.0, 1.0, rise).rates(None)
    if rates:
        return replace(before, rates=MappingProxyType(rates | _kept(batch, before)))
    budget = before.budget
    if budget is not None:
        budget *= rise
        budget = budget if budget < math.fsum(asker.asked for asker in batch) else None
    rates = _Round(batch, before, math.inf, 0.0, 1.0, rise).rates(budget)
    return replace(before, rates=MappingProxyType(rates), budget=budget)


def _kept(askers: Sequence[Asker], before: Lowered) -> dict[str, float]:
    """Of those that still ask, as it was; the limit may be less by now."""
    return {
        asker.holder: rate
        for asker in askers
        if (rate := before.rates.get(asker.holder)) is not None and rate < asker.limit
    }


def _split(askers: Sequence[Asker]) -> tuple[list[Asker], list[Asker]]:
    batch = [a for a in askers if a.request_class is RequestClass.BATCH]
    return batch, [a for a in askers if a.request_class is RequestClass.INTERACTIVE]
