"""A whole pool in virtual time: nothing is lost, everything repeats, and waits take their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift_engine.simulator_profile import Profile
from chairlift_operator.control_loop import TICK_S
from chairlift_operator.decisions import Action, SetPolicy, SetReplicas
from chairlift_operator.snapshot import Phase, Snapshot
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import parse_pool
from chairlift_protocol.policy import Generation
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.conditions import Backlog, Conditions, PoolResult
from chairlift_simulation.fleet import Hardware
from chairlift_simulation.gateway import HoldLimits
from chairlift_simulation.laws import ChairliftLaw, NoLaw, Ruled
from chairlift_simulation.pool_run import PoolRun
from chairlift_simulation.replica import VirtualRequest

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
HARDWARE = Hardware(Profile(), kv_tokens=65536)


def pool_of(least: int = 1, most: int = 3, batch: dict[str, Any] | None = None) -> InferencePool:
    spec: dict[str, Any] = {
        "model": {"name": "tiny", "source": "cache://tiny", "maxLength": 8192},
        "runtime": {"engine": "simulator"},
        "interactive": {
            "slo": {
                "timeToFirstToken": {"threshold": "1s"},
                "interTokenLatency": {"threshold": "50ms"},
            },
            "replicas": {"min": least, "max": most},
        },
    }
    if batch is not None:
        spec["batch"] = batch
    header = {"apiVersion": "chairlift.dev/v1alpha1", "kind": "InferencePool"}
    return parse_pool({**header, "metadata": {"name": "tiny"}, "spec": spec})


def steady(rate: float, duration_s: float) -> list[VirtualRequest]:
    return [VirtualRequest(i / rate, 400, 40) for i in range(int(rate * duration_s))]


@dataclass(frozen=True)
class Script:
    """Does what is written for a tick's time, once."""

    actions: Sequence[tuple[float, Action]]

    def start(self) -> None:
        return None

    def rule(self, snapshot: Snapshot, state: None) -> tuple[Ruled, None]:
        return Ruled(tuple(a for at_s, a in self.actions if at_s == snapshot.taken_at_s)), None


def facts(result: PoolResult) -> list[tuple[object, ...]]:
    return [
        (j.request, j.first_s, j.ended_s, j.num_tokens, j.num_late_gaps, j.error, j.replica)
        for j in result.journeys
    ]


def run(
    law: Any,
    requests: Sequence[VirtualRequest],
    until_s: float,
    pool: InferencePool | None = None,
    **conditions: Any,
) -> PoolResult:
    pool = pool or pool_of()
    return PoolRun(pool, law, Conditions(HARDWARE, **conditions)).run(requests, until_s)


def test_a_seed_gives_one_run_and_another_seed_another() -> None:
    pool = pool_of()
    first, again, other = (
        run(ChairliftLaw(pool), steady(20, 60), 60, pool, seed=seed) for seed in (1, 1, 2)
    )
    assert facts(first) == facts(again) and first.decisions == again.decisions
    assert facts(first) != facts(other)


@settings(max_examples=20, deadline=None)
@given(
    rate=st.floats(1, 40),
    least=st.integers(0, 2),
    warm_up_s=st.sampled_from([5.0, 40.0]),
    seed=st.integers(0, 99),
)
def test_every_request_ends_once_and_holds_nothing_afterwards(
    rate: float, least: int, warm_up_s: float, seed: int
) -> None:
    pool = pool_of(max(1, least), 3)
    requests = steady(rate, 40)
    made = PoolRun(
        pool, ChairliftLaw(pool), Conditions(HARDWARE, warm_up_s=warm_up_s, seed=seed,
                                             first_replicas=least)
    )  # fmt: skip
    result = made.run(requests, 40)
    assert [j.request for j in result.journeys] == requests
    for journey in result.journeys:
        if journey.error is None:
            assert journey.num_tokens == journey.request.output_tokens
            assert journey.first_s is not None and journey.ended_s is not None
            assert journey.request.due_s < journey.first_s <= journey.ended_s
    assert sum(result.seconds.arrivals) == len(requests)
    assert sum(result.seconds.tokens) >= sum(
        j.num_tokens for j in result.journeys if j.error is None
    )


