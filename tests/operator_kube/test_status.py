from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from chairlift_operator.decisions import Decision
from chairlift_operator.kube.rolling import RolloutState
from chairlift_operator.kube.status import StatusInput, differs, from_json, status_of, to_json
from chairlift_operator.memory import Memory
from chairlift_operator.plan import plan
from chairlift_operator.snapshot import Phase, ReplicaSnapshot, Snapshot
from chairlift_operator.spec import InferencePool
from chairlift_operator.status_model import NUM_DECISIONS, PoolStatus
from chairlift_protocol.wire import RequestClass

INTERACTIVE = RequestClass.INTERACTIVE


@pytest.fixture
def told(make_pool: Callable[..., InferencePool]) -> StatusInput:
    """Of a pool with one replica that cannot be read and one that starts."""
    pool = make_pool(interactive={"replicas": {"max": 2}})
    replicas = (
        ReplicaSnapshot("a", True, scrape_failure="GET /metrics failed", policy_failure="none"),
        ReplicaSnapshot("b", False, phase=Phase.STARTING, detail="loads the model, 35 s"),
    )
    made = plan(pool, Snapshot("team/chat", 1000.0, replicas), Memory.start(), 1000.0)
    return StatusInput(
        namespace="team",
        pool="chat",
        operator="system/chairlift",
        generation=3,
        now_s=1000.0,
        accepted=None,
        refused=(),
        made=made,
        replicas={INTERACTIVE: 2},
        gateways=(1, 2),
        rollout=RolloutState(),
    )


def _condition(status: PoolStatus, kind: str) -> Any:
    return {c.type: c for c in status.conditions}[kind]


def test_a_status_answers_at_a_glance(told: StatusInput) -> None:
    status = status_of(told, PoolStatus())
    assert status.interactive is not None and status.interactive.replicas == "1/2"
    assert status.batch is None and status.slo == "Unknown"
    assert status.progress == "b: loads the model, 35 s"
    assert status.gateway is not None and status.gateway.url == "http://chat-gateway.team"
    assert _condition(status, "MetricsAvailable").status == "False"
    assert {s.state for s in status.signals} == {"Unknown"}


def test_what_the_server_refuses_is_said_and_the_pool_stays_as_ready_as_it_is(
    told: StatusInput,
) -> None:
    status = status_of(replace(told, refused=("PATCH /x: image is empty",)), PoolStatus())
    assert _condition(status, "Reconciled").status == "False"
    assert "image is empty" in _condition(status, "Reconciled").message
    assert _condition(status, "Accepted").status == "True"
    fine = status_of(told, status)
    assert _condition(fine, "Reconciled").status == "True"


def test_a_status_reads_back_as_it_was_written(told: StatusInput) -> None:
    status = status_of(told, PoolStatus())
    assert from_json(to_json(status)) == status
    assert from_json(None) == PoolStatus()
    assert from_json({"conditions": "what?"}) == PoolStatus()


def test_a_condition_keeps_its_time_until_it_changes(told: StatusInput) -> None:
    first = status_of(told, PoolStatus())
    later = status_of(replace(told, now_s=2000.0), first)
    assert [c.last_transition_time for c in later.conditions] == [
        c.last_transition_time for c in first.conditions
    ]
    refused = status_of(replace(told, now_s=2000.0, accepted="spec.x: is wrong."), first)
    accepted = _condition(refused, "Accepted")
    assert (accepted.status, accepted.last_transition_time) == ("False", "1970-01-01T00:33:20Z")
    assert accepted.message == "spec.x: is wrong."


def test_the_last_ten_decisions_are_kept_with_their_inputs(told: StatusInput) -> None:
    assert told.made is not None
    made = [Decision(float(n), "a", "batchSize", n, n + 1, "because") for n in range(15)]
    status = PoolStatus()
    for decision in made:
        tick = replace(told.made, decisions=(decision,))
        status = status_of(replace(told, made=tick), status)
    assert [d.before for d in status.decisions] == [str(n) for n in range(5, 15)]
    assert len(status.decisions) == NUM_DECISIONS
    assert status.last_reason == "batch size 14→15: because"


def test_an_interruption_and_a_rollout_are_told(told: StatusInput) -> None:
    rollout = RolloutState(1, ("interactive: 1 of 1 run earlier start-up values",), "it stops")
    status = status_of(replace(told, rollout=rollout), PoolStatus())
    limited = _condition(status, "CapacityLimited")
    assert (limited.status, limited.reason) == ("True", "RolloutInterrupts")
    assert status.progress is not None and "earlier start-up values" in status.progress


def test_measurements_alone_are_no_change(told: StatusInput) -> None:
    status = status_of(told, PoolStatus())
    assert not differs(status, replace(status, signals=()))
    assert differs(status, replace(status, slo="Met"))


def test_a_new_leader_leaves_what_is_said_of_a_pool_until_it_has_looked(told: StatusInput) -> None:
    """Alerts on Ready would take its first status for an outage."""
    before = status_of(told, PoolStatus())
    first = replace(told, made=None, now_s=2000.0, operator="system/other", gateways=(2, 2))
    status = status_of(first, before)
    assert status.conditions and set(status.conditions) == set(before.conditions)
    assert (status.interactive, status.slo) == (before.interactive, before.slo)
    assert (status.operator, status.gateway.ready) == ("system/other", 2)
    refused = status_of(replace(first, accepted="spec.model: is gone."), before)
    assert {c.type for c in refused.conditions} == {"Accepted", "Reconciled"}


def test_ready_counts_what_shall_serve_and_says_what_it_waits_for(told: StatusInput) -> None:
    ready = _condition(status_of(told, PoolStatus()), "Ready")
    assert ready.status == "True"
    assert ready.message == "1 of 2 interactive replicas are ready; b: loads the model, 35 s."
    assert status_of(told, PoolStatus()).last_reason is not None
