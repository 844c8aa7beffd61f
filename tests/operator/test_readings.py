from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from chairlift_operator.decisions import Health
from chairlift_operator.exposition import EngineSample
from chairlift_operator.memory import ReplicaMemory, TuningState
from chairlift_operator.readings import demand_of, failure_of, read, take_in
from chairlift_operator.snapshot import ReplicaSnapshot
from chairlift_operator.spec import Objective, Slo
from chairlift_operator.step_time import StepCosts
from chairlift_operator.windows import History
from chairlift_protocol.policy import Generation


def test_context_is_memory_in_use_over_running_sequences(
    make_engine: Callable[..., Any],
) -> None:
    engine = make_engine(StepCosts(8e-3, 6e-5, 4.5e-5, 5e-8))
    history = History()
    for tick in range(1, 8):
        engine.run_until(5.0 * tick)
        history = history.with_sample(engine.now_s, engine.sample())
    context = demand_of(history, engine.snapshot(), engine.now_s).context_tokens
    assert context is not None and 400 < context < 2500


@pytest.mark.parametrize(
    ("sample", "sampled_at_s", "reason"),
    [
        (None, None, "no metrics were read"),
        (EngineSample(), 100.0, "series chairlift_step_seconds_total is absent"),
        (
            EngineSample(rejected=("chairlift_steps_total",)),
            100.0,
            "chairlift_steps_total is NaN, negative or absurdly large",
        ),
        (EngineSample(*[1.0] * 7), 60.0, "the last sample is 40 s old"),
        (EngineSample(*[1.0] * 7), 99.0, None),
    ],
)
def test_an_unusable_sample_says_which_series_is_to_blame(
    sample: EngineSample | None, sampled_at_s: float | None, reason: str | None
) -> None:
    seen = ReplicaSnapshot("a", True, sample=sample, sampled_at_s=sampled_at_s)
    assert failure_of(seen, History(), 100.0) == reason


@pytest.mark.parametrize("earlier_s", [0.0, 3.0])
def test_a_sample_that_the_history_holds_already_is_no_news(earlier_s: float) -> None:
    sample = EngineSample(*[1.0] * 7)
    history = History().with_sample(98.0, sample)
    seen = ReplicaSnapshot("a", True, sample=sample, sampled_at_s=98.0 - earlier_s)
    assert failure_of(seen, history, 100.0) == "the sample is not newer than the one before"


@pytest.mark.parametrize(
    ("num_steps", "num_running", "health"),
    [(10, 0, Health.IDLE), (11, 0, Health.LOW_SAMPLE), (10, 1, Health.LOW_SAMPLE)],
)
def test_an_engine_that_is_looked_at_once_a_minute_is_idle_if_it_was_all_minute(
    make_pool: Callable[..., Any], num_steps: float, num_running: float, health: Health
) -> None:
    before = EngineSample(*[10.0] * 5, 0.0, 0.0)
    after = replace(before, num_steps=num_steps, num_running=num_running)
    seen = ReplicaSnapshot("a", True, sample=after, sampled_at_s=100.0)
    memory = ReplicaMemory(history=History().with_sample(40.0, before))
    memory = take_in(memory, seen, None, 100.0)
    assert read(memory, seen, make_pool().spec.interactive.slo, None, 100.0).health is health


def test_readings_since_a_move_begin_when_the_engine_obeys_it(
    make_engine: Callable[..., Any],
) -> None:
    """What it computed in between was by the knobs before, and would be held against the new."""
    engine, slo = (
        make_engine(StepCosts(8e-3, 6e-5, 4.5e-5, 5e-8)),
        Slo(Objective(3), Objective(0.05)),
    )
    wanted = replace(engine.policy, generation=Generation(1, 1))
    memory = ReplicaMemory(wanted=wanted, tuning=TuningState(moved_at_s=10.0))
    events = {}
    for tick in range(1, 8):
        if tick == 5:  # asked for at 10 s, in force from 20 s on
            engine.policy = wanted
        engine.run_until(5.0 * tick)
        seen, now_s = engine.snapshot(), engine.now_s
        memory = take_in(memory, seen, None, now_s)
        found = read(memory, seen, slo, None, now_s).since_move
        events[tick] = found.num_events if found else 0.0
    assert [tick for tick, count in events.items() if count] == [6, 7]


def test_a_trim_ends_with_the_model_that_it_made_up_for(make_engine: Callable[..., Any]) -> None:
    engine = make_engine(StepCosts(8e-3, 6e-5, 4.5e-5, 5e-8))
    memory = ReplicaMemory(tuning=TuningState(kappa=0.8))
    for tick in range(1, 12):
        if tick == 6:
            assert memory.tuning.kappa == 0.8
            engine.costs = StepCosts(24e-3, 1.8e-4, 1.35e-4, 1.5e-7)
        engine.run_until(5.0 * tick)
        memory = take_in(memory, engine.snapshot(), None, engine.now_s)
    assert memory.model.num_changes == 1
    assert memory.tuning.kappa == 1.0
