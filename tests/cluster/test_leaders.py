"""Two operators: one writes; the other goes on where it ended; a second install keeps out."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from chairlift_e2e.fake_node import FakeNode
from chairlift_e2e.kube import Kube, Object, eventually
from chairlift_e2e.pool import KIND

Start = Any
SYSTEM = "chairlift-system"
TAKEOVER_S = 20.0


@pytest.fixture
def operator() -> None:
    """These tests start their own."""


def _lease(kube: Kube, namespace: str = SYSTEM) -> Object:
    return dict((kube.get("lease", namespace, "chairlift-operator") or {}).get("spec", {}))


def test_a_standby_finishes_what_a_killed_leader_began(
    kube: Kube, node: FakeNode, pool: Any, start_operator: Start
) -> None:
    with ExitStack() as operators:
        first = operators.enter_context(start_operator("first"))
        eventually("it leads", lambda: _lease(kube).get("holderIdentity") == "first", 30.0)
        operators.enter_context(start_operator("second"))
        pool.apply(interactive={"replicas": {"min": 1, "max": 3}})
        pool.wait_ready()
        (_, engine), *_ = pool.engines().items()
        pool.until("its policy is there", lambda: engine.policy.generation.term > 0)
        before = engine.policy.generation
        pool.patch(interactive={"replicas": {"min": 3}})
        pool.until("it scales", lambda: pool.deployment()["spec"]["replicas"] == 3)
        first.send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        eventually("the other leads", lambda: _lease(kube)["holderIdentity"] == "second", 30.0)
        assert time.monotonic() - killed_s <= TAKEOVER_S
        pool.wait_ready(3)
        pool.until("a newer term", lambda: engine.policy.generation.term == before.term + 1)
        assert engine.num_refused == 0
        assert len(pool.pods()) == 3


def test_a_leader_that_was_frozen_writes_nothing_once_another_leads(
    kube: Kube, node: FakeNode, pool: Any, start_operator: Start
) -> None:
    with start_operator("frozen") as frozen, ExitStack() as operators:
        eventually("it leads", lambda: _lease(kube).get("holderIdentity") == "frozen", 30.0)
        pool.apply()
        pool.wait_ready()
        (_, engine), *_ = pool.engines().items()
        pool.until("its policy is there", lambda: engine.policy.generation.term > 0)
        term = engine.policy.generation.term
        operators.enter_context(start_operator("awake"))
        frozen.send_signal(signal.SIGSTOP)
        try:
            eventually("it is followed", lambda: _lease(kube)["holderIdentity"] == "awake", 40.0)
            pool.patch(interactive={"slo": {"interTokenLatency": {"threshold": "90ms"}}})
            pool.until("the new leader acts", lambda: engine.policy.slo.itl_ms == 90)
        finally:
            frozen.send_signal(signal.SIGCONT)
        pool.patch(interactive={"slo": {"interTokenLatency": {"threshold": "80ms"}}})
        pool.until("it goes on acting", lambda: engine.policy.slo.itl_ms == 80)
        assert _lease(kube)["holderIdentity"] == "awake"
    terms = [policy.generation.term for policy in engine.policies]
    assert terms == sorted(terms) and terms[-1] == term + 1
    assert engine.num_refused == 0  # nothing was even tried


def test_a_leader_that_ends_in_order_is_followed_at_once(
    kube: Kube, node: FakeNode, start_operator: Start
) -> None:
    with start_operator("third") as third:
        eventually("it leads", lambda: _lease(kube).get("holderIdentity") == "third", 30.0)
        with start_operator("fourth"):
            third.send_signal(signal.SIGTERM)
            eventually("it is followed", lambda: _lease(kube)["holderIdentity"] == "fourth", 12.0)


def test_a_second_install_writes_nothing_to_a_pool_that_is_not_its_own(
    kube: Kube, node: FakeNode, pool: Any, start_operator: Start, logs: Path
) -> None:
    other = "chairlift-other"
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": other}})
    with start_operator("fifth"):
        pool.apply()
        pool.wait_ready()
    versions = _versions(pool)
    with start_operator("intruder", other):
        eventually("it leads there", lambda: _lease(kube, other).get("holderIdentity"), 30.0)
        pool.patch(interactive={"batchSize": {"max": 64}})
        renewed = _lease(kube, other)["renewTime"]
        eventually("it has ticked", lambda: _lease(kube, other)["renewTime"] > renewed, 30.0)
        said = f"looked after by the operator {SYSTEM}/chairlift, this one is {other}/chairlift"
        eventually("it is said", lambda: said in (logs / "intruder.log").read_text(), 30.0)
    assert _versions(pool) == versions


def test_uninstalling_the_operator_first_leaves_nothing_stuck(
    kube: Kube, node: FakeNode, pool: Any, start_operator: Start
) -> None:
    with start_operator("sixth"):
        pool.apply()
        pool.wait_ready()
    kube.run("delete", KIND, pool.name, f"--namespace={pool.namespace}", "--timeout=20s")
    selector = f"chairlift.dev/pool={pool.name}"
    pool.until("its pods go", lambda: not kube.list("pods", pool.namespace, selector))


def _versions(pool: Any) -> dict[str, str]:
    kinds = "deployment,service,secret,configmap,role,networkpolicy"
    found = pool.kube.list(kinds, pool.namespace, f"chairlift.dev/pool={pool.name}")
    own = pool.kube.get(KIND, pool.namespace, pool.name)["status"]
    return {
        f"{o['kind']}/{o['metadata']['name']}": str(o["metadata"].get("generation"))
        + str(o.get("data"))
        for o in found
    } | {"status": str(own)}
