"""Redis in trouble, on a real one: what each mode does, and that no tenant becomes unlimited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from chairlift_gateway.quota import upkeep as upkeep_module
from chairlift_gateway.quota.connection import TIMEOUT_S, RedisAddress
from chairlift_gateway.quota.keeper import (
    Grant,
    Keeper,
    NobodyAdmitted,
    OnRedisFailure,
    QuotaExceeded,
    QuotaUnavailable,
)
from chairlift_gateway.quota.local_law import UNLEARNT
from chairlift_gateway.quota.upkeep import Upkeep, open_keeper
from chairlift_protocol.quota import QuotaKeys, default_holder
from chairlift_protocol.wire import RequestClass

CHAT = RequestClass.INTERACTIVE
pytestmark = pytest.mark.anyio

Fault = Callable[[Any, Any], None]


def stop(server: Any, pool: Any) -> None:
    server.stop()


def pause(server: Any, pool: Any) -> None:
    server.pause()


def fill_memory(server: Any, pool: Any) -> None:
    pool.client.config_set("maxmemory", 1)


def lose_everything(server: Any, pool: Any) -> None:
    pool.client.flushall()


def demote(server: Any, pool: Any) -> None:
    """A failover that this gateway's address has not followed yet: writes are refused."""
    pool.client.replicaof("127.0.0.1", "1")


FAULTS = pytest.mark.parametrize("fault", [stop, pause, fill_memory, lose_everything, demote])


async def admitted(
    keeper: Keeper, num: int, cost: int = 1, tenant: str = "acme",
    request_class: RequestClass = CHAT,
) -> list[Any]:  # fmt: skip
    grants = []
    for _ in range(num):
        try:
            name = f"r{time.monotonic_ns()}"
            grants.append(await keeper.reserve(tenant, request_class, name, cost))
        except QuotaExceeded:
            continue
    return grants


async def trouble(fault: Fault, server: Any, pool: Any, keeper: Keeper, until: Any) -> None:
    """Until the gateway knows: its requests are what tells it."""
    fault(server, pool)
    for _ in range(3):
        try:
            await keeper.reserve("canary", CHAT, f"c{time.monotonic_ns()}", 1)
        except (QuotaExceeded, QuotaUnavailable):
            pass
    await until(lambda: keeper.breaker.is_open)


@FAULTS
async def test_locally_a_tenant_gets_this_gateways_share_and_no_more(
    start_redis: Any, pool_in: Any, gateway_on: Any, until: Any, fault: Fault
) -> None:
    server = start_redis()
    pool = pool_in(server)
    pool.limit("acme", concurrency=8)
    pool.limit("metered", tokens_per_minute=600, burst_ms=60_000)
    keeper = await gateway_on(RedisAddress(server.url), pool)
    await gateway_on(RedisAddress(server.url), pool)
    await until(lambda: keeper.num_gateways == 2 and "acme/interactive" in keeper.limits)
    await admitted(keeper, 1)
    await trouble(fault, server, pool, keeper, until)
    assert len(await admitted(keeper, 20)) == 3  # half of eight, and one runs already
    assert len(await admitted(keeper, 20, cost=50, tenant="metered")) == 6
    assert len(await admitted(keeper, 300, tenant="nobody")) == 300  # the default has no limits


@FAULTS
async def test_denying_refuses_everybody(
    start_redis: Any, pool_in: Any, gateway_on: Any, until: Any, fault: Fault
) -> None:
    server = start_redis()
    pool = pool_in(server)
    keeper = await gateway_on(RedisAddress(server.url), pool, OnRedisFailure.DENY)
    await trouble(fault, server, pool, keeper, until)
    with pytest.raises(QuotaUnavailable):
        await keeper.reserve("acme", CHAT, "r", 1)


@pytest.mark.parametrize("mode", list(OnRedisFailure))
async def test_a_class_that_is_closed_is_closed_in_every_mode_and_leaves_no_lease(
    start_redis: Any, pool_in: Any, gateway_on: Any, until: Any, mode: OnRedisFailure
) -> None:
    server = start_redis()
    pool = pool_in(server)
    pool.limit("acme", concurrency=0)
    keeper = await gateway_on(RedisAddress(server.url), pool, mode)
    await until(lambda: "acme/interactive" in keeper.limits)
    with pytest.raises(NobodyAdmitted):
        await keeper.reserve("acme", CHAT, "r1", 1)
    assert int(pool.client.hget(pool.keys.account("acme/interactive"), "refused")) == 1
    await trouble(stop, server, pool, keeper, until)
    with pytest.raises(NobodyAdmitted):
        await keeper.reserve("acme", CHAT, "r2", 1)
    assert keeper.leases.of("acme/interactive") == []


