"""The tokens per minute that tenants may use while interactive requests wait: batch work yields
first. Pure.

What batch work may use all together falls while the pool is congested, to the twentieth of it that
engines guarantee batch work and what batch replicas carry by themselves. It is drawn by weight: who
asks for less than its part is left alone, the others have the same tokens per weight. Interactive
tenants yield only when that has not helped, and only what they use beyond their part of the
capacity. Everything comes back the other way round, and nothing is ever more than what is set.

A rate begins with what its tenant uses, and falls and rises by a fifth in ten seconds, so that it
neither bites at once nor comes too late. What is not known lowers nothing: while nobody can say
whether requests wait, rates come back; while nobody looks, Redis keeps them until it forgets them.
Called by `lowering`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from chairlift_protocol.quota import default_holder
from chairlift_protocol.wire import RequestClass

STEP: Final = 0.2
STEP_S: Final = 10.0
BATCH_FLOOR: Final = 0.05  # as the engines' `batch_min_share`
# Congestion that lasts so long with batch work at its least is interactive work's own.
PERSISTS_S: Final = 30.0
# How long a rate that was told holds, and so how long what was seen or decided is believed.
TOLD_S: Final = 15.0


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

    @property
    def is_default(self) -> bool:
        """All those without a quota: whether any of them asks is not known."""
        return self.holder == default_holder(self.request_class)


@dataclass(frozen=True, slots=True)
class Lowered:
    """What a round leaves to the next. rates: by holder, tokens a minute of those that are lowered.
    told: the same in whole numbers, for Redis; empty where nothing is to be told.

    at_s: of the last round that saw the pool; known_s: of the last that knew whether requests wait.
    budget: what batch work may use all together, None without a bound. crowded_since_s,
    floored_since_s: since when requests wait, and since when nothing more can be taken from batch
    work.
    """

    at_s: float = -math.inf
    known_s: float = -math.inf
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
    if strain is None or now_s - strain.at_s > TOLD_S:
        return replace(before, told=MappingProxyType({}))
    before = _noting(before, strain, now_s)
    since_s = before.crowded_since_s
    # In two ticks in a row.
    is_congested = strain.is_crowded and since_s is not None and strain.at_s > since_s
    passed_s = min(max(0.0, now_s - before.at_s), STEP_S)
    fall, rise = (1 - STEP) ** (passed_s / STEP_S), (1 + STEP) ** (passed_s / STEP_S)
    carried, batch_carried = _known(strain.carried), _known(strain.batch_carried)
    if not is_congested:
        after = _raised(askers, before, rise, carried or math.inf)
    elif not carried:
        after = replace(before, rates=MappingProxyType(_kept(askers, before)))
    else:
        after = _yielding(askers, before, carried, batch_carried, fall, now_s)
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


def _noting(before: Lowered, strain: Strain, now_s: float) -> Lowered:
    if strain.is_crowded is None and now_s - before.known_s <= TOLD_S:
        return before
    if strain.is_crowded is not None:
        before = replace(before, known_s=now_s)
    if not strain.is_crowded:
        return replace(before, crowded_since_s=None, floored_since_s=None)
    if before.crowded_since_s is None:
        return replace(before, crowded_since_s=strain.at_s)
    return before


def _known(tokens: float | None) -> float | None:
    return tokens if tokens is not None and 0 <= tokens < math.inf else None


def _yielding(
    askers: Sequence[Asker],
    before: Lowered,
    carried: float,
    batch_carried: float | None,
    fall: float,
    now_s: float,
) -> Lowered:
    batch, interactive = _split(askers)
    most = carried + (batch_carried or 0.0)
    if batch_carried is None:  # of no account where no batch work asks
        rates, budget = _kept(batch, before), before.budget
        is_floored = all(asker.is_default for asker in batch)
    else:
        least = BATCH_FLOOR * carried + batch_carried
        budget = _next_budget(batch, before.budget, most, least, fall)
        rates = _Round(batch, before, most, least, fall, 1.0).rates(budget)
        # What models tell of the least goes up and down by more than a round's fall.
        is_floored = (1 - STEP) * budget <= least and _have_come_down(batch, rates, budget)
    known_s = before.floored_since_s
    floored_since_s = (now_s if known_s is None else known_s) if is_floored else None
    persists = floored_since_s is not None and now_s - floored_since_s >= PERSISTS_S
    # The part of each by weight, w_i / sum(w) of the capacity, is its own.
    squeezed = _Round(interactive, before, most, carried, fall, 1.0)
    rates |= squeezed.rates(carried) if persists else _kept(interactive, before)
    return replace(
        before, rates=MappingProxyType(rates), budget=budget, floored_since_s=floored_since_s
    )


def _next_budget(
    batch: Sequence[Asker], before: float | None, most: float, least: float, fall: float
) -> float:
    """It begins with what is known to be asked for: a high limit for everybody else, of which
    nobody may make use, keeps it from nothing."""
    asked = math.fsum(asker.asked for asker in batch if not asker.is_default)
    return max(min(asked, most) if before is None else before * fall, least)


def _have_come_down(batch: Sequence[Asker], rates: Mapping[str, float], budget: float) -> bool:
    """Not only the budget: a rate falls no faster than it may."""
    level = water_level(batch, budget)
    return all(
        (1 - STEP) * rates.get(asker.holder, asker.limit) <= max(1.0, level * asker.weight)
        for asker in batch
    )


def _raised(askers: Sequence[Asker], before: Lowered, rise: float, carried: float) -> Lowered:
    """Interactive tenants come first, up to what bounds them at all. None falls: who begins to ask
    begins where it stands."""
    batch, interactive = _split(askers)
    rates = _Round(interactive, before, math.inf, 0.0, 1.0, rise).rates(None)
    if any(rates.get(a.holder, math.inf) < min(a.limit, carried) for a in interactive):
        return replace(before, rates=MappingProxyType(rates | _kept(batch, before)))
    budget = before.budget
    if budget is not None:
        budget *= rise
        budget = budget if budget < math.fsum(asker.asked for asker in batch) else None
    rates |= _Round(batch, before, math.inf, 0.0, 1.0, rise).rates(budget)
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
