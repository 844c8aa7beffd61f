"""One replica, one tick: which batch size and step tokens to set, and the sentence that says why.

Order of trimming: step tokens come down first, then batch size. Pure; called by `replica_plan`,
which decides whether this may run at all (fresh data, verified policy) and turns the outcome into a
policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from chairlift_operator import law
from chairlift_operator.batch_share import LEAST_SHARE
from chairlift_operator.decisions import Change
from chairlift_operator.law import Bracket, Demand, Direction, LastMove, MoveLimits
from chairlift_operator.memory import Knobs, TuningState
from chairlift_operator.spec import Objective
from chairlift_operator.spec_values import BLOCK_TOKENS, Bounds
from chairlift_operator.step_time import StepCosts, StepTimeModel
from chairlift_operator.windows import Attainment

_HALVINGS: Final = 12  # of a range of step tokens: to one of them


@dataclass(frozen=True, slots=True)
class Move(Change):
    """A change of batch size or step tokens."""

    before: int
    after: int


@dataclass(frozen=True, slots=True)
class TuningInput:
    """seen: attainment since the last move, over what is needed to tell; recent: 15 s of it.

    lend_share: what batch work may hold, 0 while more slots for it would cost first tokens.
    full_share: of the steps seen, those whose budget was used up.
    """

    current: Knobs
    batch_bounds: Bounds
    step_bounds: Bounds
    objective: Objective
    demand: Demand
    model: StepTimeModel
    seen: Attainment | None
    recent: Attainment | None
    kv_tokens: int
    preempting: bool
    may_grow: bool
    state: TuningState
    now_s: float
    lend_share: float = 0.0
    full_share: float = 1.0

    @property
    def target_s(self) -> float:
        return law.MARGIN * self.state.kappa * self.objective.threshold_s

    @property
    def bad_budget(self) -> float:
        return self.objective.bad_budget


@dataclass(frozen=True, slots=True)
class TuningOutcome:
    """infeasible: no step that makes progress meets the objective on this hardware."""

    knobs: Knobs
    moves: tuple[Move, ...]
    state: TuningState
    infeasible: bool


def tune(given: TuningInput) -> TuningOutcome:
    given = replace(given, state=_trim(given))
    costs = given.model.costs
    context = given.demand.context_tokens
    floor = law.step_tokens_floor(given.step_bounds, given.demand.num_running)
    least = law.step_tokens_floor(given.step_bounds, 1)
    infeasible = (
        costs is not None
        and given.model.trusted_at(1, least - 1, 0.0)
        and not law.is_feasible(costs, given.target_s, least)
    )
    batch = _batch_size(given, None if infeasible else costs)
    step = None
    if costs is not None and context is not None:
        step = _step_tokens_by_model(given, costs, context, batch, floor)
    bracket = Bracket()
    if step is None:
        bracket, step = _without_model(given, floor)
    of_ms = given.objective.threshold_ms
    given = replace(given, state=replace(given.state, bracket=bracket, bracketed_ms=of_ms))
    if law.is_emergency(given.recent, given.bad_budget):
        batch, step = _emergency(given, batch, step, floor)
    moves = tuple(move for move in (step, batch) if move.after != move.before)
    return TuningOutcome(
        Knobs(batch.after, step.after), moves, _remember(given, batch, step), infeasible
    )


def _trim(given: TuningInput) -> TuningState:
    state = given.state
    kappa = law.trimmed(state.kappa, given.seen, given.bad_budget, given.full_share)
    too_soon = given.now_s - state.trimmed_at_s < law.TRIM_INTERVAL_S
    if kappa == state.kappa or (kappa < state.kappa and (too_soon or not _is_unforeseen(given))):
        return state
    return replace(state, kappa=kappa, trimmed_at_s=given.now_s)


def _is_unforeseen(given: TuningInput) -> bool:
    """A model that stands says that steps are short enough: late gaps are an error of it.

    Otherwise it is learned anew just now, or asks for smaller steps than these by itself.
    """
    costs, context = given.model.costs, given.demand.context_tokens
    if costs is None or context is None:
        return True
    decodes = min(given.demand.num_running, given.current.batch_size)
    predicted_s = law.step_s_at(costs, given.current.step_tokens, decodes, context)
    allowed_s = (1 + law.DEAD_BAND_DOWN) * given.target_s
    return not given.model.is_contradicted and predicted_s <= allowed_s


def _batch_size(given: TuningInput, costs: StepCosts | None) -> Move:
    current, demand = given.current.batch_size, given.demand
    explored = max(given.model.largest_batch, demand.num_running)
    limits = _limits(given, given.batch_bounds, given.batch_bounds.min, current, explored)
    context = demand.context_tokens
    proposed, why, known = math.inf, "bounds of the spec", False
    if context is not None and context > 0:
        proposed = law.batch_size_for_memory(
            given.kv_tokens, context, demand.growth_tokens, given.preempting
        )
        why = f"{proposed:.0f} contexts of {context:.0f} tokens fit {given.kv_tokens} of KV memory"
    if costs is not None and context is not None:
        by_latency = _batch_by_latency(given, costs, context)
        known = by_latency is not None
        if by_latency is not None and by_latency < proposed:
            proposed = by_latency
            why = f"{proposed:.0f} decodes and a block of prefill fill {_ms(given.target_s)} ms"
    shrinks = proposed < current and demand.num_to_run > law.BINDING_SHARE * proposed
    binds = demand.binds(current) or demand.binds_borrowing(current, given.lend_share)
    grows = known and proposed > current and binds
    if not (shrinks or grows):
        proposed = current
    after = law.guarded(current, proposed, limits, given.state.batch_move, given.now_s)
    waiting = f", {demand.num_waiting:.0f} requests wait" if after > current else ""
    return Move("batchSize", current, after, why + waiting)


def _batch_by_latency(given: TuningInput, costs: StepCosts, context: float) -> float | None:
    """What latency and the step bounds can feed; None where the model cannot be trusted."""
    fitting = law.batch_size_for_latency(costs, given.target_s, context)
    proposed = min(fitting, given.step_bounds.max - BLOCK_TOKENS)
    reached = min(proposed, law.GROWTH * given.current.batch_size)
    trusted = given.model.trusted_at(reached, BLOCK_TOKENS, reached * context)
    return proposed if trusted else None


def _step_tokens_by_model(
    given: TuningInput, costs: StepCosts, context: float, batch: Move, floor: int
) -> Move | None:
    """None when the model cannot be trusted at the step that it proposes."""
    current, demand = given.current.step_tokens, given.demand
    if batch.after > batch.before:  # there are those who fill what is added
        demand = replace(demand, num_peak=batch.after)
    balanced = law.balanced_batch(costs, given.target_s, demand)
    proposed, decodes = min(
        (law.step_tokens_for_latency(costs, given.target_s, decodes, context), decodes)
        for decodes in law.decodes_to_plan_for(demand, batch.after, balanced)
    )
    checked_at = min(max(proposed, floor), current * law.GROWTH)
    if not given.model.trusted_at(decodes, max(0.0, checked_at - decodes), decodes * context):
        return None
    limits = _limits(given, given.step_bounds, floor, current, given.model.largest_step_tokens)
    wanted = max(proposed, floor)
    if wanted < current:
        wanted = _surely_too_long(given, costs, decodes, context, wanted)
    after = law.guarded(current, wanted, limits, given.state.step_move, given.now_s)
    predicted_s = law.step_s_at(costs, after, decodes, context)
    reason = (
        f"predicted {_ms(predicted_s)} ms a step against {_ms(given.target_s)} ms allowed "
        f"(a {_ms(costs.fixed_s)}, c {_ms(costs.prefill_s)} ms per token)"
    )
    if proposed < floor and after == floor:
        reason = f"at the floor of {given.demand.num_running:.0f} running and one block, {reason}"
    return Move("stepTokens", current, after, reason)


def _surely_too_long(
    given: TuningInput, costs: StepCosts, decodes: float, context: float, wanted: float
) -> float:
    """How far a cut of step tokens may go at once: while even a step as short as the model's own
    uncertainty allows is too long. The steps that follow tell what is left of it."""
    low, high = wanted, float(given.current.step_tokens)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        step = decodes, max(0.0, middle - decodes), decodes * context
        shortest_s = costs.step_s(*step) - given.model.deviation_s(*step)
        low, high = (middle, high) if shortest_s <= given.target_s else (low, middle)
    return low


def _without_model(given: TuningInput, floor: int) -> tuple[Bracket, Move]:
    """Search by halving on what was measured, as long as there is anything measured."""
    current, seen = given.current.step_tokens, given.seen
    limits = _limits(given, given.step_bounds, floor, current, math.inf)
    is_of_this = given.state.bracketed_ms == given.objective.threshold_ms
    bracket, reason = given.state.bracket if is_of_this else Bracket(), "bounds of the spec"
    is_measured = seen is not None and not seen.low_sample
    if seen is not None and is_measured:
        bracket = bracket.after(current, seen, given.bad_budget)
        reason = f"{_share(seen, given)}, searching without a trusted model of step times"
    proposed = bracket.proposal(current)
    if proposed > current and not (is_measured and given.demand.num_waiting):
        proposed = current
    after = law.guarded(current, proposed, limits, given.state.step_move, given.now_s)
    return bracket, Move("stepTokens", current, after, reason)


def _emergency(given: TuningInput, batch: Move, step: Move, floor: int) -> tuple[Move, Move]:
    """Step tokens at once, deeper than the model asks if it asks for little; then batch size."""
    current = given.current
    reason = _share(given.recent, given)
    cut = max(floor, math.floor(law.EMERGENCY_CUT * current.step_tokens))
    if step.after <= (1 - law.DEAD_BAND) * current.step_tokens:
        step = replace(step, reason=f"{reason}; {step.reason}")
    elif cut < current.step_tokens:
        step = replace(step, after=cut, reason=reason)
    else:
        reason += ", step tokens already at their floor"
        # Batch work yields first, and with its decodes goes what holds the floor up.
        drains = given.demand.num_borrowing <= max(1, LEAST_SHARE * current.batch_size)
        drained = math.floor(law.DRAIN_CUT * min(given.demand.num_running, current.batch_size))
        target = given.batch_bounds.clamp(drained)
        if drains and target < batch.after:
            batch = replace(batch, after=target, reason=reason)
    if batch.after > current.batch_size:
        batch = replace(batch, after=current.batch_size)
    return batch, step


def _limits(
    given: TuningInput, bounds: Bounds, floor: int, current: int, explored: float
) -> MoveLimits:
    growth = law.WARM_GROWTH if given.model.warm else law.GROWTH
    return MoveLimits(
        bounds=bounds,
        floor=floor,
        growth_ceiling=growth * min(current, explored),
        may_grow=given.may_grow and not given.model.is_contradicted,
        urgent=law.is_urgent(given.recent, given.bad_budget),
    )


def _remember(given: TuningInput, batch: Move, step: Move) -> TuningState:
    state = given.state
    if batch.after == batch.before and step.after == step.before:
        return state
    return replace(
        state,
        moved_at_s=given.now_s,
        batch_move=_last_move(batch, given.now_s) or state.batch_move,
        step_move=_last_move(step, given.now_s) or state.step_move,
    )


def _last_move(move: Move, now_s: float) -> LastMove | None:
    if move.after == move.before:
        return None
    return LastMove(now_s, Direction.UP if move.after > move.before else Direction.DOWN)


def _share(seen: Attainment | None, given: TuningInput) -> str:
    if seen is None:
        return "no gaps measured"
    threshold_ms = given.objective.threshold_ms
    return f"{100 * seen.bad_share:.0f} % of gaps over {threshold_ms:g} ms in {seen.window_s:.0f} s"


def _ms(duration_s: float) -> str:
    value = duration_s * 1e3
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
