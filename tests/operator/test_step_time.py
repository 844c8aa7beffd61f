from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_operator.exposition import EngineSample
from chairlift_operator.step_time import (
    StepCosts,
    StepMeans,
    StepTimeModel,
    learn,
    means_between,
)
from chairlift_operator.windows import History

REFERENCE = StepCosts(8e-3, 0.06e-3, 0.045e-3, 5e-8)
CPU = StepCosts(85e-3, 1.5e-3, 2.5e-3, 2e-8)


def _drawn(costs: StepCosts, rng: random.Random, size: float = 1.0) -> StepMeans:
    decodes, prefill = rng.uniform(2, 60) * size, rng.uniform(20, 300) * size
    kv = decodes * rng.uniform(300, 1500)
    step_s = costs.step_s(decodes, prefill, kv) * rng.gauss(1, 0.01)
    return StepMeans(50, step_s, decodes, prefill, kv)


def _taught(
    model: StepTimeModel, costs: StepCosts, ticks: int, rng: random.Random, size: float = 1.0
) -> StepTimeModel:
    for tick in range(ticks):
        model = learn(model, _drawn(costs, rng, size), 256, 5.0 * tick)
    return model


@pytest.mark.parametrize(("costs", "size"), [(REFERENCE, 1.0), (CPU, 0.3)])
def test_a_cold_model_predicts_within_ten_percent_after_a_dozen_ticks(
    costs: StepCosts, size: float
) -> None:
    rng = random.Random(3)
    model = _taught(StepTimeModel(), costs, 12, rng, size)
    assert model.costs is not None
    for _ in range(20):
        seen = _drawn(costs, rng, size)
        predicted = model.costs.step_s(seen.num_decodes, seen.prefill_tokens, seen.kv_tokens)
        assert predicted == pytest.approx(seen.step_s, rel=0.10)
        assert model.trusted_at(seen.num_decodes, seen.prefill_tokens, seen.kv_tokens)


@pytest.mark.parametrize("factor", [0.02, 0.45, 1.6, 30.0])
def test_a_wrong_prior_is_unlearned_within_ten_ticks(factor: float) -> None:
    rng = random.Random(4)
    prior = StepCosts(
        *(factor * part for part in (CPU.fixed_s, CPU.decode_s, CPU.prefill_s, CPU.kv_s))
    )
    model = _taught(StepTimeModel.from_prior(prior), CPU, 10, rng, 0.3)
    assert model.costs is not None
    assert model.costs.step_s(10, 50, 5000) == pytest.approx(CPU.step_s(10, 50, 5000), rel=0.15)


def test_one_odd_reading_changes_nothing_and_three_are_believed() -> None:
    rng = random.Random(5)
    model = _taught(StepTimeModel(), REFERENCE, 20, rng)
    odd = StepMeans(50, 10 * REFERENCE.step_s(10, 100, 9000), 10, 100, 9000)
    once = learn(model, odd, 256, 200.0)
    assert once.costs == model.costs
    thrice = learn(learn(once, odd, 256, 205.0), odd, 256, 210.0)
    assert thrice.costs is not None
    assert thrice.costs.step_s(10, 100, 9000) == pytest.approx(odd.step_s, rel=0.2)


def test_a_slower_machine_is_followed() -> None:
    rng = random.Random(6)
    model = _taught(StepTimeModel(), REFERENCE, 40, rng)
    slower = StepCosts(
        *(
            1.25 * part
            for part in (REFERENCE.fixed_s, REFERENCE.decode_s, REFERENCE.prefill_s, REFERENCE.kv_s)
        )
    )
    model = _taught(model, slower, 9, rng)
    assert model.costs is not None
    assert model.costs.step_s(30, 200, 30000) == pytest.approx(
        slower.step_s(30, 200, 30000), rel=0.08
    )


@pytest.mark.parametrize("factor", [0.4, 1.25, 2.5, 6.0])
def test_a_machine_that_changes_as_a_whole_keeps_its_proportions(factor: float) -> None:
    """One operating point tells the size of the change, and nothing else needs to be learned."""
    rng = random.Random(7)
    model = _taught(StepTimeModel(), CPU, 40, rng, 0.3)
    assert model.costs is not None and model.num_changes == 0
    was = model.costs
    here = StepMeans(50, factor * CPU.step_s(12, 60, 9000), 12, 60, 9000)
    for tick in range(12):  # a quarter shows itself only to a model that is sure of this point
        model = learn(model, here, 256, 200.0 + 5.0 * tick)
    assert model.costs is not None
    for decodes, prefill, kv in ((1, 16, 500), (12, 0, 9000), (12, 200, 9000), (30, 60, 20000)):
        before, now = (c.step_s(decodes, prefill, kv) for c in (was, model.costs))
        assert now == pytest.approx(factor * before, rel=0.12)
    assert model.num_changes == (1 if not 0.5 < factor < 2 else model.num_changes)


