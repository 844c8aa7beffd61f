"""Tenants of a pool on a real API server and a real Redis: what becomes of their quotas."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chairlift_e2e.kube import KubectlError, Object, condition, is_true
from chairlift_e2e.redis_server import RedisServer, free_port
from chairlift_protocol.quota import Limits, QuotaKeys

Pool = Any  # conftest's
QUOTA = "tenantquotas.chairlift.dev"
KEY = "ck-0123456789abcdef0123456789"
WITHIN_S = 5.0  # what a change may take


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    binary = shutil.which("redis-server")
    if binary is None:
        reason = "needs a Redis: make test-redis installs Debian's"
        if os.environ.get("CHAIRLIFT_NEEDS_REDIS"):
            pytest.fail(reason)
        pytest.skip(reason)
    server = RedisServer(binary, tmp_path, free_port())
    server.start()
    yield server
    server.stop()


class Tenants:
    """Quotas of one pool, and what became of them."""

    def __init__(self, pool: Pool, server: RedisServer) -> None:
        self.pool, self.server = pool, server
        self.keys = QuotaKeys(f"{pool.namespace}/{pool.name}")
        pool.apply(quotas={"redis": {"url": server.url}})

    def apply(self, tenant: str, **spec: Any) -> None:
        self.pool.kube.apply(
            {
                "apiVersion": "chairlift.dev/v1alpha1",
                "kind": "TenantQuota",
                "metadata": {"name": tenant, "namespace": self.pool.namespace},
                "spec": {"poolRef": {"name": self.pool.name}, "tenant": tenant, **spec},
            }
        )

    def set_key(self, name: str, key: str) -> None:
        self.pool.kube.apply(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "namespace": self.pool.namespace},
                "type": "chairlift.dev/api-keys",
                "stringData": {"key": key},
            }
        )

    def delete(self, kind: str, name: str) -> None:
        self.pool.kube.run("delete", kind, name, f"--namespace={self.pool.namespace}")

    def limits(self, holder: str) -> Limits | None:
        with self.server.client() as client:
            text = client.hget(self.keys.limits, holder)
        return Limits.from_json(text) if text is not None else None

    def known(self) -> dict[str, str]:
        """Whose key each digest is, as gateways are told."""
        found = self.pool.kube.get("configmap", self.pool.namespace, f"{self.pool.name}-tenants")
        text = ((found or {}).get("data") or {}).get("tenants.json", '{"tenants": []}')
        listed = json.loads(text)["tenants"]
        return {key["sha256"]: each["tenant"] for each in listed for key in each["keys"]}

    def quota(self, name: str) -> Object:
        return self.pool.kube.get(QUOTA, self.pool.namespace, name) or {}

    def until(self, what: str, probe: Callable[[], Any], timeout_s: float = 30.0) -> None:
        self.pool.until(what, probe, timeout_s)


@pytest.fixture
def tenants(pool: Pool, redis_server: RedisServer) -> Tenants:
    return Tenants(pool, redis_server)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_a_quota_holds_within_seconds_of_each_change(tenants: Tenants) -> None:
    tenants.set_key("acme-keys", KEY)
    tenants.apply("acme", keys=[{"secret": "acme-keys"}], interactive={"tokensPerMinute": 600})
    tenants.until("its limits are in Redis", lambda: tenants.limits("acme/interactive"))
    tenants.until("its key is known", lambda: tenants.known() == {_digest(KEY): "acme"})
    tenants.until("it says so", lambda: is_true(tenants.quota("acme"), "Ready"))
    table = tenants.pool.kube.run("get", "tq", f"--namespace={tenants.pool.namespace}")
    assert "acme" in table and "True" in table
    tenants.apply("acme", keys=[{"secret": "acme-keys"}], interactive={"tokensPerMinute": 700})
    tenants.until(
        "the change holds", lambda: tenants.limits("acme/interactive") == Limits(700), WITHIN_S
    )
    fresh = {_digest(KEY[::-1]): "acme"}
    tenants.set_key("acme-keys", KEY[::-1])
    tenants.until("the new key is known", lambda: tenants.known() == fresh, 2 * WITHIN_S)
    tenants.delete(QUOTA, "acme")
    tenants.until("they are gone", lambda: tenants.limits("acme/interactive") is None, WITHIN_S)
    tenants.until("its key is gone", lambda: not tenants.known(), WITHIN_S)
    assert tenants.limits("*/interactive") == Limits()


def test_a_missing_secret_is_named_and_a_redis_that_is_away_is_said(tenants: Tenants) -> None:
    tenants.apply("acme", keys=[{"secret": "acme-keys"}])
    tenants.until(
        "the Secret is named",
        lambda: "acme-keys" in condition(tenants.quota("acme"), "KeysMissing").get("message", ""),
    )
    assert condition(tenants.quota("acme"), "KeysMissing")["status"] == "True"
    tenants.server.stop()
    tenants.until(
        "the pool says so",
        lambda: tenants.pool.condition("QuotasEnforced").get("status") == "False",
    )
    tenants.until(
        "the quota says so",
        lambda: condition(tenants.quota("acme"), "RedisReachable").get("status") == "False",
    )
    tenants.server.start()  # with nothing in it
    tenants.until("limits are there again", lambda: tenants.limits("*/batch"), 2 * WITHIN_S)
    tenants.until(
        "and the pool says so",
        lambda: tenants.pool.condition("QuotasEnforced").get("status") == "True",
    )


def test_a_gateway_may_watch_its_own_tenants_and_nobody_elses(tenants: Tenants) -> None:
    tenants.until("its account is there", lambda: tenants.pool.kube.get(
        "rolebinding", tenants.pool.namespace, "chat-gateway"))  # fmt: skip
    account = f"--as=system:serviceaccount:{tenants.pool.namespace}:chat-gateway"
    where = f"--namespace={tenants.pool.namespace}"

    def may(verb: str, what: str) -> bool:
        try:
            answer = tenants.pool.kube.run("auth", "can-i", verb, what, account, where)
        except KubectlError:  # that is how it says no
            return False
        return answer.strip() == "yes"

    assert may("watch", "configmaps/chat-tenants") and may("list", "configmaps/chat-tenants-15")
    assert not may("watch", "configmaps/chat-tenants-16")
    assert not may("watch", "configmaps/chat-policy")
    assert not may("get", "secrets/chat-tokens")


def test_a_pool_that_goes_takes_its_limits_along(tenants: Tenants) -> None:
    tenants.until("limits are in Redis", lambda: tenants.limits("*/interactive"))
    tenants.delete("inferencepools.chairlift.dev", tenants.pool.name)
    tenants.until("they are gone", lambda: tenants.limits("*/interactive") is None)
