"""The control law's arithmetic: batch size and step tokens in closed form, and what guards a move.

Each function is pure and small; `tuning` puts them in order for one replica. Step tokens are the
lever on inter-token latency (the next step obeys); batch size is the lever on memory and throughput
(it drains over a request's lifetime). 95th percentile is not the mean: as soon as more than 5 % of
decode tokens share their step with a full chunk of prefill, such steps *are* the tail, however rare
long ones look on average. That share jumps from nothing to everything with one burst, so step
tokens always bound a full step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import NormalDist
from typing import Final

from chairlift_operator.spec_values import BLOCK_TOKENS, Bounds
from chairlift_operator.step_time import StepCosts
from chairlift_operator.windows import Attainment, wilson_bounds

MARGIN: Final = 0.85  # of the objective: the model's error and a step's noise live in the rest
DEAD_BAND: Final = 0.10
# Narrower on the way down: a tenth too high would use up the whole margin.
DEAD_BAND_DOWN: Final = 0.05
GROWTH: Final = 1.5
WARM_GROWTH: Final = 8.0
REVERSAL_DWELL_S: Final = 30.0  # six ticks
URGENT_BUDGETS: Final = 1.6  # 8 % bad where 5 % may be
EMERGENCY_BUDGETS: Final = 4.0  # 20 % bad where 5 % may be
EMERGENCY_EVENTS: Final = 5
EMERGENCY_CUT: Final = 0.6
DRAIN_CUT: Final = 0.8
MIN_APP_LIMITED_BATCH: Final = 4
BINDING_SHARE: Final = 0.9

TRIM_MIN: Final = 0.7
TRIM_SPREAD: Final = 0.10  # relative spread of full steps about the model: a CPU's, measured
TRIM_MOST: Final = 0.85  # in one go
TRIM_UP: Final = 1.002
TRIM_INTERVAL_S: Final = 15.0  # a window must pass before the same readings may trim again
TRIM_EVENTS: Final = 200

KV_FILL: Final = 0.92
KV_PREEMPTED: Final = 0.95
KV_CONFIDENCE: Final = 2.3


@dataclass(frozen=True, slots=True)
class Demand:
    """What the workload looks like to one replica. None: not known, so nothing is derived from it.

    num_running and num_waiting: requests of every class.
    context_tokens: mean resident KV tokens of a sequence.
    num_peak: most that ran, and waited with a right to run, at once in the last minutes.
    prefill_per_decode: prompt tokens computed for each token decoded, over minutes.
    num_borrowing, num_borrowing_waiting: batch work on an interactive replica, part of the former.
    oldest_own_waiting_s: how long the first of the others has waited to be scheduled.
    """

    num_running: float
    num_waiting: float
    context_tokens: float | None = None
    num_peak: float = 0.0
    prefill_per_decode: float = 0.0
    num_borrowing: float = 0.0
    num_borrowing_waiting: float = 0.0
    oldest_own_waiting_s: float = 0.0

    @property
    def growth_tokens(self) -> float:
        """Tokens that a sequence decodes, on average: what its context holds beside its prompt."""
        return (self.context_tokens or 0.0) / (self.prefill_per_decode + 0.5)

    @property
    def num_to_run(self) -> float:
        """All that run, and those who will as soon as their prompts are computed. Batch work that
        waits may have no slot to come to."""
        return self.num_running + self.num_own_waiting

    @property
    def num_own(self) -> float:
        return max(0.0, self.num_running - self.num_borrowing)

    @property
    def num_own_waiting(self) -> float:
        """Requests whose latency counts; batch work may wait without end."""
        return max(0.0, self.num_waiting - self.num_borrowing_waiting)

    def binds(self, batch_size: int) -> bool:
        """The batch size, and nothing else, keeps requests waiting. Slots that batch work holds
        keep nobody else waiting: it yields them within a step."""
        return self.num_own_waiting > 0 and self.num_own >= BINDING_SHARE * batch_size

    def binds_borrowing(self, batch_size: int, share: float) -> bool:
        """Batch work fills its share of the slots, or what is left of them, and more waits."""
        full = (
            self.num_borrowing >= max(1.0, BINDING_SHARE * int(share * batch_size))
            or self.num_running >= BINDING_SHARE * batch_size
        )
        return share > 0 and self.num_borrowing_waiting > 0 and full


class Direction(StrEnum):
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class LastMove:
    at_s: float
    direction: Direction


def batch_size_for_latency(costs: StepCosts, target_s: float, context_tokens: float) -> float:
    """Largest batch whose decodes, all at once, leave room for a block of prefill in `target_s`.

    No smaller batch is needed for balance with prefill: while step tokens bound a step, decodes
    that crowd out prefill thin themselves out. A smaller one would only keep requests waiting.
    """
    headroom_s = target_s - costs.fixed_s - costs.prefill_s * BLOCK_TOKENS
    if headroom_s <= 0:
        return 0.0
    per_sequence_s = costs.decode_s + costs.kv_s * context_tokens
    return headroom_s / per_sequence_s if per_sequence_s > 0 else math.inf


def batch_size_for_memory(
    kv_tokens: float, context_tokens: float, growth_tokens: float, preempting: bool
) -> float:
    """Largest batch whose contexts fit the KV memory, with room for what may outgrow it.

    growth_tokens: what a sequence decodes, on average. A prompt is let in only where it fits, so
    that only what is decoded outgrows the memory; lengths of answers spread about as much as their
    mean, and that is taken for the deviation. Once sequences were preempted, whole contexts are.
    """
    usable = KV_FILL * kv_tokens * (KV_PREEMPTED if preempting else 1.0)
    if context_tokens <= 0:
        return math.inf
    deviation = context_tokens if preempting else min(growth_tokens, context_tokens)
    spread = KV_CONFIDENCE * deviation
    root = (-spread + math.sqrt(spread**2 + 4 * context_tokens * usable)) / (2 * context_tokens)
    return math.floor(root**2)


def step_tokens_for_latency(
    costs: StepCosts, target_s: float, batch: float, context_tokens: float
) -> float:
    """Tokens of the largest step that takes `target_s` beside `batch` decodes."""
    left_s = target_s - costs.step_s(batch, 0.0, batch * context_tokens)
    if costs.prefill_s <= 0:
        return math.inf if left_s >= 0 else batch
    return batch + left_s / costs.prefill_s


def step_s_at(costs: StepCosts, step_tokens: float, batch: float, context_tokens: float) -> float:
    """Predicted time of a full step beside `batch` decodes."""
    decodes = min(batch, step_tokens)
    return costs.step_s(decodes, step_tokens - decodes, decodes * context_tokens)


def balanced_batch(costs: StepCosts, target_s: float, demand: Demand) -> float:
    """Decodes that full steps of `target_s` keep running: more end than prompts replace.

    No bound for the batch size, which is for moments; but no more need be planned for that last.
    """
    context = demand.context_tokens or 0.0
    decode_s = costs.decode_s + costs.kv_s * context + costs.prefill_s * demand.prefill_per_decode
    return max(0.0, target_s - costs.fixed_s) / decode_s if decode_s > 0 else math.inf


def decodes_to_plan_for(
    demand: Demand, batch_size: int, balanced: float = math.inf
) -> tuple[float, ...]:
    """Decodes that a full step may carry: those running, and as many as there were of late, as
    far as steps keep so many running.

    Both, because either may be the slower: a slot may cost more than the prefill token it displaces
    (GPUs) or less (CPUs). Slots that nobody was there to fill would only make steps smaller, and
    each request that comes to wait would move them.
    """
    running = max(demand.num_running, MIN_APP_LIMITED_BATCH)
    most = max(running, min(balanced, max(demand.num_to_run, demand.num_peak)))
    return min(batch_size, running), min(batch_size, most)


def step_tokens_floor(bounds: Bounds, num_running: float) -> int:
    """Below this, running sequences would stall each other, or prefill would never advance."""
    return bounds.clamp(max(bounds.min, num_running + BLOCK_TOKENS))


def is_feasible(costs: StepCosts, target_s: float, floor_tokens: int) -> bool:
    """Whether even the smallest step that makes progress fits the objective."""
    return costs.step_s(1, floor_tokens - 1, 0.0) <= target_s


@dataclass(frozen=True, slots=True)
class MoveLimits:
    """What a move must respect.

    floor: nothing lower is proposed; inside the bounds, yet no reason to move by itself for less
    than
        the dead band. growth_ceiling: the largest value explored, extrapolated.
    """

    bounds: Bounds
    floor: int
    growth_ceiling: float = math.inf
    may_grow: bool = True
    urgent: bool = False


def guarded(
    current: int, proposed: float, limits: MoveLimits, last: LastMove | None, now_s: float
) -> int:
    """The value to set: `proposed` within bounds, growth, dead band and dwell, or `current`.

    The bounds hold whatever else is known.
    """
    bounded = limits.bounds.clamp(current)
    wanted = min(max(proposed, limits.floor), limits.bounds.max)
    if wanted > bounded:
        wanted = max(bounded, min(wanted, limits.growth_ceiling))
    direction = Direction.UP if wanted > bounded else Direction.DOWN
    band = DEAD_BAND if direction is Direction.UP else DEAD_BAND_DOWN
    if abs(wanted - bounded) < max(1.0, band * bounded):
        return bounded
    if direction is Direction.UP and not limits.may_grow:
        return bounded
    recent = last is not None and now_s - last.at_s < REVERSAL_DWELL_S
    if recent and last is not None and last.direction is not direction:
        excused = direction is Direction.DOWN and limits.urgent
        if not excused:
            return bounded
    return math.floor(wanted)


def trimmed(
    kappa: float, seen: Attainment | None, bad_budget: float, full_share: float = 1.0
) -> float:
    """The target's trim, from readings taken since the last move: model error shows only here.

    full_share: of the steps, those whose budget was used up. What is bad is bad in these, and a
    request that lives through a burst sees hardly any others, so the objective is held there. If
    full steps spread like a normal distribution, the share beyond the threshold tells where their
    mean lies, and so the factor to where it should.
    """
    if seen is None:
        return kappa
    count = seen.num_independent * full_share
    bad_share = min(0.99, seen.bad_share / full_share) if count >= EMERGENCY_EVENTS else 0.0
    if wilson_bounds(bad_share, count)[0] > bad_budget:
        spreads = NormalDist().inv_cdf
        wanted, found = spreads(1 - bad_budget), spreads(1 - bad_share)
        factor = (1 - TRIM_SPREAD * wanted) / (1 - TRIM_SPREAD * found)
        return max(TRIM_MIN, kappa * max(TRIM_MOST, factor))
    if seen.low_sample:
        return kappa
    if seen.bad_share < bad_budget / 10 and seen.num_independent >= TRIM_EVENTS:
        return min(1.0, kappa * TRIM_UP)
    return kappa


def is_emergency(recent: Attainment | None, bad_budget: float) -> bool:
    """Far too many bad events in the last seconds, and more than chance would bring."""
    if recent is None or recent.num_independent < EMERGENCY_EVENTS:
        return False
    limit = min(EMERGENCY_BUDGETS * bad_budget, (1 + bad_budget) / 2)
    return recent.bad_share > limit and recent.lower > bad_budget


def is_urgent(recent: Attainment | None, bad_budget: float) -> bool:
    return recent is not None and recent.bad_share > URGENT_BUDGETS * bad_budget


@dataclass(frozen=True, slots=True)
class Bracket:
    """Step tokens found good and bad while no model can be trusted: search by halving."""

    good: int | None = None
    bad: int | None = None

    def after(self, current: int, seen: Attainment, bad_budget: float) -> Bracket:
        if seen.lower > bad_budget:
            good = self.good if self.good is not None and self.good < current else None
            return Bracket(good, current)
        if seen.upper < bad_budget:
            return replace(self, good=current, bad=self.bad if (self.bad or 0) > current else None)
        return self

    def proposal(self, current: int) -> float:
        if self.bad is not None and current >= self.bad:
            return (self.good + current) / 2 if self.good is not None else 0.75 * current
        if self.good == current:
            return (current + self.bad) / 2 if self.bad is not None else 1.25 * current
        return current