@FAULTS
async def test_nobody_waits_once_the_trouble_is_known_nor_long_before(
    start_redis: Any, pool_in: Any, gateway_on: Any, until: Any, fault: Fault
) -> None:
    server = start_redis()
    pool = pool_in(server)
    keeper = await gateway_on(RedisAddress(server.url), pool)
    fault(server, pool)
    waits_s = []
    for number in range(20):
        began_s = time.monotonic()
        await keeper.reserve("acme", CHAT, f"r{number}", 1)
        waits_s.append(time.monotonic() - began_s)
    assert keeper.breaker.is_open
    assert sum(wait_s > TIMEOUT_S / 2 for wait_s in waits_s) <= 3
    assert sorted(waits_s)[-4] < TIMEOUT_S


@pytest.fixture
async def busy() -> AsyncIterator[None]:
    """An event loop each pass of which takes longer than a request waits for its quota."""
    loop, is_over = asyncio.get_running_loop(), False

    def work() -> None:
        time.sleep(1.5 * TIMEOUT_S)
        if not is_over:
            loop.call_soon(work)

    loop.call_soon(work)
    yield
    is_over = True


async def test_a_gateway_that_is_busy_does_not_take_redis_for_away(
    start_redis: Any, pool_in: Any, gateway_on: Any, busy: None
) -> None:
    server = start_redis()
    pool = pool_in(server)
    pool.limit("acme", concurrency=3)
    keeper = await gateway_on(RedisAddress(server.url), pool, OnRedisFailure.DENY)
    asked = [keeper.reserve("acme", CHAT, f"r{number}", 1) for number in range(5)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(answer) for answer in answers] == 3 * [Grant] + 2 * [QuotaExceeded]
    assert not keeper.breaker.is_open


async def test_a_gateway_that_is_busy_waits_for_a_connection_that_has_to_be_made_anew(
    start_redis: Any, pool_in: Any, gateway_on: Any, busy: None
) -> None:
    server = start_redis()
    keeper = await gateway_on(RedisAddress(server.url), pool_in(server), OnRedisFailure.DENY)
    keeper.store._wire.eof_received()
    assert type(await keeper.reserve("acme", CHAT, "r1", 1)) is Grant


async def test_a_gateway_that_is_busy_finds_out_that_redis_is_away(
    start_redis: Any, pool_in: Any, gateway_on: Any, busy: None
) -> None:
    server = start_redis()
    keeper = await gateway_on(RedisAddress(server.url), pool_in(server), OnRedisFailure.DENY)
    assert not keeper.breaker.is_open
    server.pause()
    for number in range(2):
        with pytest.raises(QuotaUnavailable):
            await keeper.reserve("acme", CHAT, f"r{number}", 1)
    assert keeper.breaker.is_open


