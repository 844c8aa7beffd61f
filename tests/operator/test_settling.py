"""The whole loop in virtual time: an engine, saturated or not, and the planner against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from chairlift_operator.memory import Memory
from chairlift_operator.step_time import StepCosts

Make = Callable[..., Any]

REFERENCE = StepCosts(8e-3, 0.06e-3, 0.045e-3, 5e-8)
LAPTOP = StepCosts(85e-3, 1.5e-3, 2.5e-3, 2e-8)


def _scaled(costs: StepCosts, factor: float) -> StepCosts:
    return StepCosts(
        costs.fixed_s * factor,
        costs.decode_s * factor,
        costs.prefill_s * factor,
        costs.kv_s * factor,
    )


FAST, SLOW = _scaled(REFERENCE, 0.45), _scaled(REFERENCE, 1.6)
HARDWARE = {"reference": REFERENCE, "fast": FAST, "slow": SLOW, "laptop": LAPTOP}
PRIORS = {"cold": None, "of the reference": REFERENCE, "of a laptop": LAPTOP, "of a fast one": FAST}


def _setting(name: str, make_pool: Make, make_engine: Make, make_lengths: Make, **more: Any) -> Any:
    if name == "laptop":
        engine = make_engine(
            LAPTOP, itl_ms=300, lengths=make_lengths(250, 80), kv_tokens=65536, **more
        )
        return make_pool(itl_s=0.3, batch=(1, 64), step=(32, 2048)), engine
    return make_pool(), make_engine(HARDWARE[name], **more)


def _share_bad(ticks: list[Any]) -> float:
    return sum(t.bad for t in ticks) / max(1.0, sum(t.good + t.bad for t in ticks))


def _reversals(ticks: list[Any]) -> int:
    count, last = 0, dict[str, int]()
    for decision in (d for t in ticks for d in t.plan.decisions):
        change = decision.after - decision.before
        if abs(change) <= 0.1 * decision.before:
            continue
        count += last.get(decision.field, change) * change < 0
        last[decision.field] = change
    return count


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("name", HARDWARE)
def test_a_saturated_engine_settles_inside_its_objective_on_any_hardware(
    make_pool: Make,
    make_engine: Make,
    make_lengths: Make,
    close_loop: Make,
    name: str,
    prior: str,
    seed: int,
) -> None:
    pool, engine = _setting(name, make_pool, make_engine, make_lengths, seed=seed)
    ticks = list(close_loop(pool, engine, Memory.start(prior=PRIORS[prior]), 300.0))
    bounds = pool.spec.interactive
    for tick in ticks:
        report = tick.plan.replicas[0]
        assert bounds.batch_size.min <= report.batch_size <= bounds.batch_size.max
        assert bounds.step_tokens.min <= report.step_tokens <= bounds.step_tokens.max
    after_settling = [t for t in ticks if t.at_s > 45]
    assert _share_bad(after_settling) <= 0.05
    worst = [_share_bad(after_settling[i : i + 6]) for i in range(len(after_settling) - 6)]
    assert sum(share > 0.05 for share in worst) <= 0.1 * len(worst)
    assert _reversals(ticks) <= 8
    assert _reversals([t for t in ticks if t.at_s > 150]) <= 3


# The static pair (batch size, step tokens) that gives most inside the objective: found by a grid
# search of 64 to 165 pairs on each hardware. No one pair serves two of them.
BEST_STATIC = {"reference": (256, 680), "fast": (256, 1600), "slow": (256, 384), "laptop": (64, 80)}


@pytest.mark.parametrize("name", HARDWARE)
def test_one_configuration_comes_near_the_best_static_pair_of_each_hardware(
    make_pool: Make, make_engine: Make, make_lengths: Make, close_loop: Make, name: str
) -> None:
    pool, engine = _setting(name, make_pool, make_engine, make_lengths, seed=1)
    for _ in close_loop(pool, engine, Memory.start(), 400.0):
        pass
    _, static = _setting(name, make_pool, make_engine, make_lengths, seed=1)
    batch_size, step_tokens = BEST_STATIC[name]
    static.policy = replace(static.policy, batch_size=batch_size, step_tokens=step_tokens)
    static.run_until(400.0)
    work = [e.decodes + e.prefill for e in (engine, static)]
    assert work[0] >= 0.9 * work[1]


def test_a_quarter_slower_machine_is_back_inside_within_a_minute(
    make_pool: Make, make_engine: Make, close_loop: Make
) -> None:
    engine, pool, memory = make_engine(REFERENCE, seed=4), make_pool(), Memory.start()
    *_, last = close_loop(pool, engine, memory, 150.0)
    engine.costs = _scaled(REFERENCE, 1.25)
    ticks = list(close_loop(pool, engine, last.plan.memory, 300.0))
    assert _share_bad([t for t in ticks if t.at_s > 210]) <= 0.05


def test_light_load_is_served_without_fidgeting(
    make_pool: Make, make_engine: Make, close_loop: Make
) -> None:
    engine, pool = make_engine(REFERENCE, arrivals_per_s=1.0, seed=8), make_pool()
    ticks = list(close_loop(pool, engine, Memory.start(), 400.0))
    assert _share_bad(ticks) <= 0.05
    assert sum(len(t.plan.decisions) for t in ticks) <= 12


def test_slots_are_not_the_bottleneck_of_a_slow_machine_under_moderate_load(
    make_pool: Make, make_engine: Make, make_lengths: Make, close_loop: Make
) -> None:
    """Long prompts beside few slots once looked balanced, and kept requests waiting for nothing."""
    costs = StepCosts(110e-3, 1.3e-3, 2.9e-3, 2e-8)
    engine = make_engine(
        costs, itl_ms=300, lengths=make_lengths(150, 26), kv_tokens=65536, arrivals_per_s=0.35
    )
    pool = make_pool(itl_s=0.3, batch=(1, 64), step=(32, 2048))
    ticks = list(close_loop(pool, engine, Memory.start(), 300.0))
    assert _share_bad([t for t in ticks if t.at_s > 45]) <= 0.05
    assert min(t.plan.replicas[0].batch_size for t in ticks) >= 8


def test_an_engine_that_restarts_gets_its_policy_back_and_no_wild_rate(
    make_pool: Make, make_engine: Make, close_loop: Make
) -> None:
    engine, pool = make_engine(REFERENCE, seed=6), make_pool()
    *_, last = close_loop(pool, engine, Memory.start(), 150.0)
    wanted = last.plan.memory.replicas["chat-0"].wanted
    fresh = make_engine(REFERENCE, seed=7)
    fresh.now_s = engine.now_s
    ticks = list(close_loop(pool, fresh, last.plan.memory, 200.0))
    (action,) = ticks[0].plan.actions
    assert (action.policy.batch_size, action.policy.step_tokens) == (
        wanted.batch_size,
        wanted.step_tokens,
    )
    assert _share_bad(ticks[1:]) <= 0.05


def test_an_impossible_objective_is_called_so_and_held_still(
    make_pool: Make, make_engine: Make, make_lengths: Make, close_loop: Make
) -> None:
    engine = make_engine(LAPTOP, itl_ms=50, lengths=make_lengths(250, 80), kv_tokens=65536)
    pool = make_pool(itl_s=0.05, batch=(1, 64), step=(32, 2048))
    ticks = list(close_loop(pool, engine, Memory.start(), 300.0))
    (limited,) = [c for c in ticks[-1].plan.conditions if c.type == "CapacityLimited"]
    assert limited.reason == "ObjectiveInfeasible"
    assert "raise interTokenLatency.threshold" in limited.message
    assert _reversals([t for t in ticks if t.at_s > 60]) == 0
