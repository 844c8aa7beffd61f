"""Tenants on a real cluster: a key that is let in, a limit that refuses, changes within seconds.

Redis runs beside the cluster, on the machine that is its one node; on another cluster, name one
that pods reach, without a password, in E2E_REDIS_URL.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chairlift_e2e.kube import Kube, Object, eventually, is_true
from chairlift_e2e.pool import MODEL, Pool
from chairlift_e2e.redis_server import RedisServer, free_port
from chairlift_e2e.release import Release

pytestmark = pytest.mark.timeout(300)

QUOTA = "tenantquotas.chairlift.dev"
KEY = "ck-0123456789abcdef0123456789"
PASSWORD = "as-long-as-a-password-should-be"
WITHIN_S = 5.0  # what a change may take
# What a client in the cluster is answered, asked from where Python is: a gateway's own container.
ASK = """
import json, sys, urllib.error, urllib.request
key, model = sys.argv[1:]
body = json.dumps({"model": model, "prompt": "Snow", "max_tokens": 4}).encode()
headers = {"content-type": "application/json"}
if key:
    headers["authorization"] = "Bearer " + key
url = "http://127.0.0.1:8080/v1/completions"
try:
    print(urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=20).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


def _node_address(kube: Kube) -> str:
    """Where pods reach this machine."""
    return kube.run(
        "get", "nodes",
        '--output=jsonpath={.items[0].status.addresses[?(@.type=="InternalIP")].address}',
    ).strip()  # fmt: skip


@pytest.fixture
def redis(kube: Kube, namespace: str, tmp_path: Path) -> Iterator[Object]:
    """As a pool names it."""
    if url := os.environ.get("E2E_REDIS_URL"):
        yield {"url": url}
        return
    binary = shutil.which("redis-server")
    if binary is None or kube.context != "one-node":
        pytest.skip("needs a Redis: tests/gateway/quota/install, or E2E_REDIS_URL")
    options = ("--bind", "0.0.0.0", "--requirepass", PASSWORD)
    server = RedisServer(binary, tmp_path, free_port(), options, PASSWORD)
    server.start()
    kube.apply(_secret(namespace, "redis-password", "Opaque", "password", PASSWORD))
    url = f"redis://{_node_address(kube)}:{server.port}/0"
    yield {"url": url, "passwordSecret": "redis-password"}
    server.stop()


def _secret(namespace: str, name: str, kind: str, key: str, value: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "type": kind,
        "stringData": {key: value},
    }


class Client:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def status(self, key: str) -> int:
        """Of one request through the first gateway."""
        pod = self.pool.kube.list(
            "pods", self.pool.namespace, "chairlift.dev/role=gateway,chairlift.dev/pool=chat"
        )[0]
        told = self.pool.kube.run(
            "exec", pod["metadata"]["name"], f"--namespace={self.pool.namespace}",
            "--container=gateway", "--", "python3", "-c", ASK, key, MODEL,
        )  # fmt: skip
        return int(told.strip())

    def until(self, key: str, status: int, timeout_s: float = 30.0) -> None:
        def answered() -> bool:
            return self.status(key) == status

        eventually(f"the key gets {status}", answered, timeout_s, self.pool.status)


def test_a_tenant_is_let_in_limited_and_shut_out_within_seconds(
    kube: Kube, release: Release, namespace: str, redis: Object
) -> None:
    pool = Pool(kube, namespace)
    pool.set_step_times(1.0)
    pool.apply({"quotas": {"redis": redis, "onRedisFailure": "Deny"}})
    pool.wait_ready()
    client = Client(pool)
    client.until("", 401)
    client.until(KEY, 401)

    kube.apply(_secret(namespace, "acme-keys", "chairlift.dev/api-keys", "key", KEY))
    spec: dict[str, Any] = {
        "poolRef": {"name": pool.name},
        "tenant": "acme",
        "keys": [{"secret": "acme-keys"}],
        "interactive": {"requestsPerMinute": 600},
    }
    quota = {
        "apiVersion": "chairlift.dev/v1alpha1",
        "kind": "TenantQuota",
        "metadata": {"name": "acme", "namespace": namespace},
        "spec": spec,
    }
    kube.apply(quota)
    client.until(KEY, 200)
    eventually(
        "the quota is Ready", lambda: is_true(kube.get(QUOTA, namespace, "acme"), "Ready"), 30.0
    )

    kube.patch(QUOTA, namespace, "acme", {"spec": {"interactive": {"requestsPerMinute": 1}}})
    client.until(KEY, 429, 2 * WITHIN_S)
    kube.patch(QUOTA, namespace, "acme", {"spec": {"interactive": {"requestsPerMinute": None}}})
    client.until(KEY, 200, 2 * WITHIN_S)
    kube.run("delete", QUOTA, "acme", f"--namespace={namespace}")
    client.until(KEY, 401, 2 * WITHIN_S)
