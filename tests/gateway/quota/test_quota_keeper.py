"""The gateway's side of quotas, on a real Redis that behaves."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from chairlift_gateway.quota import connection, upkeep, wire
from chairlift_gateway.quota import keeper as keeper_module
from chairlift_gateway.quota.connection import NEEDED_RIGHTS, RedisAddress, RedisUrlError
from chairlift_gateway.quota.keeper import OnRedisFailure, QuotaExceeded
from chairlift_gateway.quota.law import Status
from chairlift_gateway.quota.upkeep import open_keeper
from chairlift_protocol.quota import default_holder, holder_of
from chairlift_protocol.wire import RequestClass

CHAT = RequestClass.INTERACTIVE
pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis behaves here, and a busy machine is no outage."""
    for module in (keeper_module, connection, wire):
        monkeypatch.setattr(module, "TIMEOUT_S", 5.0)


async def test_a_request_is_charged_what_it_used(
    shared_redis: Any, pool_in: Any, gateway_on: Any, until: Any
) -> None:
    pool = pool_in(shared_redis)
    pool.limit("acme", tokens_per_minute=600, burst_ms=60_000)
    keeper = await gateway_on(RedisAddress(shared_redis.url), pool)
    grant = await keeper.reserve("acme", CHAT, "r1", 200)
    assert (grant.outcome.tokens_left, pool.num_leases("acme")) == (400, 1)
    assert grant.limits.tokens_per_minute == 600
    keeper.settle(grant.lease, 50)
    keeper.settle(grant.lease, 50)
    await until(lambda: pool.used("acme") == 50)
    assert pool.num_leases("acme") == 0
    with pytest.raises(QuotaExceeded) as refused:
        await keeper.reserve("acme", CHAT, "r2", 600)
    assert refused.value.outcome.status is Status.TOKENS
    assert 0 < refused.value.outcome.number <= 5_000


async def test_classes_of_a_tenant_have_accounts_of_their_own(
    shared_redis: Any, pool_in: Any, gateway_on: Any
) -> None:
    pool = pool_in(shared_redis)
    pool.limit("acme", concurrency=1)
    keeper = await gateway_on(RedisAddress(shared_redis.url), pool)
    await keeper.reserve("acme", CHAT, "r1", 1)
    await keeper.reserve("acme", RequestClass.BATCH, "r2", 1)
    with pytest.raises(QuotaExceeded):
        await keeper.reserve("acme", CHAT, "r3", 1)


async def test_changed_limits_hold_for_the_next_request(
    shared_redis: Any, pool_in: Any, gateway_on: Any, until: Any
) -> None:
    pool = pool_in(shared_redis)
    keeper = await gateway_on(RedisAddress(shared_redis.url), pool)
    await keeper.reserve("acme", CHAT, "r1", 1)
    pool.limit("acme", concurrency=1)
    with pytest.raises(QuotaExceeded):
        await keeper.reserve("acme", CHAT, "r2", 1)
    holder = holder_of("acme", CHAT)
    await until(lambda: holder in keeper.limits, within_s=5.0)
    pool.client.hdel(pool.keys.limits, holder)
    pool.client.hincrby(pool.keys.limits, "#", 1)
    await keeper.reserve("acme", CHAT, "r3", 1)
    await until(lambda: holder not in keeper.limits, within_s=5.0)


async def test_two_gateways_share_one_limit_and_hear_of_each_other(
    shared_redis: Any, pool_in: Any, gateway_on: Any, until: Any
) -> None:
    pool = pool_in(shared_redis)
    pool.limit("acme", concurrency=1)
    first = await gateway_on(RedisAddress(shared_redis.url), pool)
    async with AsyncExitStack() as inner:
        second = await inner.enter_async_context(
            open_keeper(RedisAddress(shared_redis.url), pool.name, OnRedisFailure.LOCAL)
        )
        await first.reserve("acme", CHAT, "r1", 1)
        with pytest.raises(QuotaExceeded):
            await second.reserve("acme", CHAT, "r2", 1)
        await until(lambda: first.num_gateways == second.num_gateways == 2)
    await until(lambda: first.num_gateways == 1)


async def test_many_requests_at_once_are_all_answered(
    shared_redis: Any, pool_in: Any, gateway_on: Any, until: Any
) -> None:
    pool = pool_in(shared_redis)
    pool.limit("acme", concurrency=300)
    keeper = await gateway_on(RedisAddress(shared_redis.url), pool)
    tries = (keeper.reserve("acme", CHAT, f"r{n}", 5) for n in range(320))
    outcomes = await asyncio.gather(*tries, return_exceptions=True)
    admitted = [each for each in outcomes if not isinstance(each, BaseException)]
    assert len(admitted) == 300
    for grant in admitted:
        keeper.settle(grant.lease, 3)
    await until(lambda: pool.used("acme") == 900)
    assert pool.num_leases("acme") == 0


