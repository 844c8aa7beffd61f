"""How many replicas a class should have, in closed form and with its brakes. Pure.

Out at once, as far as measured demand asks; in by one, when a whole window's demand fits fewer.
Replicas that start count as supply, so that a warm-up is not asked for twice. What is unknown
lowers nothing. Called by `scaling`, which reads the numbers together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from chairlift_operator import law
from chairlift_operator.spec_values import Bounds
from chairlift_operator.step_time import LEAST_STEP_S, StepCosts

FILL: Final = 0.75  # of what a replica can carry; the rest absorbs bursts
SLOW_START_FILL: Final = 0.6
QUICK_START_S: Final = 30.0  # a new replica that takes no longer allows FILL
SLOW_START_S: Final = 60.0  # one that takes so long SLOW_START_FILL; in between it falls evenly
TOLERANCE: Final = 1.05
KV_FILL: Final = 0.8
KEPT_FILL: Final = 0.9  # of FILL: what one replica fewer may be filled to
KEPT_KV: Final = 0.75
FALLEN_FILL: Final = 0.75  # of FILL: noise of a fifth up and down does not get here from growth
FORECAST: Final = 1.5
REST_S: Final = 60.0  # between two changes, when the last of them shrinks
FIRST_WARM_UP_S: Final = 60.0
CALLED_OFF_S: Final = 30.0  # of low demand, before replicas that still start are called off
BLOCKED_S: Final = 300.0  # after a replica found no room: until one is asked for again


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of a class's requests."""

    prompt_tokens: float
    output_tokens: float

    @property
    def context_tokens(self) -> float:
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Supply:
    """num_pending: asked for, not yet ready. num_draining: going, still holding their place."""

    num_ready: int
    num_pending: int
    num_draining: int

    @property
    def count(self) -> int:
        return self.num_ready + self.num_pending

    @property
    def num_held(self) -> int:
        return self.count + self.num_draining


@dataclass(frozen=True, slots=True)
class Want:
    """What demand asks for now, whatever the bounds. fits_fewer: one less would carry it too.

    fell: one less would be far from filled, so those that still start are too many.
    """

    count: int
    reason: str
    fits_fewer: bool = True
    fell: bool = True


@dataclass(frozen=True, slots=True)
class ScaleState:
    """wants: what was asked for over the last window, oldest first.

    fell_at_s: since when demand has been far below what there is; None while it is not.
    blocked_at_s, blocked_because: when a replica last came up nowhere, and why.
    """

    wants: tuple[tuple[float, int], ...] = ()
    changed_at_s: float = -math.inf
    asked_at_s: float = -math.inf
    num_missed_in_row: int = 0
    fell_at_s: float | None = None
    blocked_at_s: float = -math.inf
    blocked_because: str = ""

    def is_blocked(self, now_s: float) -> bool:
        return now_s - self.blocked_at_s < BLOCKED_S


@dataclass(frozen=True, slots=True)
class ScaleInput:
    """want: None when it is not known. complaint: objectives are missed and nothing faster helps.

    is_certain: everything that counts for shrinking was read this tick. stuck: reasons of replicas
    that start and never will be ready, one each.
    """

    bounds: Bounds
    supply: Supply
    want: Want | None
    complaint: str | None
    is_certain: bool
    is_managed: bool
    window_s: float
    warm_up_s: float
    state: ScaleState
    now_s: float
    stuck: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    count: int
    reason: str
    state: ScaleState


def sustainable_rate(
    costs: StepCosts, target_s: float, lengths: Lengths, max_batch: int, kv_tokens: float
) -> float:
    """Requests a second that one replica carries with steps of at most `target_s`.

    In balance each decode comes with as many prompt tokens as replace its request in time. As many
    decodes run as steps of the target's length hold, or as there are slots or memory for: steps
    are shorter then.
    """
    context, output_tokens = lengths.context_tokens, lengths.output_tokens
    prompt_s = costs.prefill_s * lengths.prompt_tokens / output_tokens
    decode_s = costs.decode_s + costs.kv_s * context + prompt_s
    slots = min(
        float(max_batch),
        law.batch_size_for_latency(costs, target_s, context),
        law.batch_size_for_memory(kv_tokens, context, output_tokens, preempting=False),
    )
    left_s = target_s - costs.fixed_s
    num_decodes = min(slots, left_s / decode_s) if decode_s > 0 else slots
    if left_s <= 0 or num_decodes <= 0:
        return 0.0
    step_s = max(LEAST_STEP_S, costs.fixed_s + num_decodes * decode_s)
    return num_decodes / (output_tokens * step_s)


def forecast(rate: float, slope_per_s: float, warm_up_s: float) -> float:
    """The rate that a replica asked for now will meet, as far as the last minute tells."""
    return max(rate, min(FORECAST * rate, rate + max(0.0, slope_per_s) * warm_up_s / 2))


def fill(warm_up_s: float) -> float:
    """To what share of its rate a replica is filled: the longer a new one takes, the less."""
    slowness = (warm_up_s - QUICK_START_S) / (SLOW_START_S - QUICK_START_S)
    return FILL + (SLOW_START_FILL - FILL) * min(1.0, max(0.0, slowness))


def num_backlogged(
    queues: Sequence[float], num_held: float, per_replica: float, num_supply: int, warm_up_s: float
) -> int:
    """Replicas that have more to do than a new one takes to come: none of them is there for what
    arrives until then. num_held: at the gateway, for whoever is ready next."""
    longest = per_replica * warm_up_s
    if longest <= 0:
        return 0
    own = sum(queue > longest for queue in queues)
    return min(max(own, num_supply), own + int(num_held / longest))


