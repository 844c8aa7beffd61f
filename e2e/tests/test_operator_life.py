"""The operator comes and goes; pools, namespaces and CRDs are none the worse for it."""

from __future__ import annotations

import time

import pytest

from chairlift_e2e.kube import Kube, Object, eventually
from chairlift_e2e.pool import KIND, Pool, component
from chairlift_e2e.release import Release
from chairlift_e2e.watch import PodLedger, Watch

pytestmark = pytest.mark.timeout(600)

LEASE = "chairlift-operator"
TAKEOVER_S = 20.0


def lease(kube: Kube, release: Release) -> Object:
    found = kube.get("lease", release.namespace, LEASE)
    assert found is not None
    return dict(found["spec"])


def some_pool(kube: Kube, namespace: str, max_replicas: int = 1) -> Pool:
    pool = Pool(kube, namespace)
    pool.set_step_times(1.0)
    pool.apply({"interactive": {"replicas": {"min": 1, "max": max_replicas}}})
    pool.wait_ready()
    return pool


def test_a_standby_finishes_what_a_killed_leader_began(
    kube: Kube, release: Release, namespace: str
) -> None:
    pool = some_pool(kube, namespace, max_replicas=3)
    before = lease(kube, release)
    ledger = PodLedger(component)
    with Watch(kube, "pods", namespace, ledger.take):
        pool.patch({"interactive": {"replicas": {"min": 3}}})
        eventually("the leader scales", lambda: ledger.num_engines_ever > 1, 60.0)
        killed_s = time.monotonic()
        kube.run("delete", "pod", before["holderIdentity"], f"--namespace={release.namespace}",
                 "--grace-period=0", "--force")  # fmt: skip

        def taken_over() -> Object | None:
            now = lease(kube, release)
            return now if now["holderIdentity"] not in ("", before["holderIdentity"]) else None

        after = eventually("another one leads", taken_over, TAKEOVER_S + 5.0)
        took_s = time.monotonic() - killed_s
        pool.wait_replicas("interactive", 3, 60.0)
    assert took_s <= TAKEOVER_S
    assert after["leaseTransitions"] == before["leaseTransitions"] + 1
    assert ledger.num_engines_ever == 3  # neither of the two started one twice


def test_a_namespace_with_a_pool_goes_when_it_is_told_to(
    kube: Kube, release: Release, namespace: str
) -> None:
    some_pool(kube, namespace)
    kube.run("delete", "namespace", namespace, "--timeout=90s", timeout_s=100)
    assert kube.get("namespace", namespace, namespace) is None


def test_an_operator_that_is_uninstalled_first_leaves_nothing_stuck(
    kube: Kube, release: Release, namespace: str
) -> None:
    """The pool goes on serving without an operator, can be deleted, and its children go with it."""
    pool = some_pool(kube, namespace)
    release.uninstall()
    try:
        assert pool.found() is not None  # CRD and pool outlive the release
        (engine,) = kube.list("pods", namespace, "chairlift.dev/role=engine")
        assert engine["status"]["phase"] == "Running"
        kube.run("delete", KIND, pool.name, f"--namespace={namespace}", "--timeout=60s")
        eventually("its pods are gone", lambda: not kube.list("pods", namespace), 90.0)
        kube.run("delete", "namespace", namespace, "--timeout=90s", timeout_s=100)
    finally:
        release.install()


def test_pools_survive_upgrade_uninstall_and_a_new_install(
    kube: Kube, release: Release, namespace: str
) -> None:
    pool = some_pool(kube, namespace)
    found = pool.found()
    assert found is not None
    release.install("resources.requests.memory=160Mi")
    release.uninstall()
    release.install()
    again = pool.found()
    assert again is not None and again["metadata"]["uid"] == found["metadata"]["uid"]
    pool.wait_ready()
