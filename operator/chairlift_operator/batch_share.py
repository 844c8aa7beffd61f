"""How much of an interactive replica batch work may hold: the lever after step tokens and batch
size, and before replicas. Pure.

Interactive work takes slots and step tokens from batch work by itself, within a step. The share
falls when that is not enough: batch decodes fill steps that first tokens wait for, or a machine is
slower than its model. It falls at once and comes back slowly, more slowly each time that it had to
fall again. Called by `replica_plan`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from chairlift_operator import law
from chairlift_operator.spec import Objective, Slo
from chairlift_operator.windows import Attainment

SETTLE_S: Final = 15.0  # a window must pass before the share falls again for the same readings
FIRST_DWELL_S: Final = 30.0
LONGEST_DWELL_S: Final = 480.0
RAISE: Final = 0.1
LEAST_SHARE: Final = 0.1  # less would start one request in a while, and hurt as much


@dataclass(frozen=True, slots=True)
class LendingState:
    """moved_at_s: when the share last moved. dwell_s: how long it rests before it rises."""

    moved_at_s: float = -math.inf
    rose: bool = False
    dwell_s: float = FIRST_DWELL_S


@dataclass(frozen=True, slots=True)
class Served:
    """How interactive work fares beside the share: since the last move, and in the last seconds.

    is_idle: there is no interactive work. has_borrowers: there is batch work, running or waiting.
    """

    gaps: Attainment | None
    gaps_just_now: Attainment | None
    first_tokens: Attainment | None
    first_tokens_just_now: Attainment | None
    is_idle: bool
    has_borrowers: bool


@dataclass(frozen=True, slots=True)
class LendingInput:
    """settled: step tokens and batch size are where the law wants them, so they cannot help."""

    current: float
    max_share: float
    served: Served
    slo: Slo
    settled: bool
    may_grow: bool
    state: LendingState
    now_s: float


@dataclass(frozen=True, slots=True)
class Lending:
    share: float
    reason: str
    state: LendingState


def lend(given: LendingInput) -> Lending:
    """The share to set; the current one, within the spec's bound, when nothing asks for another."""
    current, state = min(given.current, given.max_share), given.state
    rested_s = given.now_s - state.moved_at_s
    to_take = current > 0 and given.served.has_borrowers
    if to_take and (alarm := _alarm(given)):
        return _moved(given, 0.0, alarm)
    missed = _missed(given)
    if to_take and missed and given.settled and rested_s >= SETTLE_S:
        lower = math.floor(current * 10) / 20  # half of it, on a grid of 0.05
        reason = f"{missed}, step tokens and batch size are at their limits"
        return _moved(given, lower if lower >= LEAST_SHARE else 0.0, reason)
    if current < given.max_share and not missed and given.may_grow:
        dwell_s = state.dwell_s * (1 if _is_certain(given.served) else 2)
        if rested_s >= dwell_s and _is_met(given):
            higher = min(given.max_share, round(current + RAISE, 2))
            return _moved(given, higher, f"objectives met for {dwell_s:.0f} s")
    if current == given.max_share and rested_s >= LONGEST_DWELL_S:
        state = replace(state, dwell_s=FIRST_DWELL_S)
    return Lending(current, "bounds of the spec", state)


def first_tokens_missed(served: Served, slo: Slo) -> bool:
    return _is_missed(served.first_tokens, slo.time_to_first_token)


def _moved(given: LendingInput, share: float, reason: str) -> Lending:
    state = given.state
    dwell_s = state.dwell_s
    if share < given.current and state.rose:
        dwell_s = min(LONGEST_DWELL_S, 2 * dwell_s)
    return Lending(share, reason, LendingState(given.now_s, share > given.current, dwell_s))


def _alarm(given: LendingInput) -> str | None:
    for seen, objective, noun in (
        (given.served.gaps_just_now, given.slo.inter_token_latency, "gaps"),
        (given.served.first_tokens_just_now, given.slo.time_to_first_token, "first tokens"),
    ):
        if seen is not None and law.is_emergency(seen, objective.bad_budget):
            return _said(seen, objective, noun)
    return None


def _missed(given: LendingInput) -> str | None:
    for seen, objective, noun in _judged(given):
        if seen is not None and _is_missed(seen, objective):
            return _said(seen, objective, noun)
    return None


def _is_met(given: LendingInput) -> bool:
    if given.served.is_idle:
        return True
    judged = [(seen, objective) for seen, objective, _ in _judged(given) if seen is not None]
    return bool(judged) and all(s.bad_share <= o.bad_budget for s, o in judged)


def _is_certain(served: Served) -> bool:
    judged = (served.gaps, served.first_tokens)
    return served.is_idle or all(seen is not None and not seen.low_sample for seen in judged)


def _judged(given: LendingInput) -> tuple[tuple[Attainment | None, Objective, str], ...]:
    served, slo = given.served, given.slo
    return (
        (served.gaps, slo.inter_token_latency, "gaps"),
        (served.first_tokens, slo.time_to_first_token, "first tokens"),
    )


def _is_missed(seen: Attainment | None, objective: Objective) -> bool:
    return seen is not None and seen.lower > objective.bad_budget


def _said(seen: Attainment, objective: Objective, noun: str) -> str:
    share, threshold_ms = 100 * seen.bad_share, objective.threshold_ms
    return f"{share:.0f} % of {noun} over {threshold_ms:g} ms in {seen.window_s:.0f} s"
