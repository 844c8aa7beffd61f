"""The command line against a real API server: what it asks by kubectl, and what it is told."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from chairlift_e2e.kube import Kube

Pool = Any


def _explain(*words: str) -> tuple[int, str]:
    """By E2E_CONTEXT's kubeconfig, whose current context it is."""
    done = subprocess.run(
        [sys.executable, "-m", "chairlift_cli", "explain", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_pool_in_the_cluster_explains_its_decisions_with_what_was_measured(pool: Pool) -> None:
    pool.apply()
    pool.wait_ready()
    pool.until("a decision is told", lambda: pool.status().get("decisions"))
    code, told = _explain(pool.name, "-n", pool.namespace)
    assert code == 0, told
    assert "interactive: 1/1 replicas ready" in told
    assert "Accepted True: The spec is being followed." in told
    assert "cautious first policy" in told and "measured: " in told and "running 0" in told


def test_a_pool_that_is_not_there_is_said_with_where_to_look(kube: Kube, namespace: str) -> None:
    code, told = _explain("nobody", "-n", namespace)
    assert code == 1
    assert '"nobody" not found: name its namespace by -n' in told
