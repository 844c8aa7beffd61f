from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from chairlift_operator import law
from chairlift_operator.law import Bracket, Demand, Direction, LastMove, MoveLimits
from chairlift_operator.spec_values import BLOCK_TOKENS, Bounds
from chairlift_operator.step_time import StepCosts
from chairlift_operator.windows import Attainment, wilson_bounds

costs_of = st.builds(
    StepCosts, st.floats(1e-3, 0.2), st.floats(0, 5e-3), st.floats(0, 5e-3), st.floats(0, 1e-6)
)


def _seen(share: float, independent: float = 500) -> Attainment:
    return Attainment(
        share,
        *wilson_bounds(share, independent),
        independent * 8,
        independent,
        15,
        low_sample=False,
    )


@given(
    costs_of,
    st.floats(0.01, 1),
    st.floats(1, 4000),
    st.sampled_from([f.name for f in fields(StepCosts)]),
    st.floats(1, 10),
)
def test_batch_size_never_grows_with_any_cost_and_never_shrinks_with_the_objective(
    costs: StepCosts, target_s: float, context: float, part: str, factor: float
) -> None:
    dearer = replace(costs, **{part: getattr(costs, part) * factor})
    size = law.batch_size_for_latency(costs, target_s, context)
    assert law.batch_size_for_latency(dearer, target_s, context) <= size
    assert law.batch_size_for_latency(costs, target_s * factor, context) >= size


@given(
    costs_of,
    st.floats(0.01, 1),
    st.floats(1, 256),
    st.floats(0, 4000),
    st.sampled_from([f.name for f in fields(StepCosts)]),
    st.floats(1, 10),
)
def test_step_tokens_never_grow_with_any_cost_and_never_shrink_with_the_objective(
    costs: StepCosts, target_s: float, batch: float, context: float, part: str, factor: float
) -> None:
    assume(costs.prefill_s > 1e-6)
    dearer = replace(costs, **{part: getattr(costs, part) * factor})
    tokens = law.step_tokens_for_latency(costs, target_s, batch, context)
    longer = law.step_tokens_for_latency(costs, target_s * factor, batch, context)
    rounding = 1e-9 * abs(tokens) + 1e-9
    assert longer >= tokens - rounding
    # Of a step that cannot be made short enough, dearer prefill is worth fewer negative tokens.
    if tokens >= batch:
        assert law.step_tokens_for_latency(dearer, target_s, batch, context) <= tokens + rounding


@given(costs_of, st.floats(0.01, 1), st.floats(1, 256), st.floats(0, 4000))
def test_a_step_of_the_proposed_tokens_takes_the_allowed_time(
    costs: StepCosts, target_s: float, batch: float, context: float
) -> None:
    assume(costs.prefill_s > 1e-6)
    tokens = law.step_tokens_for_latency(costs, target_s, batch, context)
    if tokens >= batch:
        assert law.step_s_at(costs, tokens, batch, context) == pytest.approx(target_s, rel=1e-6)


@given(costs_of, st.floats(0.02, 1), st.floats(1, 4000))
def test_the_largest_batch_leaves_room_for_one_block_of_prefill(
    costs: StepCosts, target_s: float, context: float
) -> None:
    batch = law.batch_size_for_latency(costs, target_s, context)
    assume(0 < batch < 1e6)
    tokens = law.step_tokens_for_latency(costs, target_s, batch, context)
    assert tokens == pytest.approx(batch + BLOCK_TOKENS, rel=1e-4) or costs.prefill_s <= 1e-6


@given(st.floats(100, 1e6), st.floats(1, 4096), st.floats(0, 1e5), st.floats(0, 1e5))
def test_contexts_of_the_batch_fit_the_memory_and_preemptions_make_room(
    kv_tokens: float, context: float, growth: float, more_growth: float
) -> None:
    size = law.batch_size_for_memory(kv_tokens, context, growth, preempting=False)
    assert size * context <= law.KV_FILL * kv_tokens * (1 + 1e-9)
    assert law.batch_size_for_memory(kv_tokens, context, growth, preempting=True) <= size
    assert law.batch_size_for_memory(kv_tokens, context, growth + more_growth, False) <= size


def test_long_prompts_with_short_answers_fill_the_memory_that_is_there() -> None:
    """12,000 tokens and 340: nineteen fit, and hardly anything of it grows (S6)."""
    demand = Demand(10, 5, context_tokens=12_170, prefill_per_decode=12_000 / 340)
    assert demand.growth_tokens == pytest.approx(340, rel=0.01)
    fitting = law.batch_size_for_memory(262_144, 12_170, demand.growth_tokens, preempting=False)
    assert fitting == 19
    assert law.batch_size_for_memory(262_144, 12_170, demand.growth_tokens, preempting=True) == 11