def test_a_part_that_once_cost_nothing_can_be_learned_after_a_change() -> None:
    rng, free = random.Random(8), StepCosts(20e-3, 0.0, 1e-3, 0.0)
    model = _taught(StepTimeModel(), free, 40, rng)
    model = _taught(model, CPU, 25, rng)
    assert model.costs is not None
    assert model.costs.step_s(40, 20, 5000) == pytest.approx(CPU.step_s(40, 20, 5000), rel=0.15)


def test_a_reading_far_from_the_prediction_contradicts_the_model_until_it_is_learned() -> None:
    rng = random.Random(9)
    model = _taught(StepTimeModel(), REFERENCE, 30, rng)
    assert not model.is_contradicted
    odd = StepMeans(50, 3 * REFERENCE.step_s(10, 100, 9000), 10, 100, 9000)
    said = []
    for tick in range(5):
        model = learn(model, odd, 256, 200.0 + 5.0 * tick)
        said.append(model.is_contradicted)
    assert said == [True, True, True, False, False]


@given(
    st.lists(
        st.tuples(st.floats(1e-4, 10), st.floats(0, 500), st.floats(0, 8000), st.floats(0, 1e6)),
        min_size=1,
        max_size=12,
    )
)
def test_coefficients_are_never_negative_or_unbounded(
    readings: list[tuple[float, float, float, float]],
) -> None:
    model = StepTimeModel()
    for tick, (step_s, decodes, prefill, kv) in enumerate(readings):
        model = learn(model, StepMeans(30, step_s, decodes, prefill, kv), 256, 5.0 * tick)
    assert model.costs is not None
    parts = (model.costs.fixed_s, model.costs.decode_s, model.costs.prefill_s, model.costs.kv_s)
    assert all(math.isfinite(part) and part >= 0 for part in parts)


def test_a_model_that_predicts_nothing_for_a_step_is_begun_anew_by_it() -> None:
    readings = ((1.0, 15.0), (0.125, 2.0), (1.0, 0.0), (1.0, 0.0), (1.0, 4.4e-240))
    model = StepTimeModel()
    for tick, (step_s, decodes) in enumerate(readings):
        model = learn(model, StepMeans(30, step_s, decodes, 0.0, 0.0), 256, 5.0 * tick)
    assert model.costs is not None
    assert model.costs.step_s(0, 0, 0) == pytest.approx(1.0, rel=0.05)


def test_a_model_without_a_measurement_is_trusted_nowhere() -> None:
    assert not StepTimeModel().trusted_at(8, 100, 1000)
    assert StepTimeModel().costs is None


def test_what_was_explored_long_ago_is_no_licence_any_more() -> None:
    model = learn(StepTimeModel(), StepMeans(50, 0.05, 100, 900, 1e4), 256, 0.0)
    model = learn(model, StepMeans(50, 0.02, 10, 90, 1e4), 256, 300.0)
    assert model.largest_batch == 100
    model = learn(model, StepMeans(50, 0.02, 10, 90, 1e4), 256, 700.0)
    assert model.largest_batch == 10


def _sums(steps: float, busy_s: float) -> EngineSample:
    return EngineSample(
        step_seconds=busy_s,
        num_steps=steps,
        step_decode_seqs=8 * steps,
        step_prefill_tokens=20 * steps,
        step_kv_tokens=500 * steps,
    )


@pytest.mark.parametrize(
    ("steps", "busy_s", "enough"),
    [
        (25, 0.5, True),
        (19, 0.4, False),
        (7, 4.9, True),
        (4, 4.9, False),
        (0, 0.0, False),
        (25, 5e-324, False),
    ],
)
def test_means_need_twenty_steps_or_a_few_slow_ones(
    steps: float, busy_s: float, enough: bool
) -> None:
    history = History().with_sample(0, _sums(0, 0)).with_sample(5, _sums(steps, busy_s))
    means = means_between(history, -math.inf)
    assert (means is not None) is enough
    if means is not None:
        assert means.step_s == pytest.approx(busy_s / steps)


def test_ticks_with_few_steps_add_up_until_they_are_enough() -> None:
    history = History().with_sample(0, _sums(0, 0)).with_sample(5, _sums(12, 0.2))
    assert means_between(history, 0.0) is None
    assert means_between(history.with_sample(10, _sums(24, 0.4)), 0.0) is not None
