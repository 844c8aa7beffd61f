"""What people do to a pool's objects by hand: the real server decides what an operator sees."""

from __future__ import annotations

from typing import Any

import pytest

Pool = Any  # conftest's


def _three(pool: Pool) -> set[str]:
    """Replicas of a pool whose least is one; their names."""
    scaling = {"scaleDownWindow": "300s", "drainTimeout": "30s"}
    pool.apply(interactive={"replicas": {"min": 1, "max": 3}}, autoscaling=scaling)
    pool.wait_ready()
    pool.scale(3)
    pool.wait_ready(3)
    return {pod["metadata"]["name"] for pod in pool.pods()}


def test_a_label_taken_from_a_deployment_is_set_again_and_costs_no_replica(pool: Pool) -> None:
    before = _three(pool)
    where = f"--namespace={pool.namespace}"
    pool.kube.run("label", "deployment", "chat-interactive", "chairlift.dev/pool-", where)
    pool.until(
        "it has its label",
        lambda: "chairlift.dev/pool" in pool.deployment()["metadata"]["labels"],
    )
    pool.wait_ready(3)
    assert {pod["metadata"]["name"] for pod in pool.pods()} == before


def test_a_pod_that_is_put_aside_by_its_label_is_replaced_and_forgotten(pool: Pool) -> None:
    before = _three(pool)
    aside = min(before)
    where = f"--namespace={pool.namespace}"
    pool.kube.run("label", "pod", aside, "chairlift.dev/pool=debug", "--overwrite", where)
    pool.until("another is there", lambda: {p["metadata"]["name"] for p in pool.pods()} - before)
    pool.wait_ready(3)


@pytest.mark.parametrize(
    "template",
    [
        {"spec": {"nothing": 1}},
        {"spec": {"terminationGracePeriodSeconds": "soon"}},
        {"spec": {"containers": [{"name": "x", "env": [{"name": "A"}, {"name": "A"}]}]}},
        {"spec": {"containers": [{"name": "engine", "securityContext": {"privileged": True}}]}},
    ],
    ids=["unknown field", "wrong type", "twice", "not valid"],
)
def test_a_pod_template_that_the_server_does_not_take_is_said_and_its_fix_passes(
    pool: Pool, template: dict[str, Any]
) -> None:
    pool.apply(runtime={"engine": "simulator", "image": "fake:1", "podTemplate": template})
    pool.until("it says so", lambda: pool.condition("Reconciled").get("status") == "False")
    assert "chat-interactive" in pool.condition("Reconciled")["message"]
    pool.kube.run("patch", "ipool", "chat", f"--namespace={pool.namespace}", "--type=json",
                  '-p=[{"op": "remove", "path": "/spec/runtime/podTemplate"}]')  # fmt: skip
    pool.wait_ready()
    assert pool.condition("Reconciled")["status"] == "True"
