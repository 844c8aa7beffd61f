"""How much of an interactive replica batch work may hold: the lever after step tokens and batch
size, and before replicas. Pure.

Interactive work takes slots and step tokens from batch work by itself, within a step. The share
falls when that is not enough: batch decodes fill steps that first tokens wait for, or a machine is
slower than its model. It falls at once and comes back in doubling steps, each after a rest that is
longer each time that it had to fall again; all of it comes back when no interactive work is left.
A queue of interactive requests is a warning: the share halves before anything is missed, and
doubles again once the queue has been short for a while. A tenth is batch work's own, however bad it
gets: an emergency takes all of it for one tick, which frees the slots it holds. Called by
`replica_plan`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from chairlift_operator import law
from chairlift_operator.spec import Objective, Slo
from chairlift_operator.windows import Attainment

SETTLE_S: Final = 15.0  # a window must pass before the share falls again for the same readings
FIRST_DWELL_S: Final = 15.0
LONGEST_DWELL_S: Final = 480.0
LEAST_SHARE: Final = 0.1  # guaranteed; less would start one request in a while, and hurt as much
FIRST_RAISE: Final = 0.25  # from nothing; then it doubles, as every miss takes it back at once
# A first token may be waited for; this much of its objective spent in the queue alone is a warning.
QUEUE_SHARE: Final = 0.075
WARNED_SHARE: Final = 0.15  # what a warning leaves: as yet nothing is missed
# How long the queue must have been shorter, as a part of the dwell, before the warning is over.
QUEUE_DWELL: Final = 4 / 3


@dataclass(frozen=True, slots=True)
class LendingState:
    """moved_at_s: when the share last moved. dwell_s: how long it rests before it rises.

    queued_at_s: when interactive requests last waited for too long. warned: nothing worse than that
    has made the share fall since it was whole.
    """

    moved_at_s: float = -math.inf
    rose: bool = False
    dwell_s: float = FIRST_DWELL_S
    queued_at_s: float = -math.inf
    warned: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """How interactive work fares beside the share: since the last move, and in the last seconds.

    is_idle: there is no interactive work. has_borrowers: there is batch work, running or waiting.
    oldest_waiting_s: how long the first in the queue of interactive requests has waited.
    borrowed_share: of all slots, those that batch work holds.
    """

    gaps: Attainment | None
    gaps_just_now: Attainment | None
    first_tokens: Attainment | None
    first_tokens_just_now: Attainment | None
    is_idle: bool
    has_borrowers: bool
    oldest_waiting_s: float = 0.0
    borrowed_share: float = 1.0


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

    @property
    def least(self) -> float:
        return min(LEAST_SHARE, self.max_share)


@dataclass(frozen=True, slots=True)
class Lending:
    share: float
    reason: str
    state: LendingState


def lend(given: LendingInput) -> Lending:
    """The share to set; the current one, within the spec's bound, when nothing asks for another."""
    given = _noting_queue(given)
    current, state = min(given.current, given.max_share), given.state
    rested_s = given.now_s - state.moved_at_s
    to_take = current > given.least and given.served.has_borrowers
    alarm = _alarm(given)
    if to_take and alarm:
        return _moved(given, 0.0, alarm)
    missed = _missed(given)
    if to_take and missed and given.settled and rested_s >= SETTLE_S:
        reason = f"{missed}, step tokens and batch size are at their limits"
        return _moved(given, _half(given), reason)
    if to_take and _queues(given) and rested_s >= SETTLE_S:
        lower = max(min(current, WARNED_SHARE), _half(given))
        if lower < current:
            return _moved(given, lower, _said_of_queue(given), is_warning=True)
    if current < given.least and given.may_grow and not given.served.is_idle:
        return _moved(given, given.least, "batch work's own share, after all of it was taken back")
    is_well = given.served.is_idle or not (missed or alarm)
    if current < given.max_share and given.may_grow and is_well:
        if raised := _raised(given, current, rested_s):
            return raised
    if current == given.max_share and rested_s >= LONGEST_DWELL_S:
        state = replace(state, dwell_s=FIRST_DWELL_S)
    return Lending(current, "bounds of the spec", state)


def _raised(given: LendingInput, current: float, rested_s: float) -> Lending | None:
    state = given.state
    if given.served.is_idle:  # there is nobody to take it from
        if rested_s < SETTLE_S * state.dwell_s / FIRST_DWELL_S:
            return None
        return _moved(given, given.max_share, "no interactive work")
    if state.warned:
        short_s = given.now_s - state.queued_at_s
        if min(short_s, rested_s) < QUEUE_DWELL * state.dwell_s:
            return None
        higher = min(given.max_share, max(2 * current, LEAST_SHARE))
        return _moved(given, higher, f"no long queue for {short_s:.0f} s", is_warning=True)
    dwell_s = state.dwell_s * (1 if _is_certain(given.served) else 2)
    if rested_s < dwell_s or _queues(given) or not _is_met(given):
        return None
    higher = min(given.max_share, max(2 * current, FIRST_RAISE))
    return _moved(given, higher, f"objectives met for {dwell_s:.0f} s")


def _half(given: LendingInput) -> float:
    """Of what batch work holds, or nothing would go where it holds less than its share. On a grid
    of 0.05; no less than what is batch work's own."""
    held = min(given.current, given.max_share, given.served.borrowed_share)
    return max(given.least, math.floor(held * 10) / 20)


def _noting_queue(given: LendingInput) -> LendingInput:
    if not _queues(given):
        return given
    return replace(given, state=replace(given.state, queued_at_s=given.now_s))


def _queues(given: LendingInput) -> bool:
    threshold_s = given.slo.time_to_first_token.threshold_s
    return given.served.oldest_waiting_s > QUEUE_SHARE * threshold_s


def _said_of_queue(given: LendingInput) -> str:
    threshold_s = given.slo.time_to_first_token.threshold_s
    waited_s = given.served.oldest_waiting_s
    return f"a request has waited {waited_s:.1f} s of the {threshold_s:.1f} s to its first token"


def first_tokens_missed(served: Served, slo: Slo) -> bool:
    return _is_missed(served.first_tokens, slo.time_to_first_token)


def _moved(given: LendingInput, share: float, reason: str, is_warning: bool = False) -> Lending:
    state = given.state
    dwell_s = state.dwell_s
    if share < given.current and state.rose:
        dwell_s = min(LONGEST_DWELL_S, 2 * dwell_s)
    whole = given.current == given.max_share
    return Lending(
        share,
        reason,
        LendingState(
            moved_at_s=given.now_s,
            rose=share > given.current,
            dwell_s=dwell_s,
            queued_at_s=state.queued_at_s,
            warned=is_warning and (whole or state.warned),
        ),
    )


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
    """Gaps tell within seconds; first tokens are too few to, unless hundreds come a minute."""
    return served.is_idle or (served.gaps is not None and not served.gaps.low_sample)


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
