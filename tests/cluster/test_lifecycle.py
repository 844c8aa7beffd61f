"""A pool's life under the operator: made, tuned, scaled, replaced, set right, deleted."""

from __future__ import annotations

import json
from typing import Any

from chairlift_e2e.kube import Kube, eventually
from chairlift_e2e.pool import KIND

Pool = Any


def test_a_pool_gets_its_children_and_its_engines_a_policy(pool: Pool) -> None:
    pool.apply(batch={"replicas": {"max": 2}, "borrowing": {}})
    pool.wait_ready()
    kinds = "deployment,service,poddisruptionbudget,networkpolicy,secret,configmap"
    selector = f"chairlift.dev/pool={pool.name}"
    found = pool.kube.list(kinds, pool.namespace, selector)
    made = {f"{o['kind']}/{o['metadata']['name']}" for o in found}
    assert {"Deployment/chat-batch", "Service/chat-gateway", "Secret/chat-tokens"} <= made
    assert pool.deployment("batch")["spec"]["replicas"] == 0
    assert pool.condition("Accepted")["status"] == "True"
    engine = next(iter(pool.engines().values()))
    pool.until("a policy of this leadership", lambda: engine.policy.generation.term > 0)
    pool.until("it is told", lambda: pool.status()["interactive"].get("policyGeneration"))
    table = pool.kube.run("get", "ipool", pool.name, f"--namespace={pool.namespace}")
    assert "1/1" in table and pool.status()["lastReason"] in table


def test_an_objective_changes_without_a_restart(pool: Pool) -> None:
    pool.apply()
    pool.wait_ready()
    (name, engine), *_ = pool.engines().items()
    pool.patch(interactive={"slo": {"interTokenLatency": {"threshold": "90ms"}}})
    pool.until("the engine holds it", lambda: engine.policy.slo.itl_ms == 90)
    assert list(pool.engines()) == [name]
    assert pool.deployment()["metadata"]["generation"] <= 4  # made, scaled, opened; no more


def test_recommend_changes_no_policy_no_count_and_no_pod(pool: Pool) -> None:
    pool.apply(mode="Recommend")
    pool.wait_ready()
    (name, engine), *_ = pool.engines().items()
    pool.patch(interactive={"replicas": {"min": 2, "max": 2}, "batchSize": {"max": 64}})
    pool.until("it is advised", lambda: any(not d["enforced"] for d in pool.status()["decisions"]))
    assert len(engine.policies) == 1
    assert list(pool.engines()) == [name]
    assert pool.deployment()["spec"]["replicas"] == 1


def test_scaling_out_and_in_drains_the_idle_ones_first(pool: Pool) -> None:
    pool.apply(interactive={"replicas": {"min": 3, "max": 3}})
    pool.wait_ready(3)
    engines = pool.engines()
    busy, *idle = engines
    engines[busy].num_in_flight = 2
    pool.patch(interactive={"replicas": {"min": 1, "max": 1}})
    pool.wait_ready(1)
    assert list(pool.engines()) == [busy]
    assert not engines[busy].is_draining and all(engines[name].is_draining for name in idle)


def test_a_victim_goes_only_when_its_requests_have_ended(pool: Pool) -> None:
    pool.apply(interactive={"replicas": {"min": 2, "max": 2}})
    pool.wait_ready(2)
    engines = pool.engines()
    for engine in engines.values():
        engine.num_in_flight = 1
    pool.patch(interactive={"replicas": {"min": 1, "max": 1}})
    victim = pool.until("one drains", lambda: [n for n, e in engines.items() if e.is_draining])[0]
    labels = {p["metadata"]["name"]: p["metadata"]["labels"] for p in pool.pods()}
    assert labels[victim]["chairlift.dev/serving"] == "false"
    assert pool.deployment()["spec"]["replicas"] == 2
    engines[victim].num_in_flight = 0
    pool.wait_ready(1)
    assert list(pool.engines()) == [name for name in engines if name != victim]


def test_batch_goes_to_zero_and_back(pool: Pool) -> None:
    pool.apply(batch={"replicas": {"min": 1, "max": 1}})
    pool.wait_ready(1, "batch")
    pool.patch(batch={"replicas": {"min": 0, "max": 0}, "borrowing": {}})
    pool.until("no batch replica is left", lambda: not pool.pods("batch"))
    pool.until("nor its Deployment", lambda: not pool.deployment("batch"))
    pool.patch(batch={"replicas": {"min": 1, "max": 1}})
    pool.wait_ready(1, "batch")


