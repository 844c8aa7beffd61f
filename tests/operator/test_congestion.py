"""Whether interactive requests wait for too long, and what a pool carries, as one tick tells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from chairlift_operator.congestion import strain_of
from chairlift_operator.exposition import ClassSample, GatewayClassSample
from chairlift_operator.memory import Memory
from chairlift_operator.quotas.rates import Strain
from chairlift_operator.replica_law import FILL
from chairlift_operator.snapshot import GatewaySnapshot, ReplicaSnapshot
from chairlift_operator.step_time import StepCosts, StepTimeModel
from chairlift_protocol.wire import RequestClass

Make = Callable[..., Any]
REFERENCE = StepCosts(8e-3, 0.06e-3, 0.045e-3, 5e-8)
CLASSES = tuple(GatewayClassSample(c, 5.0, 0.0) for c in RequestClass)
QUIET = GatewaySnapshot(CLASSES, 1.0)


@pytest.fixture
def look(make_pool: Make, make_engine: Make, close_loop: Make) -> Callable[..., Any]:
    """A pool, the last plan for it after 300 s of so many requests a second, and its engine."""

    def run(arrivals_per_s: float | None) -> tuple[Any, Any, Any]:
        pool, engine = make_pool(), make_engine(REFERENCE, arrivals_per_s=arrivals_per_s)

        def tell(seen: ReplicaSnapshot, now_s: float) -> ReplicaSnapshot:
            oldest_s = now_s - engine.waiting[0].arrival_s if engine.waiting else 0.0
            sample = ClassSample(
                RequestClass.INTERACTIVE, float(engine.num_running), float(len(engine.waiting)),
                oldest_s, engine.first_good + engine.first_bad, engine.prompts, engine.tokens,
            )  # fmt: skip
            assert seen.sample is not None
            return replace(seen, sample=replace(seen.sample, classes=(sample,)))

        *_, last = close_loop(pool, engine, Memory.start(), 300.0, alter=tell)
        return pool, last.plan, engine

    return run


def _strain(pool: Any, made: Any, gateway: GatewaySnapshot = QUIET) -> Strain:
    return strain_of(pool, made.replicas, made.memory, gateway, 300.0)


def test_a_pool_at_work_is_not_crowded_and_one_that_is_overrun_is(look: Callable[..., Any]) -> None:
    pool, made, _ = look(2.0)
    assert _strain(pool, made).is_crowded is False
    pool, made, _ = look(40.0)
    assert _strain(pool, made).is_crowded is True


def test_what_a_pool_carries_is_what_its_engine_does_when_it_has_enough_to_do(
    look: Callable[..., Any],
) -> None:
    pool, made, engine = look(40.0)
    done = 60 * FILL * (engine.prompts + engine.tokens) / engine.now_s
    carried = _strain(pool, made).carried
    assert carried is not None and 0.75 * done < carried < 1.25 * done
    assert _strain(pool, made).batch_carried == 0.0


def test_interactive_requests_that_a_gateway_holds_are_crowded(look: Callable[..., Any]) -> None:
    pool, made, _ = look(2.0)
    for request_class in RequestClass:
        held = GatewaySnapshot((GatewayClassSample(request_class, 5.0, 1.0),), 1.0)
        is_crowded = request_class is RequestClass.INTERACTIVE
        assert _strain(pool, made, held).is_crowded is is_crowded


def test_what_is_not_known_is_neither_crowded_nor_free(look: Callable[..., Any]) -> None:
    pool, made, _ = look(2.0)
    assert _strain(pool, made, GatewaySnapshot(failure="silent")).is_crowded is None
    (report,) = made.replicas
    assert _strain(pool, replace(made, replicas=(replace(report, ready=False),))).is_crowded is None
    unseen = replace(report, name="chat-1")
    assert _strain(pool, replace(made, replicas=(report, unseen))).is_crowded is None
    assert _strain(pool, replace(made, memory=Memory.start())).is_crowded is None


def test_without_a_model_that_came_true_nobody_knows_what_is_carried(
    look: Callable[..., Any],
) -> None:
    pool, made, _ = look(2.0)
    assert _strain(pool, made).carried
    (name,) = made.memory.replicas
    known = made.memory.replicas[name]
    for model in (StepTimeModel(), replace(known.model, num_misfits_in_row=1)):
        memory = replace(made.memory, replicas={name: replace(known, model=model)})
        assert _strain(pool, replace(made, memory=memory)).carried is None
    batch = replace(made.replicas[0], name="chat-b", request_class=RequestClass.BATCH)
    with_batch = replace(made, replicas=(*made.replicas, batch))
    assert _strain(pool, with_batch).batch_carried is None
