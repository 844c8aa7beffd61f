"""What the operator writes into a real Redis, and what gateways make of it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from chairlift_cli.tenants import TenantFiles, open_store
from chairlift_e2e.redis_server import RedisServer
from chairlift_gateway.quota.connection import RedisAddress
from chairlift_gateway.quota.keeper import Keeper, OnRedisFailure, QuotaExceeded, QuotaUnavailable
from chairlift_gateway.quota.upkeep import open_keeper
from chairlift_operator.quotas.ledger import Counts
from chairlift_operator.quotas.store import NEEDED_RIGHTS, RedisAccess, RedisStore, StoreError
from chairlift_operator.spec_parsing import parse_pool
from chairlift_protocol.quota import Limits, QuotaKeys
from chairlift_protocol.wire import RequestClass

pytestmark = pytest.mark.anyio
INTERACTIVE = RequestClass.INTERACTIVE
Start = Callable[..., RedisServer]


def _limits(**tenants: Limits) -> Mapping[str, str]:
    """Of interactive requests; nobody else is limited."""
    own = {f"{tenant}/interactive": limits.to_json() for tenant, limits in tenants.items()}
    return {"*/interactive": Limits().to_json(), "*/batch": Limits().to_json(), **own}


@pytest.fixture
def pool() -> str:
    return f"team/{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def store(shared_redis: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(RedisAccess(shared_redis.url))
    yield store
    await store.close()


async def _eventually(keeper: Keeper, is_admitted: bool) -> Any:
    """What one of the next requests is answered, which a slow machine may take for an outage."""
    async with asyncio.timeout(10.0):
        while True:
            try:
                grant = await keeper.reserve("acme", INTERACTIVE, uuid.uuid4().hex, 1)
            except QuotaUnavailable:
                await asyncio.sleep(0.02)
            except QuotaExceeded:
                if not is_admitted:
                    return None
            else:
                if is_admitted:
                    return grant
                keeper.settle(grant.lease, 0)


async def test_a_changed_limit_holds_for_the_next_request(
    shared_redis: RedisServer, store: RedisStore, pool: str, stack: AsyncExitStack
) -> None:
    await store.sync(pool, _limits(acme=Limits(concurrency=1)), (), is_idle=False, rates={})
    address = RedisAddress(shared_redis.url)
    keeper = await stack.enter_async_context(open_keeper(address, pool, OnRedisFailure.DENY))
    await _eventually(keeper, is_admitted=True)
    await _eventually(keeper, is_admitted=False)
    await store.sync(pool, _limits(acme=Limits(concurrency=2)), (), is_idle=False, rates={})
    await _eventually(keeper, is_admitted=True)
    await _eventually(keeper, is_admitted=False)
    await store.sync(pool, _limits(), (), is_idle=False, rates={})
    for _ in range(3):  # a quota that was deleted limits nobody
        await _eventually(keeper, is_admitted=True)


async def test_only_what_changed_moves_the_revision(
    shared_redis: RedisServer, store: RedisStore, pool: str
) -> None:
    keys = QuotaKeys(pool)
    with shared_redis.client() as client:
        await store.sync(pool, _limits(acme=Limits(5)), (), is_idle=False, rates={})
        first = int(client.hget(keys.limits, "#"))
        await store.sync(pool, _limits(acme=Limits(5)), (), is_idle=False, rates={})
        assert int(client.hget(keys.limits, "#")) == first
        await store.sync(pool, _limits(beta=Limits(7)), (), is_idle=False, rates={})
        assert int(client.hget(keys.limits, "#")) > first
        held = client.hgetall(keys.limits)
        assert held.pop("#") and held == _limits(beta=Limits(7))


async def test_another_leader_finds_what_is_there_and_mends_it(
    shared_redis: RedisServer, store: RedisStore, pool: str
) -> None:
    keys = QuotaKeys(pool)
    with shared_redis.client() as client:
        client.hset(keys.limits, mapping={"gone/batch": "{}", "*/batch": "broken", "#": "7"})
        client.hset(keys.limits, mapping={b"\xff": "{}", "*/interactive": b"\xfe"})
        await store.sync(pool, _limits(), (), is_idle=False, rates={})
        held = client.hgetall(keys.limits)
    assert int(held.pop("#")) > 7 and held == _limits()


async def test_a_redis_that_lost_its_data_has_it_again_by_the_next_round(
    shared_redis: RedisServer, store: RedisStore, pool: str
) -> None:
    keys = QuotaKeys(pool)
    with shared_redis.client() as client:
        await store.sync(pool, _limits(acme=Limits(5)), (), is_idle=False, rates={})
        before = int(client.hget(keys.limits, "#"))
        client.delete(keys.limits)
        await store.sync(pool, _limits(acme=Limits(5)), (), is_idle=False, rates={})
        held = client.hgetall(keys.limits)
    assert int(held.pop("#")) > before and held == _limits(acme=Limits(5))


async def test_idle_is_there_for_a_while_and_gone_at_once(
    shared_redis: RedisServer, store: RedisStore, pool: str
) -> None:
    keys = QuotaKeys(pool)
    with shared_redis.client() as client:
        await store.sync(pool, _limits(), (), is_idle=True, rates={})
        assert 0 < client.pttl(keys.idle) <= 15_000
        await store.sync(pool, _limits(), (), is_idle=False, rates={})
        assert not client.exists(keys.idle)


async def test_a_lowered_rate_holds_for_the_next_request_and_ends_by_itself(
    shared_redis: RedisServer, store: RedisStore, pool: str, stack: AsyncExitStack
) -> None:
    holder, limits = "acme/interactive", _limits(acme=Limits(6_000), beta=Limits(6_000))
    await store.sync(pool, limits, (), is_idle=False, rates={})
    address = RedisAddress(shared_redis.url)
    keeper = await stack.enter_async_context(open_keeper(address, pool, OnRedisFailure.DENY))
    assert (await _eventually(keeper, is_admitted=True)).limits == Limits(6_000)
    with shared_redis.client() as client:
        revision = client.hget(QuotaKeys(pool).limits, "#")
        told = await store.sync(pool, limits, (holder,), is_idle=False, rates={holder: 90})
        assert told[holder].num_running == 1  # what is read is not what was told
        granted = await _eventually(keeper, is_admitted=True)
        assert granted.limits == Limits(90, lowered_from=6_000)
        assert 0 < client.pttl(QuotaKeys(pool).rate(holder)) <= 15_000
        assert client.hget(QuotaKeys(pool).limits, "#") == revision
        assert not client.exists(QuotaKeys(pool).rate("beta/interactive"))
        client.delete(QuotaKeys(pool).rate(holder))  # as time does
    assert (await _eventually(keeper, is_admitted=True)).limits == Limits(6_000)


async def test_what_tenants_used_is_read_back(
    shared_redis: RedisServer, store: RedisStore, pool: str, stack: AsyncExitStack,
    until: Callable[..., Awaitable[None]],
) -> None:  # fmt: skip
    limits = _limits(acme=Limits(concurrency=1))
    holders = ("acme/interactive", "acme/batch")
    assert set(await store.sync(pool, limits, holders, is_idle=False, rates={})) == set(holders)
    address = RedisAddress(shared_redis.url)
    keeper = await stack.enter_async_context(open_keeper(address, pool, OnRedisFailure.DENY))
    grant = await _eventually(keeper, is_admitted=True)
    await _eventually(keeper, is_admitted=False)
    told = await store.sync(pool, limits, holders, is_idle=False, rates={})
    num_refused = told["acme/interactive"].num_refused
    assert told["acme/interactive"] == Counts(0, num_refused, 1, 1) and num_refused >= 1
    keeper.settle(grant.lease, 42)
    with shared_redis.client() as client:
        account = QuotaKeys(pool).account("acme/interactive")
        await until(lambda: client.hget(account, "used") == "42")
    told = await store.sync(pool, limits, holders, is_idle=False, rates={})
    assert told == {"acme/interactive": Counts(42, num_refused, 0), "acme/batch": Counts(0, 0, 0)}


async def test_what_requests_hold_is_not_known_where_an_earlier_gateway_did_not_count_it(
    shared_redis: RedisServer, store: RedisStore, pool: str
) -> None:
    keys = QuotaKeys(pool)
    with shared_redis.client() as client:
        client.hset(keys.account("acme/batch"), mapping={"used": 7, "refused": 1})
        client.zadd(keys.leases("acme/batch"), {"r1": 2e12})
    told = await store.sync(pool, _limits(), ("acme/batch", "b/batch"), is_idle=False, rates={})
    assert told == {"acme/batch": Counts(7, 1, 1, None), "b/batch": Counts(0, 0, 0, 0)}


async def test_a_pool_that_is_forgotten_leaves_no_limits(
    shared_redis: RedisServer, store: RedisStore, pool: str
) -> None:
    keys = QuotaKeys(pool)
    with shared_redis.client() as client:
        await store.sync(pool, _limits(), (), is_idle=True, rates={})
        await store.forget(pool)
        assert not client.exists(keys.limits, keys.idle)
        await store.sync(pool, _limits(), (), is_idle=False, rates={})
        assert client.exists(keys.limits)


async def test_a_redis_that_is_away_is_said_and_not_waited_for_again_and_again(
    start_redis: Start, pool: str
) -> None:
    server = start_redis()
    store = RedisStore(RedisAccess(server.url))
    try:
        await store.sync(pool, _limits(), (), is_idle=False, rates={})
        server.pause()
        for _ in range(3):
            async with asyncio.timeout(3.0):  # of 2 s, once
                with pytest.raises(StoreError, match="did not answer in time"):
                    await store.sync(pool, _limits(), (), is_idle=False, rates={})
        server.stop()
        async with asyncio.timeout(10.0):
            while True:
                with pytest.raises(StoreError) as caught:
                    await store.sync(pool, _limits(), (), is_idle=False, rates={})
                if "cannot be reached" in str(caught.value):
                    break
                await asyncio.sleep(0.05)
        server.start()
        async with asyncio.timeout(10.0):
            while True:
                try:
                    await store.sync(pool, _limits(), (), is_idle=False, rates={})
                    break
                except StoreError:
                    await asyncio.sleep(0.05)
        with server.client() as client:
            assert client.hgetall(QuotaKeys(pool).limits).keys() == {*_limits(), "#"}
    finally:
        await store.close()


async def test_a_wrong_password_names_what_its_user_gave(
    start_redis: Start, pool: str, tmp_path: Path
) -> None:
    server = start_redis(password="right")
    (tmp_path / "password").write_text("wrong")
    quotas = {"redis": {"url": server.url, "passwordSecret": "redis"}}
    spec = {"model": {"name": "m", "source": "cache://m"}, "quotas": quotas}
    here = parse_pool(
        {
            "apiVersion": "chairlift.dev/v1alpha1",
            "kind": "InferencePool",
            "metadata": {"name": "chat"},
            "spec": spec,
        }
    )
    local = open_store(here, TenantFiles(password=tmp_path / "password"))
    on_a_cluster = RedisStore(RedisAccess(server.url, password="wrong"))
    for store, source in ((local, "--redis-password-file"), (on_a_cluster, "passwordSecret")):
        assert store is not None
        with pytest.raises(StoreError, match=f"check quotas.redis.user and {source}$"):
            await store.sync(pool, _limits(), (), is_idle=False, rates={})
        await store.close()


async def test_an_acl_user_with_the_documented_rights_is_enough(
    start_redis: Start, pool: str
) -> None:
    server = start_redis()
    with server.client() as client:
        pattern = f"~chairlift:{{{pool}}}:*"
        client.execute_command("ACL", "SETUSER", "op", "on", ">secret", pattern, *NEEDED_RIGHTS)
    store = RedisStore(RedisAccess(server.url, "op", "secret"))
    stranger = RedisStore(RedisAccess(server.url, "op", "wrong"))
    try:
        rates = {"acme/batch": 1}
        await store.sync(pool, _limits(), ("acme/batch",), is_idle=True, rates=rates)
        await store.sync(pool, _limits(acme=Limits(1)), ("acme/batch",), is_idle=False, rates={})
        await store.sync(pool, _limits(), (), is_idle=False, rates={})
        await store.forget(pool)
        with pytest.raises(StoreError, match="give the user the rights in docs/protocol.md"):
            await store.sync("team/another", _limits(), (), is_idle=False, rates={})
        with pytest.raises(StoreError, match="check quotas.redis.user and passwordSecret"):
            await stranger.sync(pool, _limits(), (), is_idle=False, rates={})
    finally:
        await store.close()
        await stranger.close()


async def test_an_encrypted_redis_is_believed_by_its_certificate_alone(
    start_encrypted_redis: Any, pool: str
) -> None:
    server, url, certificate = start_encrypted_redis()
    trusting = RedisStore(RedisAccess(url, ca=certificate.read_text()))
    wary = RedisStore(RedisAccess(url))
    try:
        await trusting.sync(pool, _limits(), (), is_idle=False, rates={})
        with server.client() as client:
            assert client.exists(QuotaKeys(pool).limits)
        with pytest.raises(StoreError, match="certificate"):
            await wary.sync(pool, _limits(), (), is_idle=False, rates={})
    finally:
        await trusting.close()
        await wary.close()
