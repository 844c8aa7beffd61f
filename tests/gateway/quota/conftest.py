"""A real redis-server on loopback that can be stopped, paused, filled and replicated.

Needs the binary `redis-server` (Debian's package of that name; `make test-redis` installs it).
Without it these tests are skipped, which pytest's summary says; with CHAIRLIFT_NEEDS_REDIS set they
fail instead.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from chairlift_e2e.redis_server import RedisServer, free_port
from chairlift_gateway.quota.connection import RedisAddress
from chairlift_gateway.quota.keeper import Keeper, OnRedisFailure
from chairlift_gateway.quota.upkeep import open_keeper
from chairlift_protocol.quota import Limits, QuotaKeys, holder_of
from chairlift_protocol.wire import RequestClass


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"shared_redis", "start_redis"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.redis)


def _binary() -> str:
    binary = shutil.which("redis-server")
    if binary is None:
        reason = "needs a Redis: make test-redis installs Debian's"
        if os.environ.get("CHAIRLIFT_NEEDS_REDIS"):
            pytest.fail(reason)
        pytest.skip(reason)
    return binary


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(_binary(), tmp_path_factory.mktemp("redis"), free_port())
    server.start()
    yield server
    server.stop()


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """A server of the test's own, with these options."""
    with ExitStack() as stack:

        def start(*options: str, password: str | None = None) -> RedisServer:
            secret = ("--requirepass", password) if password else ()
            server = RedisServer(_binary(), tmp_path, free_port(), (*secret, *options), password)
            stack.callback(server.stop)
            server.start()
            return server

        yield start


@pytest.fixture
def start_encrypted_redis(
    start_redis: Callable[..., RedisServer], tmp_path: Path
) -> Callable[[], tuple[RedisServer, str, Path]]:
    """With its encrypted address, and the certificate that it shows."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")

    def start() -> tuple[RedisServer, str, Path]:
        key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
             "-keyout", key, "-out", certificate, "-subj", "/CN=localhost",
             "-addext", "subjectAltName=DNS:localhost"],
            check=True, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        port = free_port()
        server = start_redis(
            "--tls-port", str(port), "--tls-cert-file", str(certificate),
            "--tls-key-file", str(key), "--tls-auth-clients", "no",
        )  # fmt: skip
        return server, f"rediss://localhost:{port}/0", certificate

    return start


class Pool:
    """A pool of the test's own in some Redis: what an operator writes, and what is there."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.name = f"test/{uuid.uuid4().hex[:8]}"
        self.keys = QuotaKeys(self.name)
        self.limit("*")

    def limit(self, tenant: str, **limits: Any) -> None:
        for request_class in RequestClass:
            holder = holder_of(tenant, request_class)
            self.client.hset(self.keys.limits, holder, Limits(**limits).to_json())
        self.client.hincrby(self.keys.limits, "#", 1)

    def used(self, tenant: str) -> int:
        return int(
            self.client.hget(self.keys.account(holder_of(tenant, RequestClass.INTERACTIVE)), "used")
            or 0
        )

    def num_leases(self, tenant: str) -> int:
        return int(self.client.zcard(self.keys.leases(holder_of(tenant, RequestClass.INTERACTIVE))))


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def pool_in(stack: AsyncExitStack) -> Callable[[RedisServer], Pool]:
    return lambda server: Pool(stack.enter_context(server.client()))


@pytest.fixture
def gateway_on(stack: AsyncExitStack) -> Callable[..., Awaitable[Keeper]]:
    """A gateway's quotas, kept up until the test ends."""

    async def opened(
        address: RedisAddress, pool: Pool, mode: OnRedisFailure = OnRedisFailure.LOCAL
    ) -> Keeper:
        return await stack.enter_async_context(open_keeper(address, pool.name, mode))

    return opened


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes longer than a request would wait: not what these tests are about."""
    for module in ("connection", "keeper", "upkeep", "wire"):
        monkeypatch.setattr(f"chairlift_gateway.quota.{module}.TIMEOUT_S", 5.0)


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    async def wait(condition: Callable[[], Any], within_s: float = 10.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.01)

    return wait


@pytest.fixture
async def metered(start_gateway: Any, shared_redis: Any, pool_in: Any) -> Any:
    """A gateway before these engines, and its pool. Requests are of the tenant acme."""

    async def start(*engines: Any, limits: Any = None, **settings: Any) -> tuple[Any, Any]:
        pool = pool_in(shared_redis)
        pool.limit("acme", **(limits or {}))
        gateway = await start_gateway(
            *engines, redis=RedisAddress(shared_redis.url), quota_pool=pool.name,
            trusted_tenant_header=b"x-tenant", **settings,
        )  # fmt: skip
        gateway.client.headers["x-tenant"] = "acme"
        return gateway, pool

    return start
