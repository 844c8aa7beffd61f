"""When a pool counts as being at rest, and what ends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from chairlift_operator.decisions import Decision, Health, ReplicaReport, SetReplicas
from chairlift_operator.exposition import GatewayClassSample
from chairlift_operator.kube.resting import is_at_rest, stirs
from chairlift_operator.memory import Memory
from chairlift_operator.plan import Plan, plan
from chairlift_operator.snapshot import GatewaySnapshot, Phase, ReplicaSnapshot, Snapshot
from chairlift_operator.spec import InferencePool
from chairlift_protocol.wire import RequestClass

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
IDLE = ReplicaReport("a", True, Health.IDLE, batch_share=0.5)


def said(num_received: float = 7, num_held: float = 0) -> GatewaySnapshot:
    classes = (
        GatewayClassSample(INTERACTIVE, num_received, num_held),
        GatewayClassSample(BATCH, 0, 0),
    )
    return GatewaySnapshot(classes, 1000.0)


def a_tick(
    pool: InferencePool, gateway: GatewaySnapshot, *reports: ReplicaReport
) -> tuple[Snapshot, Plan]:
    seen = tuple(ReplicaSnapshot(r.name, r.ready, r.request_class) for r in reports)
    snapshot = Snapshot("team/chat", 1000.0, seen, gateway)
    made = plan(pool, Snapshot("team/chat", 1000.0, ()), Memory.start(), 1000.0)
    return snapshot, replace(made, replicas=reports, actions=(), decisions=())


def test_an_idle_pool_as_its_spec_has_it_is_at_rest(make_pool: Any) -> None:
    pool = make_pool()
    assert is_at_rest(pool, *a_tick(pool, said(), IDLE))


@pytest.mark.parametrize(
    "report",
    [
        *(replace(IDLE, health=health) for health in Health if health is not Health.IDLE),
        replace(IDLE, ready=False),
        replace(IDLE, phase=Phase.STARTING),
        replace(IDLE, phase=Phase.DRAINING),
        replace(IDLE, num_unverified=1),
    ],
)
def test_one_replica_that_is_not_still_keeps_its_pool_awake(
    make_pool: Any, report: ReplicaReport
) -> None:
    pool = make_pool(interactive={"replicas": {"min": 2, "max": 2}})
    tick = a_tick(pool, said(), IDLE, replace(report, name="b"))
    assert not is_at_rest(pool, *tick)


@pytest.mark.parametrize(
    "gateway", [said(num_held=1), GatewaySnapshot(failure="refused"), GatewaySnapshot()]
)
def test_a_gateway_that_holds_requests_or_tells_nothing_keeps_it_awake(
    make_pool: Any, gateway: GatewaySnapshot
) -> None:
    pool = make_pool()
    assert not is_at_rest(pool, *a_tick(pool, gateway, IDLE))


def test_what_is_still_to_be_done_keeps_it_awake(make_pool: Any) -> None:
    pool = make_pool()
    snapshot, made = a_tick(pool, said(), IDLE)
    asked = SetReplicas(INTERACTIVE, 2, (), "", 60.0)
    decided = Decision(1000.0, "a", "batchShare", 0.5, 1.0, "")
    assert not is_at_rest(pool, snapshot, replace(made, actions=(asked,)))
    assert not is_at_rest(pool, snapshot, replace(made, decisions=(decided,)))


@pytest.mark.parametrize(
    ("sections", "rests"),
    [
        ({"autoscaling": {"mode": "Managed"}}, False),  # one will go when its window has passed
        ({"autoscaling": {"mode": "External"}}, True),  # somebody else decides
        ({"mode": "Recommend"}, True),  # nothing is done
    ],
)
def test_a_replica_to_be_rid_of_keeps_awake_whoever_scales(
    make_pool: Any, sections: dict[str, Any], rests: bool
) -> None:
    pool = make_pool(interactive={"replicas": {"min": 1, "max": 3}}, **sections)
    tick = a_tick(pool, said(), IDLE, replace(IDLE, name="b"))
    assert is_at_rest(pool, *tick) is rests


def test_batch_work_gets_its_whole_share_back_before_a_pool_rests(
    make_pool: Callable[..., InferencePool],
) -> None:
    pool = make_pool(batch={"borrowing": {"maxShare": 50}})
    assert is_at_rest(pool, *a_tick(pool, said(), IDLE))
    halved = replace(IDLE, batch_share=0.25)
    assert not is_at_rest(pool, *a_tick(pool, said(), halved))


@pytest.mark.parametrize(
    ("now", "does"),
    [
        (replace(said(), sampled_at_s=1005.0), False),
        (said(num_received=8), True),
        (said(num_received=0), True),  # it restarted
        (said(num_held=1), True),
        (GatewaySnapshot(failure="refused"), True),
        (GatewaySnapshot(said().classes[:1]), True),
    ],
)
def test_whatever_a_gateway_says_anew_ends_the_rest(now: GatewaySnapshot, does: bool) -> None:
    assert stirs(said(), now) is does