def replicas_for_rate(
    arrivals_per_s: float, per_replica: float, num_backlogged: int, warm_up_s: float
) -> float:
    """Replicas, in fractions, that carry the arrivals beside those that have enough to do."""
    return num_backlogged + arrivals_per_s / (fill(warm_up_s) * per_replica)


def rounded_up(need: float, supply: Supply) -> int:
    """Whole replicas; a need just above what is there asks for no more."""
    return supply.count if supply.count < need <= TOLERANCE * supply.count else math.ceil(need)


def scale(given: ScaleInput) -> Scale:
    state = _remember(given)
    count, bounds = given.supply.count, given.bounds
    if not bounds.min <= count <= bounds.max:
        kept = bounds.clamp(count)
        return _changed(given, state, kept, f"bounds of the spec, {bounds.min} to {bounds.max}")
    if not given.is_managed:
        return Scale(count, "autoscaling is Off", state)
    if given.stuck:
        state = replace(state, blocked_at_s=given.now_s, blocked_because=given.stuck[0])
        kept = bounds.clamp(count - len(given.stuck))
        return _changed(given, state, kept, f"withdrawn: {given.stuck[0]}")
    want = given.want
    if want is not None and (kept := _without_pending(given, state, want)) < count:
        return _changed(given, state, kept, f"{want.reason}; those that start are too many")
    is_blocked = state.is_blocked(given.now_s)
    if want is not None and want.count > count and not is_blocked:
        target = bounds.clamp(min(want.count, 2 * count + 1))
        return _changed(given, state, target, want.reason)
    if given.complaint and not is_blocked and _may_ask(given, state):
        asked = replace(state, asked_at_s=given.now_s)
        return _changed(given, asked, bounds.clamp(count + 1), given.complaint)
    if want is not None and _may_shrink(given, state, want):
        reason = f"{want.reason}; {given.window_s:.0f} s of it fit {count - 1}"
        return _changed(given, state, bounds.clamp(count - 1), reason)
    return Scale(count, want.reason if want else "demand is not known", state)


@dataclass(frozen=True, slots=True)
class Allotment:
    """What each class may have now; the wish of the interactive one that finds no room yet."""

    interactive: int
    batch: int


def allot(
    capacity: int, wishes: tuple[int, int], supplies: tuple[Supply, Supply], batch_min: int
) -> Allotment:
    """Interactive first; what shrinks does so now, what grows only into places that are free."""
    interactive = min(wishes[0], capacity - batch_min)
    batch = max(0, min(wishes[1], capacity - interactive))
    free = capacity - sum(supply.num_held for supply in supplies)
    granted = []
    for wish, supply in zip((interactive, batch), supplies, strict=True):
        growth = max(0, min(wish - supply.count, free))
        free -= growth
        granted.append(supply.count + growth if wish > supply.count else wish)
    return Allotment(*granted)


def _remember(given: ScaleInput) -> ScaleState:
    state, now_s = given.state, given.now_s
    missed = state.num_missed_in_row + 1 if given.complaint else 0
    wants = state.wants
    if (want := given.want) is not None:
        count = want.count if want.fits_fewer else max(want.count, given.supply.count)
        wants = (*wants, (now_s, count))
    # One entry from before the window is kept: it tells that the window was seen whole.
    while len(wants) > 1 and wants[1][0] <= now_s - given.window_s:
        wants = wants[1:]
    fell_at_s = state.fell_at_s
    if want is not None:
        is_low = want.fell and want.count < given.supply.count
        fell_at_s = (now_s if fell_at_s is None else fell_at_s) if is_low else None
    return replace(state, wants=wants, num_missed_in_row=missed, fell_at_s=fell_at_s)


def _without_pending(given: ScaleInput, state: ScaleState, want: Want) -> int:
    """What is left when replicas that serve nobody yet are called off; no window is waited for
    where demand was seen to fall, and not just for a moment. One that a complaint asked for is not
    called off by demand."""
    supply = given.supply
    if not supply.num_pending or not want.fell or want.count >= supply.count:
        return supply.count
    if state.fell_at_s is None or given.now_s - state.fell_at_s < CALLED_OFF_S:
        return supply.count
    asked_for_it = max(count for _, count in state.wants) >= supply.count
    complained = given.complaint is not None or -math.inf < state.changed_at_s == state.asked_at_s
    if not complained and not asked_for_it and not _saw_whole_window(given, state):
        return supply.count  # asked for by whoever led before
    least = supply.num_ready + complained
    return given.bounds.clamp(min(supply.count, max(want.count, least)))


def _changed(given: ScaleInput, state: ScaleState, count: int, reason: str) -> Scale:
    if count != given.supply.count:
        state = replace(state, changed_at_s=given.now_s, num_missed_in_row=0)
    return Scale(count, reason, state)


def _may_ask(given: ScaleInput, state: ScaleState) -> bool:
    return (
        given.supply.num_pending == 0
        and state.num_missed_in_row >= 2
        and given.now_s - max(state.asked_at_s, state.changed_at_s) >= given.warm_up_s
    )


def _may_shrink(given: ScaleInput, state: ScaleState, want: Want) -> bool:
    supply, now_s = given.supply, given.now_s
    return (
        given.is_certain
        and supply.num_pending == 0
        and supply.num_draining == 0
        and not given.complaint
        and _saw_whole_window(given, state)
        and max(count for _, count in state.wants) < supply.count
        and now_s - state.changed_at_s >= min(REST_S, given.window_s)
        and want.fits_fewer
    )


def _saw_whole_window(given: ScaleInput, state: ScaleState) -> bool:
    return bool(state.wants) and state.wants[0][0] <= given.now_s - given.window_s