def test_a_policy_is_in_force_after_its_delay_and_before_the_tick_that_shall_see_it() -> None:
    pool = pool_of()
    seen: list[tuple[float, int]] = []

    class Once(Script):
        def rule(self, snapshot: Snapshot, state: None) -> tuple[Ruled, None]:
            policy = snapshot.replicas[0].policy
            assert policy is not None
            seen.append((snapshot.taken_at_s, policy.effective.batch_size))
            if snapshot.taken_at_s > 0:
                return Ruled(), None
            wanted = replace(policy.desired, generation=Generation(1, 1), batch_size=3)
            return Ruled((SetPolicy("interactive-0", wanted, True),)), None

    run(Once(()), steady(5, 12), 12, pool)
    assert seen[:3] == [(0.0, 16), (TICK_S, 3), (2 * TICK_S, 3)]


def test_with_no_replica_requests_are_held_and_released_when_one_has_warmed_up() -> None:
    law = Script([(0.0, SetReplicas(INTERACTIVE, 1, (), "", 60.0))])
    result = run(law, steady(5, 4), 30, warm_up_s=20.0, first_replicas=0)
    assert all(j.error is None for j in result.journeys)
    assert all(j.first_s is not None and 20.0 < j.first_s < 25.0 for j in result.journeys)
    assert result.ticks[1].num_held == 20


def test_who_is_held_for_too_long_or_is_one_too_many_is_refused() -> None:
    result = run(
        NoLaw(), steady(5, 4), 60, first_replicas=0, hold=HoldLimits(hold_s=10.0, num_max=15)
    )
    refused = [j for j in result.journeys if j.error == "no replica became ready in time"]
    assert [j.ended_s for j in refused] == [pytest.approx(j.request.due_s + 10) for j in refused]
    assert len(refused) == 15 and len(result.journeys) == 20
    assert all(j.error is not None for j in result.journeys)


def test_a_draining_replica_gets_nothing_new_ends_what_it_has_and_is_paid_until_then() -> None:
    law = Script([(10.0, SetReplicas(INTERACTIVE, 1, ("interactive-1",), "", 600.0))])
    result = run(law, steady(10, 30), 30, pool_of(2, 2), policy_delay_s=0.0)
    assert all(j.error is None for j in result.journeys)
    late = {j.replica for j in result.journeys if j.request.due_s > 10.0}
    assert late == {"interactive-0"}
    gone_s = max(j.ended_s or 0 for j in result.journeys if j.replica == "interactive-1")
    assert gone_s > 10.0
    assert result.replica_s == pytest.approx(result.elapsed_s + gone_s, abs=0.2)


def test_what_does_not_end_in_the_time_to_drain_is_cut() -> None:
    law = Script([(5.0, SetReplicas(INTERACTIVE, 1, ("interactive-1",), "", 1.0))])
    long_ones = [VirtualRequest(0.1 * i, 100, 4000) for i in range(8)]
    result = run(law, long_ones, 10, pool_of(2, 2))
    cut = [j for j in result.journeys if j.error == "abort"]
    assert len(cut) == 4 and all(j.ended_s == pytest.approx(6.0, abs=0.1) for j in cut)


def test_batch_work_waits_for_a_replica_that_lends_and_its_clients_go_on() -> None:
    pool = pool_of(batch={"borrowing": {"maxShare": 50}})
    backlog = Backlog([VirtualRequest(0, 100, 20)], num_clients=4, until_s=30.0)
    made = PoolRun(pool, ChairliftLaw(pool), Conditions(HARDWARE))
    result = made.run(steady(2, 30), 30, backlog)
    batch = [j for j in result.journeys if j.request.request_class is BATCH]
    assert len(batch) > 40
    running = [r.num_batch for tick in result.ticks for r in tick.replicas]
    assert 0 < max(running) <= 4


def test_replicas_start_with_a_warm_up_and_are_seen_to() -> None:
    phases: list[list[Phase]] = []

    class Watched(Script):
        def rule(self, snapshot: Snapshot, state: None) -> tuple[Ruled, None]:
            phases.append([seen.phase for seen in snapshot.replicas])
            return super().rule(snapshot, state)

    run(Watched([(5.0, SetReplicas(INTERACTIVE, 2, (), "", 60.0))]), [], 20.0, warm_up_s=10.0)
    serving, starting = Phase.SERVING, Phase.STARTING
    one, two = [serving], [serving, serving]
    assert phases == [one, one, [serving, starting], two, two]