@given(
    st.integers(1, 4096),
    st.floats(0, 1e6) | st.just(math.inf),
    st.integers(1, 500),
    st.integers(0, 3000),
    st.integers(0, 500),
    st.booleans(),
    st.booleans(),
    st.floats(0, 100),
    st.sampled_from(Direction),
)
def test_no_move_leaves_the_bounds_outgrows_its_ceiling_or_rises_when_it_may_not(
    current: int,
    proposed: float,
    low: int,
    extra: int,
    raised: int,
    may_grow: bool,
    urgent: bool,
    age_s: float,
    direction: Direction,
) -> None:
    bounds = Bounds(low, low + extra)
    limits = MoveLimits(bounds, bounds.clamp(low + raised), 1.5 * current, may_grow, urgent)
    after = law.guarded(current, proposed, limits, LastMove(0.0, direction), age_s)
    held = bounds.clamp(current)
    assert bounds.min <= after <= bounds.max
    if after > held:
        assert may_grow and after <= 1.5 * current
    if after != held:
        assert abs(after - held) >= 0.05 * held - 1
        reverses = direction is not (Direction.UP if after > held else Direction.DOWN)
        assert not reverses or age_s >= law.REVERSAL_DWELL_S or (urgent and after < held)


@given(costs_of, st.floats(0.02, 1), st.floats(1, 4000), st.floats(0, 50))
def test_in_balance_full_steps_of_the_target_replace_as_many_decodes_as_end(
    costs: StepCosts, target_s: float, context: float, ratio: float
) -> None:
    demand = Demand(1, 0, context, prefill_per_decode=ratio)
    batch = law.balanced_batch(costs, target_s, demand)
    assume(0 < batch < 1e6)
    step_s = costs.step_s(batch, ratio * batch, batch * context)
    assert step_s == pytest.approx(target_s, rel=1e-6)
    assert law.balanced_batch(costs, 2 * target_s, demand) >= batch


@pytest.mark.parametrize("balanced", [5.0, 20.0, 500.0])
def test_no_more_decodes_are_planned_for_than_run_or_could_keep_running(balanced: float) -> None:
    demand = Demand(num_running=10, num_waiting=3, num_peak=40)
    assert law.decodes_to_plan_for(demand, 64, balanced) == (10, min(40, max(10, balanced)))


@pytest.mark.parametrize(
    ("demand", "batch_size", "decodes"),
    [
        (Demand(num_running=10, num_waiting=3), 64, (10, 13)),
        (Demand(num_running=10, num_waiting=3, num_peak=40), 64, (10, 40)),
        (Demand(num_running=10, num_waiting=30, num_borrowing_waiting=28), 64, (10, 12)),
        (Demand(num_running=10, num_waiting=3, num_peak=40), 12, (10, 12)),
        (Demand(2, 0), 64, (law.MIN_APP_LIMITED_BATCH, law.MIN_APP_LIMITED_BATCH)),
        (Demand(2, 0), 1, (1, 1)),
    ],
)
def test_step_tokens_are_planned_for_the_slower_of_those_running_and_the_most_of_late(
    demand: Demand, batch_size: int, decodes: tuple[float, float]
) -> None:
    assert law.decodes_to_plan_for(demand, batch_size) == decodes


def test_the_floor_leaves_a_block_of_prefill_beside_the_running_decodes() -> None:
    assert law.step_tokens_floor(Bounds(64, 2048), 100) == 116
    assert law.step_tokens_floor(Bounds(64, 2048), 4) == 64
    assert law.step_tokens_floor(Bounds(64, 100), 100) == 100


@given(st.floats(0.7, 1), st.floats(0, 1), st.floats(1, 5000), st.floats(0.01, 0.2))
def test_the_trim_stays_in_its_range_and_moves_a_little_at_a_time(
    kappa: float, share: float, independent: float, budget: float
) -> None:
    after = law.trimmed(kappa, _seen(share, independent), budget)
    assert 0.7 <= after <= 1 and after / kappa >= 0.85 - 1e-9 and after / kappa <= 1.002 + 1e-9
    assert law.trimmed(kappa, None, budget) == kappa


@pytest.mark.parametrize(
    ("bad_share", "full_share", "factor"),
    [
        (0.05, 1.0, 1.0),  # just met
        (0.04, 1.0, 1.0),
        (0.20, 1.0, 0.8355 / 0.9158),  # z of 0.05 is 1.645, of 0.2 it is 0.842
        (0.05, 0.25, 0.8355 / 0.9158),  # all of it in a quarter of the steps
        (0.50, 1.0, 0.85),
        (0.04, 0.02, 1.0),  # four full steps of two hundred tell nothing
    ],
)
def test_the_target_is_trimmed_by_what_is_bad_in_full_steps(
    bad_share: float, full_share: float, factor: float
) -> None:
    after = law.trimmed(1.0, _seen(bad_share, 200.0), 0.05, full_share)
    assert after == pytest.approx(factor, abs=1e-3)


def test_an_emergency_needs_many_bad_events_and_more_than_one_step_of_them() -> None:
    assert law.is_emergency(_seen(0.5, 20), 0.05)
    assert not law.is_emergency(_seen(0.15, 500), 0.05)
    assert not law.is_emergency(_seen(1.0, 2), 0.05)
    assert not law.is_emergency(None, 0.05)


def test_without_a_model_halving_finds_the_largest_good_step() -> None:
    bracket, current, limit = Bracket(), 1000, 333
    for _ in range(20):
        bracket = bracket.after(current, _seen(0.0 if current <= limit else 0.5), 0.05)
        current = int(bracket.proposal(current))
    assert 0.85 * limit <= current <= limit * 1.05


def test_an_objective_below_the_smallest_useful_step_is_called_infeasible() -> None:
    costs = StepCosts(0.085, 1.5e-3, 2.5e-3, 0)
    assert law.is_feasible(costs, 0.27, 64)
    assert not law.is_feasible(costs, 0.05, 64)
