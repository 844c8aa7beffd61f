"""Tenants on one machine: what the gateway is told, and the limits that reach a store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from chairlift_cli.errors import CliError
from chairlift_cli.tenants import (
    LocalQuotas,
    TenantFiles,
    check_tenants,
    gateway_fields_for_clusters,
    tenant_arguments,
    without_redis,
)
from chairlift_gateway.config import parse_config
from chairlift_operator.quotas.ledger import Counts
from chairlift_operator.quotas.store import StoreError
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import parse_pool, with_overrides
from chairlift_protocol.quota import Limits

EXAMPLE = Path(__file__).parents[2] / "examples" / "tenants" / "fleet.yaml"


def _pool(redis: Mapping[str, Any] | None = None, **gateway: Any) -> InferencePool:
    spec: dict[str, Any] = {"model": {"name": "m", "source": "cache://m"}, "gateway": gateway}
    if redis is not None:
        spec["quotas"] = {"redis": {"url": "redis://127.0.0.1:6379/0", **redis}}
    header = {"apiVersion": "chairlift.dev/v1alpha1", "kind": "InferencePool"}
    return parse_pool({**header, "metadata": {"name": "fleet"}, "spec": spec})


class Store:
    """Keeps what it is given; `fails` is what it says instead."""

    def __init__(self) -> None:
        self.limits: Mapping[str, str] = {}
        self.fails: str | None = None

    async def sync(
        self, pool: str, limits: Mapping[str, str], holders: Sequence[str], *, is_idle: bool,
        rates: Mapping[str, int],
    ) -> Mapping[str, Counts]:  # fmt: skip
        assert pool == "default/fleet" and not is_idle and not rates
        if self.fails is not None:
            raise StoreError(self.fails)
        self.limits = limits
        return {}

    async def forget(self, pool: str) -> None:
        raise AssertionError("a local pool is never forgotten")

    async def close(self) -> None:
        pass


def _replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)


def test_the_gateway_understands_what_it_is_told(tmp_path: Path) -> None:
    bounds = {"replicaConcurrency": 7, "batchMaxBodyBytes": 5000}
    pool = _pool({"user": "op", "passwordSecret": "p"}, anonymous="Serve", **bounds)
    assert not gateway_fields_for_clusters(pool.spec.gateway)
    assert gateway_fields_for_clusters(_pool(replicas=3).spec.gateway)
    files = TenantFiles(keys=tmp_path / "tenants.json", password=tmp_path / "password")
    (tmp_path / "token").write_text("token")
    config = parse_config(
        [
            f"--endpoints-file={tmp_path / 'replicas'}",
            f"--internal-token-file={tmp_path / 'token'}",
            *tenant_arguments(pool, files),
        ]
    )
    assert config.redis is not None and config.redis.password_path == tmp_path / "password"
    assert (config.quota_pool, config.serves_anonymous) == ("default/fleet", True)
    assert config.tenants_path == tmp_path / "tenants.json"
    assert (config.replica_concurrency, config.batch_max_body_bytes) == (7, 5000)


def test_a_pool_that_says_nothing_of_tenants_tells_its_gateway_nothing() -> None:
    assert tenant_arguments(_pool(), TenantFiles()) == []


def test_limits_of_a_file_are_kept_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path, store, said = tmp_path / "quotas.yaml", Store(), list[str]()
    _replace(path, EXAMPLE.read_text())
    pool = _pool({})
    quotas = LocalQuotas(pool, TenantFiles(quotas=path), store, said.append)

    async def main() -> None:
        assert quotas.weights() is None
        await quotas.round(store)
        first = dict(store.limits)
        assert Limits.from_json(first["acme/interactive"]) == Limits(60_000, 120, 8)
        assert quotas.weights() == {"acme": 2.0}
        assert Limits.from_json(first["*/batch"]) == Limits(concurrency=0)
        for broken in ("kind: TenantQuota\n", ""):
            said.clear()
            _replace(path, broken)
            for _ in range(2):
                await quotas.round(store)
            assert store.limits == first and len(said) == 1
            assert said[0].startswith("quotas stay as they were: ")
        _replace(path, EXAMPLE.read_text())
        await quotas.round(store)
        assert len(said) == 1  # they were in force all along
        _replace(path, EXAMPLE.read_text().replace("concurrency: 8", "concurrency: 9"))
        store.fails = "Redis cannot be reached."
        await quotas.round(store)
        assert said[1].startswith("Redis cannot be reached; until it is back, the gateway goes by")
        store.fails = None
        for _ in range(2):
            await quotas.round(store)
        assert said[2:] == ["quotas are in force again"]
        assert Limits.from_json(store.limits["acme/interactive"]).concurrency == 9
        store.fails = "Redis cannot be reached."
        await quotas.round(store)
        store.fails = None
        _replace(path, "")
        await quotas.round(store)
        assert said[4] == "quotas are in force again"
        assert said[5].startswith("quotas stay as they were: ")

    asyncio.run(main())


def test_a_file_read_while_it_is_written_takes_no_limit_from_anybody(tmp_path: Path) -> None:
    """Wherever a line ends it may be cut, between two quotas or within one."""
    path, store = tmp_path / "quotas.yaml", Store()
    lines = EXAMPLE.read_text().splitlines(keepends=True)
    path.write_text("".join(lines))
    quotas = LocalQuotas(_pool({}), TenantFiles(quotas=path), store, lambda _: None)
    fewer = "".join(lines).replace("concurrency: 8", "concurrency: 7")

    async def main() -> None:
        await quotas.round(store)
        first = dict(store.limits)
        for num_lines in range(len(lines)):
            path.write_text("".join(lines[:num_lines]))
            await quotas.round(store)
            assert store.limits == first and quotas.weights() == {"acme": 2.0}, num_lines
        path.write_text(fewer)
        await quotas.round(store)
        assert store.limits == first
        await quotas.round(store)
        assert Limits.from_json(store.limits["acme/interactive"]).concurrency == 7

    asyncio.run(main())


@pytest.mark.parametrize(
    ("mode", "holds"),
    [
        ("Local", "20000 tokens and 120 requests a minute and 8 requests at the same time"),
        ("Allow", "admits everybody and charges afterwards"),
        ("Deny", "refuses every request with 503"),
    ],
)
def test_a_pool_whose_redis_is_away_says_what_holds_and_what_to_do(mode: str, holds: str) -> None:
    pool = with_overrides(_pool({}), [f"quotas.onRedisFailure={mode}"])
    told = without_redis(pool)
    assert holds in told and f"(quotas.onRedisFailure: {mode})" in told
    assert told.endswith("start a Redis at redis://127.0.0.1:6379/0, or name another by --set "
                         "quotas.redis.url=URL")  # fmt: skip


@pytest.mark.parametrize(
    ("redis", "files", "sentence"),
    [
        (None, TenantFiles(quotas=EXAMPLE), "add spec.quotas.redis.url to it"),
        ({"passwordSecret": "p"}, TenantFiles(), "give --redis-password-file"),
        ({}, TenantFiles(password=Path("/none")), "--redis-password-file: cannot read /none"),
        ({}, TenantFiles(quotas=Path("/none")), "cannot read /none"),
        (None, TenantFiles(keys=Path("/none")), "--tenants-file: cannot read /none.*key create"),
        ({}, TenantFiles(keys=EXAMPLE), f"--tenants-file: {EXAMPLE}: must be JSON"),
        ({}, TenantFiles(quotas=Path("/dev/null")), "holds no TenantQuota of pool fleet"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(
    redis: Mapping[str, Any] | None, files: TenantFiles, sentence: str
) -> None:
    with pytest.raises(CliError, match=sentence):
        check_tenants(_pool(redis), files)


def test_two_quotas_for_one_tenant_are_refused(tmp_path: Path) -> None:
    twice = EXAMPLE.read_text().replace("tenant: '*'", "tenant: acme")
    _replace(tmp_path / "q.yaml", twice)
    with pytest.raises(CliError, match="has tenant acme of this pool: merge the two"):
        check_tenants(_pool({}), TenantFiles(quotas=tmp_path / "q.yaml"))


def test_a_file_without_a_quota_for_the_rest_is_warned_of(tmp_path: Path) -> None:
    assert check_tenants(_pool({}), TenantFiles(quotas=EXAMPLE)) == []
    _replace(tmp_path / "q.yaml", EXAMPLE.read_text().split("---\n")[0])
    (warning,) = check_tenants(_pool({}), TenantFiles(quotas=tmp_path / "q.yaml"))
    assert warning.startswith("pool fleet: known tenants that have no TenantQuota are not limited")