async def test_a_running_request_keeps_its_lease_and_tells_what_it_used(
    shared_redis: Any, pool_in: Any, gateway_on: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "ROUND_S", 0.05)
    monkeypatch.setattr(upkeep, "LEASE_MS", 60_000)
    pool = pool_in(shared_redis)
    keeper = await gateway_on(RedisAddress(shared_redis.url), pool)
    grant = await keeper.reserve("acme", CHAT, "r1", 10)
    holder = holder_of("acme", CHAT)
    ends_ms = pool.client.zscore(pool.keys.leases(holder), "r1")
    grant.lease.num_used = 25
    grant.lease.renewed_at_s -= 6.0
    await until(lambda: pool.client.hget(pool.keys.account(holder), "r:r1") == "25")
    assert pool.client.zscore(pool.keys.leases(holder), "r1") > ends_ms
    await until(lambda: grant.lease.num_unanswered == 0)


async def test_what_a_killed_gateway_left_is_swept_by_another(
    shared_redis: Any, pool_in: Any, gateway_on: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "ROUND_S", 0.05)
    pool = pool_in(shared_redis)
    holder = holder_of("acme", CHAT)
    keeper = await gateway_on(RedisAddress(shared_redis.url), pool)
    call = keeper.store.submit(holder, default_holder(CHAT), "reserve", "killed", 70, 100)
    await call.future
    await until(lambda: pool.num_leases("acme") == 0)
    assert pool.used("acme") == 70


async def test_a_client_that_leaves_while_its_quota_is_asked_for_holds_nothing(
    shared_redis: Any, pool_in: Any, gateway_on: Any, until: Any
) -> None:
    pool = pool_in(shared_redis)
    keeper = await gateway_on(RedisAddress(shared_redis.url), pool)
    asking = asyncio.create_task(keeper.reserve("acme", CHAT, "r1", 10))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await keeper.reserve("acme", CHAT, "r2", 10)
    await until(lambda: pool.num_leases("acme") == 1)
    assert pool.used("acme") == 0


async def test_a_gateway_that_ends_settles_what_it_can(
    shared_redis: Any, pool_in: Any, gateway_on: Any
) -> None:
    pool = pool_in(shared_redis)
    async with AsyncExitStack() as inner:
        keeper = await inner.enter_async_context(
            open_keeper(RedisAddress(shared_redis.url), pool.name, OnRedisFailure.LOCAL)
        )
        grant = await keeper.reserve("acme", CHAT, "r1", 10)
        keeper.settle(grant.lease, 4)
    assert (pool.used("acme"), pool.num_leases("acme")) == (4, 0)
    assert pool.client.zcard(pool.keys.gateways) == 0


@pytest.mark.usefixtures("patient")
async def test_a_user_with_a_password_from_a_file_and_rights_on_one_pool_is_enough(
    start_redis: Any, pool_in: Any, gateway_on: Any, tmp_path: Path, until: Any
) -> None:
    server = start_redis(password="admin")
    pool = pool_in(server)
    rights = ("on", ">secret", f"~chairlift:{{{pool.name}}}:*", "-@all", *NEEDED_RIGHTS)
    pool.client.execute_command("ACL", "SETUSER", "gateway", *rights)
    password = tmp_path / "password"
    password.write_text("secret\n")
    address = RedisAddress(server.url, "gateway", password)
    keeper = await gateway_on(address, pool)
    await until(lambda: pool.client.zcard(pool.keys.gateways) == 1)
    keeper.settle((await keeper.reserve("acme", CHAT, "r1", 10)).lease, 4)
    await until(lambda: pool.used("acme") == 4)
    assert keeper.num_without_redis == 0


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("right", ["+get", "+hmget", "+zcard"])
async def test_a_right_that_a_user_lacks_is_found_out_before_a_request_does(
    start_redis: Any, pool_in: Any, gateway_on: Any, tmp_path: Path, right: str
) -> None:
    """Else each of them would open the breaker, and each probe close it."""
    server = start_redis(password="admin")
    pool = pool_in(server)
    rights = [each for each in NEEDED_RIGHTS if each != right]
    pool.client.execute_command(
        "ACL", "SETUSER", "gateway", "on", ">secret", "~*", "-@all", *rights
    )
    password = tmp_path / "password"
    password.write_text("secret\n")
    keeper = await gateway_on(RedisAddress(server.url, "gateway", password), pool)
    assert keeper.breaker.is_open


@pytest.mark.parametrize(
    "url",
    [
        "localhost", "http://redis:6379", "redis://", "redis://user:secret@redis:6379",
        "redis://redis:99999", "redis://redis:x", "redis://redis:0", "redis://[::1",
    ],
)  # fmt: skip
def test_an_address_that_cannot_be_used_says_why(url: str) -> None:
    with pytest.raises(RedisUrlError, match="must"):
        RedisAddress(url)


async def test_an_encrypted_connection_is_checked_against_the_authority_given(
    start_encrypted_redis: Any, pool_in: Any, gateway_on: Any, until: Any
) -> None:
    server, url, certificate = start_encrypted_redis()
    pool = pool_in(server)
    trusting = await gateway_on(RedisAddress(url, ca_path=certificate), pool)
    await until(lambda: pool.client.zcard(pool.keys.gateways) == 1)
    await trusting.reserve("acme", CHAT, "r1", 10)
    assert pool.num_leases("acme") == 1
    wary = await gateway_on(RedisAddress(url), pool)
    assert wary.breaker.is_open
