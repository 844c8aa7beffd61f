"""One tick of the knobs' law, as a function: how far a doubtful model may move them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_operator import law
from chairlift_operator.law import Demand
from chairlift_operator.memory import Knobs, TuningState
from chairlift_operator.spec import Objective
from chairlift_operator.spec_values import Bounds
from chairlift_operator.step_time import StepCosts, StepMeans, StepTimeModel, learn
from chairlift_operator.tuning import TuningInput, tune
from chairlift_operator.windows import Attainment, wilson_bounds

CPU = StepCosts(50e-3, 5e-3, 0.75e-3, 0.0)
STEPS = Bounds(32, 2048)


def taught(points: list[tuple[float, float]], costs: StepCosts = CPU) -> StepTimeModel:
    """By means at these decodes and prefill tokens, in turn."""
    model = StepTimeModel()
    for tick in range(8):
        decodes, prefill = points[tick % len(points)]
        means = StepMeans(
            50, costs.step_s(decodes, prefill, 200 * decodes), decodes, prefill, 200 * decodes
        )
        model = learn(model, means, 512, 5.0 * tick)
    return model


ONE_POINT = taught([(16.0, 200.0)])
WELL_KNOWN = taught([(4.0, 10.0), (16.0, 200.0), (16.0, 20.0), (2.0, 300.0)])


def attained(bad: float, count: float = 200.0) -> Attainment:
    return Attainment(bad, *wilson_bounds(bad, count), count, count, 15.0, low_sample=False)


def tuning(**changes: Any) -> TuningInput:
    calm = TuningInput(
        current=Knobs(16, 216),
        batch_bounds=Bounds(1, 64),
        step_bounds=STEPS,
        objective=Objective(0.15),
        demand=Demand(16, 0, 200.0),
        model=WELL_KNOWN,
        seen=None,
        recent=None,
        kv_tokens=65536,
        preempting=False,
        may_grow=True,
        state=TuningState(),
        now_s=1000.0,
    )
    return replace(calm, **changes)


def contradicted(model: StepTimeModel) -> StepTimeModel:
    return replace(model, num_misfits_in_row=1, num_gated_in_row=1)


def test_a_well_known_machine_is_cut_to_where_a_step_takes_the_allowed_time() -> None:
    outcome = tune(tuning(demand=Demand(8, 0, 200.0)))
    fitting = 8 + (0.1275 - 50e-3 - 8 * 5e-3) / 0.75e-3
    assert outcome.knobs.step_tokens == pytest.approx(fitting, rel=0.15)


def test_a_model_that_saw_one_kind_of_step_goes_less_far_than_it_would() -> None:
    """Its split into a fixed part and prefill is a guess: the floor may be far from needed."""
    given_ = tuning(model=ONE_POINT, demand=Demand(16, 20, 200.0))
    sure = tune(given_).knobs.step_tokens
    costs = ONE_POINT.costs
    assert costs is not None
    alone = law.step_tokens_for_latency(costs, given_.target_s, 16, 200.0)
    needed = law.step_tokens_for_latency(CPU, given_.target_s, 16, 200.0)
    assert max(alone, needed, 32.0) < sure < 216


@given(
    decodes=st.floats(1, 40),
    prefill=st.floats(1, 400),
    running=st.integers(0, 64),
    waiting=st.integers(0, 64),
    step_tokens=st.integers(32, 2048),
    objective_s=st.floats(0.02, 1.0),
)
def test_no_cut_by_the_model_goes_where_steps_are_surely_short_enough(
    decodes: float, prefill: float, running: int, waiting: int, step_tokens: int, objective_s: float
) -> None:
    model = taught([(decodes, prefill)])
    demand = Demand(running, waiting, 200.0)
    given_ = tuning(
        model=model,
        demand=demand,
        current=Knobs(64, step_tokens),
        objective=Objective(objective_s),
    )
    outcome = tune(given_)
    after = outcome.knobs.step_tokens
    assert STEPS.min <= after <= STEPS.max
    if after < step_tokens and after > law.step_tokens_floor(STEPS, running):
        assert model.costs is not None
        slowest = max(
            model.costs.step_s(planned, max(0.0, after + 2 - planned), planned * 200)
            + model.deviation_s(planned, max(0.0, after + 2 - planned), planned * 200)
            for planned in law.decodes_to_plan_for(demand, 64)
        )
        assert slowest >= given_.target_s * (1 - 1e-9)


@pytest.mark.parametrize("is_doubtful", [False, True])
def test_nothing_grows_on_a_model_that_the_last_reading_contradicts(is_doubtful: bool) -> None:
    model = contradicted(WELL_KNOWN) if is_doubtful else WELL_KNOWN
    small = tuning(current=Knobs(4, 48), demand=Demand(4, 9, 200.0), model=model)
    knobs = tune(small).knobs
    assert (knobs == Knobs(4, 48)) is is_doubtful


@pytest.mark.parametrize(
    ("changes", "trims"),
    [
        ({}, True),
        ({"model": contradicted(WELL_KNOWN)}, False),  # about to be learned anew
        ({"current": Knobs(16, 400)}, False),  # the model asks for shorter steps by itself
        ({"state": TuningState(trimmed_at_s=990.0)}, False),
    ],
)
def test_only_lateness_that_the_model_did_not_foresee_trims_its_target(
    changes: dict[str, Any], trims: bool
) -> None:
    late = {"seen": attained(0.3), "current": Knobs(16, 48), "demand": Demand(8, 0, 200.0)}
    assert (tune(tuning(**{**late, **changes})).state.kappa < 1.0) is trims


@pytest.mark.parametrize(
    ("demand", "batch_size"),
    [
        (Demand(16, 0, 200.0), 14),
        (Demand(6, 40, 200.0), 14),  # they will run as soon as their prompts are computed
        (Demand(6, 0, 200.0), 16),  # nobody is there to fill the slots
    ],
)
def test_slots_that_latency_cannot_afford_go_once_there_is_somebody_to_fill_them(
    demand: Demand, batch_size: int
) -> None:
    assert tune(tuning(demand=demand)).knobs.batch_size == pytest.approx(batch_size, abs=1)


def test_the_same_input_gives_the_same_outcome() -> None:
    draw = random.Random(1)
    for _ in range(20):
        given_ = tuning(
            demand=Demand(draw.randint(0, 60), draw.randint(0, 60), 200.0),
            current=Knobs(draw.randint(1, 64), draw.randint(32, 2048)),
            seen=attained(draw.random()),
        )
        assert tune(given_) == tune(given_)


@pytest.mark.parametrize(
    ("seen", "objective_ms", "grows"),
    [
        (attained(0.0), 80.0, True),
        (None, 80.0, False),  # nothing was measured of this objective
        (replace(attained(0.0), low_sample=True), 80.0, False),
        (attained(0.05), 40.0, False),  # what was good for 80 ms says nothing of 40
    ],
)
def test_a_search_without_a_model_goes_up_only_on_what_was_measured(
    seen: Attainment | None, objective_ms: float, grows: bool
) -> None:
    found = TuningState(bracket=law.Bracket(good=1220), bracketed_ms=80.0)
    outcome = tune(
        tuning(
            current=Knobs(12, 1220), step_bounds=Bounds(20, 2048), model=StepTimeModel(),
            objective=Objective(objective_ms / 1e3), seen=seen, recent=None, state=found,
            demand=Demand(num_running=12, num_waiting=3),
        )
    )  # fmt: skip
    assert (outcome.knobs.step_tokens > 1220) is grows
    assert outcome.state.bracketed_ms == objective_ms
