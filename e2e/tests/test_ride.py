"""A pool's whole day under traffic: slow hardware, recovery, a rush, a lull. Nothing fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from chairlift_e2e.kube import Kube, Object, condition, eventually
from chairlift_e2e.load import LoadPod
from chairlift_e2e.pool import KIND, MODEL, Pool, component
from chairlift_e2e.release import Release
from chairlift_e2e.watch import DecisionLog, PodLedger, Watch

pytestmark = pytest.mark.timeout(900)

BUDGET = 3
# 9 run at 46 ms a step. Slowed by 2.5 it is more than a replica carries: all 16 slots fill, and a
# step of 16 decodes takes longer than the objective.
REQUESTS_PER_S = 3.0
LEVER_S = 90.0
WATCHED = timedelta(seconds=30)
SCALE_S = 120.0


@dataclass(slots=True)
class Ride:
    """The pool of all tests below, and everything that is seen of it."""

    pool: Pool
    load_image: str
    pods: PodLedger = field(default_factory=lambda: PodLedger(component))
    decisions: DecisionLog = field(default_factory=DecisionLog)
    loads: list[LoadPod] = field(default_factory=list)

    def load(self, name: str, requests_per_s: float, duration_s: float, **more: Any) -> LoadPod:
        url = self.pool.url + ("/batch" if more.pop("batch", False) else "")
        load = LoadPod(
            self.pool.kube, self.pool.namespace, name, self.load_image, url, MODEL,
            requests_per_s, duration_s, seed=len(self.loads), **more,
        )  # fmt: skip
        load.start()
        self.loads.append(load)
        return load

    def has_met_objectives(self) -> bool:
        found = condition(self.pool.found(), "WithinSLO")
        if found.get("status") != "True":
            return False
        since = datetime.fromisoformat(found["lastTransitionTime"])
        return datetime.now(UTC) - since > WATCHED

    def wait_decision(
        self, levers: str, is_it: Callable[[float, float], bool], since: int, timeout_s: float
    ) -> Object:
        """The first enforced change of one of the levers after `since` that goes the right way."""

        def made() -> Object | None:
            for decision in self.decisions.since(since):
                if decision["field"] in levers.split() and decision["enforced"]:
                    if is_it(float(decision["before"]), float(decision["after"])):
                        return decision
            return None

        def said() -> list[str]:
            return [d["sentence"] for d in self.decisions.since(since)]

        return eventually(f"{levers} moves", made, timeout_s, said)


def falls(before: float, after: float) -> bool:
    return after < before


def rises(before: float, after: float) -> bool:
    return after > before


@pytest.fixture(scope="module")
def ride(kube: Kube, release: Release, images: Callable[[str], str], tally: Any) -> Iterator[Ride]:
    namespace = "e2e-ride"
    kube.run("create", "namespace", namespace)
    pool = Pool(kube, namespace)
    ride = Ride(pool, images("chairlift-load"))
    pool.set_step_times(1.0)
    pool.apply({"capacity": {"replicas": BUDGET}, "batch": {
        "slo": {"maximumWait": "20s"}, "replicas": {"min": 0, "max": 1},
    }})  # fmt: skip
    with (
        Watch(kube, "pods", namespace, ride.pods.take),
        Watch(kube, KIND, namespace, ride.decisions.take),
    ):
        yield ride
    tally.num_pod_restarts += ride.pods.num_restarts
    kube.run("delete", "namespace", namespace, "--timeout=180s", timeout_s=200)


def test_a_pool_becomes_ready_and_says_how_it_is(ride: Ride) -> None:
    ride.pool.wait_ready()
    listed = ride.pool.kube.run("get", "ipool", f"--namespace={ride.pool.namespace}")
    assert "STEP TOKENS" in listed and "1/1" in listed


def test_slow_hardware_lowers_step_tokens_then_batch_size_and_says_why(ride: Ride) -> None:
    ride.load("steady", REQUESTS_PER_S, 300.0)
    # The first step tokens may well be right: no decision need be made while all is well. But only
    # an engine that was watched at work tells what of a step is decodes and what is prefill.
    eventually("the pool has met its objectives for a while", ride.has_met_objectives, LEVER_S)
    since = len(ride.decisions)
    ride.pool.set_step_times(2.5)
    lowered = ride.wait_decision("stepTokens", falls, since, LEVER_S)
    smaller = ride.wait_decision("batchSize", falls, since, LEVER_S)
    for decision in (lowered, smaller):
        assert decision["reason"] and decision["reason"] in decision["sentence"]
    order = ride.decisions.since(since)
    assert order.index(lowered) < order.index(smaller)


def test_recovered_hardware_raises_them_again(ride: Ride) -> None:
    since = len(ride.decisions)
    ride.pool.set_step_times(1.0)
    # Which one rises first depends on how far each had to come down.
    ride.wait_decision("stepTokens batchSize", rises, since, LEVER_S)


def test_a_rush_takes_the_whole_budget_and_batch_gives_back(ride: Ride) -> None:
    ride.load("backlog", 1.5, 60.0, max_tokens=200, batch=True)
    ride.pool.wait_replicas("batch", 1, SCALE_S)
    ride.pool.patch({"interactive": {"replicas": {"max": BUDGET}}})
    ride.load("rush", 4 * REQUESTS_PER_S, 90.0)
    ride.pool.wait_replicas("interactive", BUDGET, SCALE_S)
    assert ride.pool.of_class("batch")["desired"] == 0


def test_a_lull_drains_what_is_too_many(ride: Ride) -> None:
    ride.pool.wait_replicas("interactive", 1, 2 * SCALE_S)


def test_nothing_failed_nothing_restarted_and_the_budget_held(ride: Ride, tally: Any) -> None:
    results = [load.result(120.0) for load in ride.loads]
    tally.num_requests += sum(r.num_requests for r in results)
    tally.num_failed_requests += sum(r.num_failed for r in results)
    assert [r.errors for r in results] == [()] * len(results)
    assert ride.pods.num_restarts == 0
    assert ride.pods.most_engines <= BUDGET