def test_start_up_changes_replace_one_drained_replica_at_a_time(pool: Pool) -> None:
    pool.apply(interactive={"replicas": {"min": 2, "max": 2}}, capacity={"replicas": 2, "surge": 1})
    pool.wait_ready(2)
    before = pool.engines()
    for engine in before.values():
        engine.num_in_flight = 1
    pool.patch(interactive={"batchSize": {"max": 64}})
    first = pool.until("one drains", lambda: [n for n, e in before.items() if e.is_draining])
    assert len(first) == 1 and len(pool.engines()) == 2
    before[first[0]].num_in_flight = 0
    pool.until("its successor serves", lambda: set(pool.engines()) - set(before))
    second = [name for name in before if name not in first][0]
    pool.until("then the other drains", lambda: before[second].is_draining)
    before[second].num_in_flight = 0
    pool.until("all are new", lambda: not set(pool.engines()) & set(before))
    pool.wait_ready(2)
    args = pool.deployment()["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--batch-size=64" in args


def test_a_replica_that_is_alone_is_replaced_by_one_that_serves_already(pool: Pool) -> None:
    pool.apply(capacity={"replicas": 1, "surge": 1})
    pool.wait_ready()
    (old, engine), *_ = pool.engines().items()
    pool.patch(interactive={"batchSize": {"max": 64}})
    pool.until("two of them", lambda: len(pool.engines()) == 2)
    pool.until("the old one has gone", lambda: old not in pool.engines())
    pool.wait_ready()
    assert not engine.is_draining  # it ends by SIGTERM, which drains too


def test_without_a_place_for_a_second_it_is_said_before_it_stops(pool: Pool) -> None:
    pool.apply(capacity={"replicas": 1})
    pool.wait_ready()
    old = list(pool.engines())
    pool.patch(interactive={"batchSize": {"max": 64}})
    told = pool.until(
        "it is said",
        lambda: pool.condition("CapacityLimited").get("reason") == "RolloutInterrupts",
    )
    assert told
    pool.until("it is replaced", lambda: pool.engines() and not set(pool.engines()) & set(old))
    pool.wait_ready()


def test_a_bad_revision_keeps_the_rest_and_does_not_block_its_fix(pool: Pool) -> None:
    pool.apply(interactive={"replicas": {"min": 2, "max": 2}}, capacity={"replicas": 3})
    pool.wait_ready(2)
    before = set(pool.engines())
    pool.patch(runtime={"image": "does-not-start:1"})
    pool.until("it is told", lambda: "exit code 2" in pool.status().get("progress", ""))
    assert len(set(pool.engines()) & before) == 1
    pool.patch(runtime={"image": "fake:2"})
    pool.until("the fix is in place", lambda: len(set(pool.engines()) - before) == 2)
    pool.wait_ready(2)


def test_external_mode_never_writes_a_count(pool: Pool) -> None:
    pool.apply(interactive={"replicas": {"min": 1, "max": 2}})
    pool.wait_ready()
    pool.patch(autoscaling={"mode": "External"})
    pool.scale(3)
    pool.wait_ready(3)
    writers = [
        (m["manager"], m.get("time"))
        for m in _managed(pool)
        if "f:replicas" in m["fieldsV1"].get("f:spec", {})
    ]
    seen = pool.status()["observedGeneration"]
    pool.patch(interactive={"slo": {"interTokenLatency": {"threshold": "90ms"}}})
    pool.until("looked at again", lambda: pool.status()["observedGeneration"] > seen)
    pool.until("an excess is said", lambda: "external" in _limit(pool))
    assert pool.deployment()["spec"]["replicas"] == 3
    assert writers == [
        (m["manager"], m.get("time"))
        for m in _managed(pool)
        if "f:replicas" in m["fieldsV1"].get("f:spec", {})
    ]
    pool.patch(autoscaling={"mode": "Managed"}, interactive={"replicas": {"max": 3}})
    pool.until("it counts again", lambda: pool.status()["observedGeneration"] > seen + 1)
    assert pool.deployment()["spec"]["replicas"] == 3


def test_a_pool_handed_to_another_autoscaler_and_back_keeps_its_count(pool: Pool) -> None:
    pool.apply(interactive={"replicas": {"min": 2, "max": 3}})
    pool.wait_ready(2)
    for mode in ("External", "Managed", "External", "Managed"):
        seen = pool.status()["observedGeneration"]
        pool.patch(autoscaling={"mode": mode, "scaleDownWindow": "10m"},
                   interactive={"replicas": {"min": 1}})  # fmt: skip
        pool.until("looked at again", lambda seen=seen: pool.status()["observedGeneration"] > seen)
        assert pool.deployment()["spec"]["replicas"] == 2
    assert len(pool.engines()) == 2


def _limit(pool: Pool) -> str:
    return str(pool.condition("CapacityLimited").get("message", ""))


def _managed(pool: Pool) -> list[Any]:
    found = pool.kube.run("get", "deployment", "chat-interactive", "--output=json",
                          "--show-managed-fields", f"--namespace={pool.namespace}")  # fmt: skip
    return list(json.loads(found)["metadata"]["managedFields"])


def test_drift_is_set_right_and_said(pool: Pool) -> None:
    pool.apply()
    pool.wait_ready()
    pool.kube.run("delete", "service", "chat-interactive", f"--namespace={pool.namespace}")
    pool.until("the Service is back",
               lambda: pool.kube.get("service", pool.namespace, "chat-interactive"))  # fmt: skip
    change = {"spec": {"ports": [{"name": "http", "port": 81, "targetPort": 1}]}}
    pool.kube.patch("service", pool.namespace, "chat-gateway", change)

    def port() -> bool:
        found = pool.kube.get("service", pool.namespace, "chat-gateway") or {}
        return bool([p["port"] for p in found["spec"]["ports"]] == [80])

    pool.until("its port is set again", port)
    pool.until("it is said", lambda: pool.events("DriftRepaired"))


def test_a_count_set_by_hand_is_brought_inside_the_bounds(pool: Pool) -> None:
    pool.apply(interactive={"replicas": {"min": 1, "max": 2}})
    pool.wait_ready()
    pool.scale(4)
    pool.until("back inside", lambda: pool.deployment()["spec"]["replicas"] <= 2)


def test_a_replica_that_no_node_takes_is_withdrawn_and_said(pool: Pool) -> None:
    pool.apply(interactive={"replicas": {"min": 1, "max": 3}})
    pool.wait_ready()
    first = set(pool.engines())
    pool.node.refuses = lambda name: name.startswith("chat-") and name not in first
    try:
        pool.patch(interactive={"replicas": {"min": 2}})
        pool.until("it is said", lambda: "Insufficient" in _limit(pool))
        pool.patch(interactive={"replicas": {"min": 1}})
        pool.until("it is withdrawn", lambda: pool.deployment()["spec"]["replicas"] == 1)
        assert set(pool.engines()) == first
    finally:
        pool.node.refuses = lambda name: False


def test_what_the_schema_cannot_refuse_is_refused_in_the_status(pool: Pool) -> None:
    pool.apply(runtime={"engine": "simulator", "simulator": {"profile": "warp"}})
    pool.until("it is refused", lambda: pool.condition("Accepted").get("status") == "False")
    assert "'reference', 'fast' or 'slow'" in pool.condition("Accepted")["message"]
    assert not pool.deployment()


def test_an_object_that_is_not_the_pools_is_left_alone(pool: Pool) -> None:
    metadata = {"name": "chat-gateway", "namespace": pool.namespace}
    spec = {"ports": [{"port": 1234}]}
    pool.kube.apply({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
    pool.apply()
    pool.until("it is refused", lambda: pool.condition("Accepted").get("status") == "False")
    assert "Service" in pool.condition("Accepted")["message"]
    found = pool.kube.get("service", pool.namespace, "chat-gateway")
    assert found is not None and found["spec"]["ports"][0]["port"] == 1234
    pool.kube.run("delete", "service", "chat-gateway", f"--namespace={pool.namespace}")
    pool.wait_ready()


def test_a_deleted_pool_takes_everything_with_it(pool: Pool) -> None:
    pool.apply()
    pool.wait_ready()
    pool.kube.run("delete", KIND, pool.name, f"--namespace={pool.namespace}", "--timeout=20s")
    kinds = "deployment,service,secret,configmap,pods,role,serviceaccount"
    selector = f"chairlift.dev/pool={pool.name}"
    pool.until("all is gone", lambda: not pool.kube.list(kinds, pool.namespace, selector))


def test_a_namespace_goes_with_its_pools(pool: Pool, kube: Kube) -> None:
    pool.apply()
    pool.wait_ready()
    kube.run("delete", "namespace", pool.namespace, "--wait=false")
    eventually("the namespace is gone", lambda: not _exists(kube, pool.namespace), 60.0)
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": pool.namespace}})


def _exists(kube: Kube, namespace: str) -> bool:
    return bool(kube.run("get", "namespace", namespace, "--ignore-not-found", "--output=name"))
