"""What a pool has learned of its step times is where its next replica begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from chairlift_operator.memory import Memory, ReplicaMemory
from chairlift_operator.plan import FORGET_AFTER_S, plan
from chairlift_operator.snapshot import Snapshot
from chairlift_operator.spec_runtime import Runtime
from chairlift_operator.step_time import StepCosts, StepTimeModel

Make = Callable[..., Any]

QUICK = StepCosts(8e-3, 0.06e-3, 0.045e-3, 5e-8)
SLOW = StepCosts(10e-3, 0.08e-3, 0.060e-3, 6e-8)
UPDATES_TO_TEACH = 6


def _model(costs: StepCosts, **changes: int) -> StepTimeModel:
    taught = replace(StepTimeModel.from_prior(costs), num_updates=UPDATES_TO_TEACH)
    return replace(taught, **changes)


def _memory(*models: StepTimeModel) -> Memory:
    replicas = {f"r{i}": ReplicaMemory(model=model) for i, model in enumerate(models)}
    return replace(Memory.start(), replicas=MappingProxyType(replicas))


def test_a_replica_that_starts_knows_what_the_pool_learned(
    make_pool: Make, make_engine: Make
) -> None:
    pool, memory, engine = make_pool(), Memory.start(), make_engine(QUICK)
    assert memory.of("new", 0.0).model.costs is None
    for tick in range(1, 20):
        engine.run_until(5.0 * tick)
        snapshot = Snapshot("default/chat", engine.now_s, (engine.snapshot(),))
        memory = plan(pool, snapshot, memory, engine.now_s).memory
    (teacher,) = memory.replicas.values()
    model = memory.of("new", engine.now_s).model
    assert model.warm and model.costs is not None and teacher.model.costs is not None
    assert model.costs.fixed_s == pytest.approx(teacher.model.costs.fixed_s)


@pytest.mark.parametrize("order", [(QUICK, SLOW), (SLOW, QUICK)])
def test_the_slowest_replica_teaches(order: tuple[StepCosts, StepCosts]) -> None:
    learned = _memory(*(_model(costs) for costs in order)).learned
    assert learned is not None and learned.fixed_s == pytest.approx(SLOW.fixed_s)


@pytest.mark.parametrize(
    "model",
    [
        StepTimeModel(),
        StepTimeModel.from_prior(QUICK),
        _model(QUICK, num_updates=UPDATES_TO_TEACH - 1),
        _model(QUICK, num_misfits_in_row=1),
    ],
)
def test_a_model_that_readings_have_not_confirmed_teaches_nobody(model: StepTimeModel) -> None:
    assert _memory(model).learned is None


def test_what_was_learned_outlives_the_replicas_that_learned_it(make_pool: Make) -> None:
    """A pool that goes to zero for the night is warm in the morning."""
    later_s = 2 * FORGET_AFTER_S
    made = plan(make_pool(), Snapshot("default/chat", 1.0, ()), _memory(_model(QUICK)), 1.0)
    made = plan(make_pool(), Snapshot("default/chat", later_s, ()), made.memory, later_s)
    assert not made.memory.replicas
    assert made.memory.of("new", later_s).model.costs is not None


def test_a_pool_that_moves_to_other_hardware_begins_anew(make_pool: Make) -> None:
    old = ReplicaMemory(model=_model(QUICK), last_seen_s=2.0)
    memory = replace(Memory.start(), replicas=MappingProxyType({"old": old}))
    moved = make_pool(runtime=Runtime(engine="simulator"))
    memory = plan(make_pool(), Snapshot("default/chat", 1.0, ()), memory, 1.0).memory
    assert memory.prior is not None
    memory = plan(moved, Snapshot("default/chat", 2.0, ()), memory, 2.0).memory
    assert memory.learned is None and memory.of("new", 2.0).model.costs is None
    assert memory.of("old", 2.0).model.costs is not None  # of itself it knows
    new = replace(memory.of("new", 2.0), model=_model(SLOW))
    memory = replace(memory, replicas=MappingProxyType({**memory.replicas, "new": new}))
    memory = plan(moved, Snapshot("default/chat", 3.0, ()), memory, 3.0).memory
    assert memory.prior is not None and memory.prior.fixed_s == pytest.approx(SLOW.fixed_s)