@pytest.mark.parametrize("text", [b"\xff", b"{", b"[" * 60_000, b'{"concurrency": "3"}'])
async def test_a_field_that_cannot_be_read_costs_its_own_tenant_alone(
    start_redis: Any, pool_in: Any, gateway_on: Any, until: Any, patient: None, text: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    server = start_redis()
    pool = pool_in(server)
    pool.limit("known", concurrency=2)
    pool.limit("zeta", concurrency=3)
    keeper = await gateway_on(RedisAddress(server.url), pool)
    assert keeper.limits["known/interactive"].concurrency == 2
    for field in (b"acme/interactive", b"known/interactive", b"\xff/interactive"):
        pool.client.hset(pool.keys.limits, field, text)
    pool.client.zadd(pool.keys.leasing, {b"\xfe": 1})
    pool.limit("late", concurrency=1)
    await until(lambda: "late/interactive" in keeper.limits)  # and so it did not end
    for tenant, most in (("acme", UNLEARNT.concurrency), ("known", 2)):
        grants = await admitted(keeper, 20, tenant=tenant)
        assert len(grants) == most and all(grant.lease.is_local for grant in grants)
        assert not keeper.breaker.is_open
    others = [await admitted(keeper, 20, tenant=tenant) for tenant in ("zeta", "late")]
    assert [len(grants) for grants in others] == [3, 1]
    assert not any(grant.lease.is_local for grants in others for grant in grants)
    warned = [record for record in caplog.records if "cannot be read" in record.message]
    assert len(warned) == 2
    pool.limit("acme", concurrency=1)
    await until(lambda: not {"acme/interactive"} & keeper.unread)


@pytest.mark.parametrize("mode", list(OnRedisFailure))
@pytest.mark.parametrize("request_class", list(RequestClass))
async def test_limits_for_everybody_that_cannot_be_read_cost_those_alone_who_go_by_them(
    start_redis: Any, pool_in: Any, gateway_on: Any, patient: None,
    request_class: RequestClass, mode: OnRedisFailure,
) -> None:  # fmt: skip
    server = start_redis()
    pool = pool_in(server)
    pool.limit("zeta", concurrency=3)
    pool.client.hset(pool.keys.limits, default_holder(request_class), "{")
    keeper = await gateway_on(RedisAddress(server.url), pool, mode)
    assert not keeper.breaker.is_open
    strangers = await admitted(keeper, 20, request_class=request_class)
    assert len(strangers) == UNLEARNT.concurrency
    assert all(grant.lease.is_local for grant in strangers)
    assert not keeper.breaker.is_open
    others = await admitted(keeper, 20, tenant="zeta", request_class=request_class)
    assert len(others) == 3 and not any(grant.lease.is_local for grant in others)


async def test_a_probe_does_not_take_a_redis_without_limits_for_one_that_holds_them(
    start_redis: Any, pool_in: Any, gateway_on: Any, patient: None
) -> None:
    server = start_redis()
    pool = pool_in(server)
    pool.limit("acme", concurrency=1)
    pool.client.hdel(pool.keys.limits, default_holder(CHAT))
    keeper = await gateway_on(RedisAddress(server.url), pool)
    assert keeper.breaker.is_open


async def test_limits_are_read_past_what_is_no_text_in_fields_that_nobody_knows(
    start_redis: Any, pool_in: Any, gateway_on: Any, patient: None
) -> None:
    server = start_redis()
    pool = pool_in(server)
    pool.client.hset(pool.keys.limits, "acme/interactive", b'{"concurrency": 3, "note": "\xff"}')
    keeper = await gateway_on(RedisAddress(server.url), pool)
    grants = await admitted(keeper, 20)
    assert len(grants) == 3 and not any(grant.lease.is_local for grant in grants)
    assert not keeper.breaker.is_open


async def test_answers_that_mean_nothing_leave_a_gateway_going_by_its_own_accounts(
    start_redis: Any, pool_in: Any
) -> None:
    server = start_redis()
    pool = pool_in(server)
    pool.limit("acme", concurrency=1)
    script = "return {'nonsense', 'a', 'b', 'c', 'd', ARGV[2]}"
    address = RedisAddress(server.url)
    async with open_keeper(address, pool.name, OnRedisFailure.LOCAL, script) as keeper:
        assert keeper.breaker.is_open
        assert len(await admitted(keeper, 20)) == UNLEARNT.concurrency


async def test_rounds_go_on_after_one_that_failed_and_say_so_once(
    monkeypatch: pytest.MonkeyPatch, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upkeep_module, "ROUND_S", 0.0)
    keeper, num_asked = Keeper(OnRedisFailure.LOCAL), 0

    class Client:
        async def time(self) -> None:
            nonlocal num_asked
            num_asked += 1
            raise KeyError("what nobody thought of")

    keeper.breaker.close()
    upkeep = Upkeep(keeper, cast(Redis, Client()), QuotaKeys("team/chat"))
    rounds = asyncio.create_task(upkeep.run())
    await until(lambda: num_asked >= 3)
    rounds.cancel()
    assert not keeper.breaker.is_open
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "a round of quotas failed and is tried again"
    ]


async def test_what_was_admitted_while_redis_was_stopped_is_leased_and_charged_when_it_is_back(
    start_redis: Any, pool_in: Any, gateway_on: Any, until: Any
) -> None:
    """It comes back empty; the operator writes the limits again."""
    server = start_redis()
    pool = pool_in(server)
    pool.limit("acme", tokens_per_minute=6_000)
    keeper = await gateway_on(RedisAddress(server.url), pool)
    (before,) = await admitted(keeper, 1, cost=20)
    await trouble(stop, server, pool, keeper, until)
    (ended, running) = await admitted(keeper, 2, cost=10)
    keeper.settle(ended.lease, 30)
    server.start()
    pool.limit("*")
    pool.limit("acme", tokens_per_minute=6_000)
    await until(lambda: not keeper.breaker.is_open)
    await until(lambda: pool.num_leases("acme") == 2)
    await until(lambda: pool.used("acme") == 30)
    keeper.settle(before.lease, 5)
    keeper.settle(running.lease, 7)
    await until(lambda: pool.used("acme") == 42)
    assert pool.num_leases("acme") == 0


async def test_after_a_pause_nothing_is_charged_twice_and_no_lease_is_left(
    start_redis: Any, pool_in: Any, gateway_on: Any, until: Any
) -> None:
    """A paused server reads later what clients have long given up on."""
    server = start_redis()
    pool = pool_in(server)
    keeper = await gateway_on(RedisAddress(server.url), pool)
    running = await admitted(keeper, 5, cost=10)
    server.pause()
    asking = [keeper.reserve("acme", CHAT, f"p{n}", 10) for n in range(10)]
    running += await asyncio.gather(*asking)
    for grant in running:
        keeper.settle(grant.lease, 4)
    await until(lambda: keeper.breaker.is_open)
    server.resume()
    await until(lambda: pool.num_leases("acme") == 0 and pool.used("acme") == 15 * 4)
    await until(lambda: keeper.leases.num_owed == 0)
    assert pool.used("acme") == 15 * 4


@pytest.mark.usefixtures("patient")
async def test_a_flushed_script_is_loaded_again_and_nobody_notices(
    start_redis: Any, pool_in: Any, gateway_on: Any, until: Any
) -> None:
    server = start_redis()
    pool = pool_in(server)
    keeper = await gateway_on(RedisAddress(server.url), pool)
    for _ in range(3):
        pool.client.script_flush()
        (grant,) = await admitted(keeper, 1)
        keeper.settle(grant.lease, 2)
    await until(lambda: pool.used("acme") == 6)
    assert keeper.num_without_redis == 0


async def test_when_memory_is_free_again_settlements_arrive(
    start_redis: Any, pool_in: Any, gateway_on: Any, until: Any
) -> None:
    server = start_redis()
    pool = pool_in(server)
    keeper = await gateway_on(RedisAddress(server.url), pool)
    (grant,) = await admitted(keeper, 1)
    await trouble(fill_memory, server, pool, keeper, until)
    keeper.settle(grant.lease, 9)
    assert keeper.leases.num_owed >= 1
    pool.client.config_set("maxmemory", 0)
    await until(lambda: pool.used("acme") == 9)


async def test_a_wrong_password_is_trouble_until_the_file_holds_the_right_one(
    start_redis: Any, pool_in: Any, gateway_on: Any, until: Any, tmp_path: Path
) -> None:
    server = start_redis(password="right")
    pool = pool_in(server)
    password = tmp_path / "password"
    password.write_text("wrong")
    address = RedisAddress(server.url, password_path=password)
    keeper = await gateway_on(address, pool)
    assert keeper.breaker.is_open
    assert len(await admitted(keeper, 20)) == 8  # what a gateway that knows no limits admits
    password.unlink()
    await asyncio.sleep(0)
    password.write_text("right")
    await until(lambda: not keeper.breaker.is_open)


async def test_why_redis_cannot_be_used_is_said_once_for_each_reason(
    start_redis: Any, pool_in: Any, gateway_on: Any, until: Any, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    server = start_redis(password="right")
    pool = pool_in(server)
    pool.client.delete(pool.keys.limits)
    password = tmp_path / "password"
    password.write_text("wrong")
    keeper = await gateway_on(RedisAddress(server.url, password_path=password), pool)

    def said() -> list[str]:
        return [each for each in caplog.messages if each.startswith("quotas without Redis")]

    assert len(said()) == 1 and "invalid username-password pair" in said()[0]
    password.write_text("right")
    await until(lambda: len(said()) > 1)
    assert f"does not hold the limits of {pool.name}" in said()[-1]
    pool.limit("*")
    await until(lambda: not keeper.breaker.is_open)
    assert len(said()) == 2


async def test_a_failover_that_lost_writes_leaves_limits_in_force_and_running_requests_leased(
    start_redis: Any, pool_in: Any, gateway_on: Any, until: Any
) -> None:
    """The replica was cut off a while before the primary died. It takes over the address."""
    primary = start_redis()
    pool = pool_in(primary)
    pool.limit("acme", concurrency=3)
    replica = start_redis("--replicaof", "127.0.0.1", str(primary.port))
    promoted = replica.client()
    await until(lambda: promoted.hexists(pool.keys.limits, "acme/interactive"))
    promoted.replicaof("NO", "ONE")
    keeper = await gateway_on(RedisAddress(primary.url), pool)
    grants = await admitted(keeper, 5)
    assert len(grants) == 3
    primary.stop()
    await until(lambda: keeper.breaker.is_open)
    replica.stop()
    primary.start()
    pool.client.replicaof("NO", "ONE")
    for field, text in (("*", "{}"), ("acme", '{"concurrency": 3}')):
        pool.client.hset(pool.keys.limits, f"{field}/interactive", text)
    await until(lambda: pool.num_leases("acme") == 3)
    assert await admitted(keeper, 5) == []
    keeper.settle(grants[0].lease, 1)
    await until(lambda: pool.num_leases("acme") == 2)
    promoted.close()
