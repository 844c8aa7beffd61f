"""When quotas get a turn, and what a pool's controller and its status say of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from chairlift_e2e.fake_tenants import KEY, Team
from chairlift_operator.decisions import Condition, Truth
from chairlift_operator.kube.paths import QUOTA
from chairlift_operator.kube.quota_reporting import MOST_WRITES
from chairlift_operator.kube.quota_seen import PoolSeen
from chairlift_operator.kube.settings import Settings
from chairlift_operator.kube.tenancy import ROUND_S, Tenancy
from chairlift_operator.kube.watching import PoolKey
from chairlift_protocol.policy import TenantPolicy

QUOTA_PATH = QUOTA.path("team", "acme")
Turned = Any  # conftest's


class Office:
    """A tenancy that runs beside the test, over one team."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.term: int | None = 3
        self.is_known = True
        self.num_asked = 0  # whether they were listed
        self.told: list[PoolKey] = []
        assert team.body is not None
        self.pools = {KEY: team.body}
        self.tenancy = Tenancy(
            team.tools, self.pools, lambda: self.term, self._were_listed, self.told.append
        )

    def _were_listed(self) -> bool:
        self.num_asked += 1
        return self.is_known

    async def until(self, probe: Callable[[], Any], within_s: float = 2 * ROUND_S) -> None:
        async with asyncio.timeout(within_s):
            while not probe():
                await asyncio.sleep(0.01)

    def limits(self) -> dict[str, str]:
        return self.team.opened[-1].limits if self.team.opened else {}


Body = Callable[[Office], Awaitable[None]]


@pytest.fixture
def run_office(settings: Settings) -> Callable[[Body], None]:
    async def main(body: Body) -> None:
        office = Office(Team(settings))
        running = asyncio.create_task(office.tenancy.run())
        try:
            await body(office)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    return lambda body: asyncio.run(main(body))


def test_a_changed_quota_does_not_wait_for_the_next_round(run_office: Any) -> None:
    async def body(office: Office) -> None:
        await office.until(lambda: office.limits())
        office.team.set_quota("acme", "acme", interactive={"concurrency": 1})
        office.tenancy.wake(KEY)
        await office.until(lambda: "acme/interactive" in office.limits(), within_s=ROUND_S / 2)
        office.team.drop_quota("acme")
        office.tenancy.wake(KEY)
        await office.until(lambda: "acme/interactive" not in office.limits(), within_s=ROUND_S / 2)

    run_office(body)


def test_a_written_status_is_no_news_of_a_quota(run_office: Any) -> None:
    async def body(office: Office) -> None:
        office.team.set_quota("acme", "acme")
        await office.until(lambda: office.team.kube.objects[QUOTA_PATH]["status"])
        written = dict(office.team.kube.objects[QUOTA_PATH])
        office.team.quotas.put(written)
        office.tenancy.changed(KEY)
        assert not office.tenancy._changed
        office.team.set_quota("acme", "acme", interactive={"concurrency": 1})
        office.tenancy.changed(KEY)
        assert office.tenancy._changed == {KEY}

    run_office(body)


def test_what_a_turn_leaves_undone_does_not_wait_for_the_next_round(run_office: Any) -> None:
    async def body(office: Office) -> None:
        await office.until(lambda: office.limits())
        names = [f"t{number}" for number in range(3 * MOST_WRITES)]
        for name in names:
            office.team.set_quota(name, name)
        office.tenancy.wake(KEY)
        objects = office.team.kube.objects
        await office.until(
            lambda: all(objects[QUOTA.path("team", name)]["status"] for name in names),
            within_s=1.5 * ROUND_S,  # of three turns
        )

    run_office(body)


def test_limits_that_redis_lost_are_written_again_without_any_change(run_office: Any) -> None:
    async def body(office: Office) -> None:
        await office.until(lambda: office.limits())
        office.team.redis.limits = {}
        await office.until(lambda: office.limits())

    run_office(body)


def test_before_quotas_were_listed_none_is_not_known_from_some(run_office: Any) -> None:
    async def body(office: Office) -> None:
        office.is_known = False
        office.tenancy.wake(KEY)
        await office.until(lambda: office.num_asked > 1)
        assert office.team.opened == []
        office.is_known = True
        office.tenancy.wake(KEY)
        await office.until(lambda: office.limits())

    run_office(body)


def test_a_pool_is_told_once_that_its_condition_is_another(run_office: Any) -> None:
    async def body(office: Office) -> None:
        await office.until(lambda: office.told == [KEY])
        office.team.redis.fails = "Redis did not answer in time"
        await office.until(lambda: len(office.told) == 2)
        condition = office.tenancy.condition(KEY)
        assert condition is not None and condition.reason == "RedisUnreachable"
        assert office.tenancy.condition(("team", "other")) is None

    run_office(body)


def test_idle_capacity_that_comes_or_goes_is_told_to_redis_at_once(run_office: Any) -> None:
    async def body(office: Office) -> None:
        await office.until(lambda: office.limits())
        for is_idle in (True, False):
            office.tenancy.saw(KEY, PoolSeen(is_idle, 10, office.team.now_s))
            await office.until(
                lambda is_idle=is_idle: office.team.redis.is_idle is is_idle, within_s=ROUND_S / 2
            )

    run_office(body)


def test_a_turn_that_fails_is_not_the_last(
    run_office: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(office: Office) -> None:
        await office.until(lambda: office.limits())
        office.pools[KEY] = {"metadata": {}, "spec": {"quotas": {}}}
        office.tenancy.wake(KEY)
        await office.until(lambda: "this turn of its quotas failed" in caplog.text)
        assert office.team.body is not None
        office.pools[KEY] = office.team.body
        office.team.redis.limits = {}
        await office.until(lambda: office.limits())

    run_office(body)


class FakeTenancy:
    def __init__(self) -> None:
        self.seen: list[PoolSeen] = []
        self.told: Condition | None = Condition("QuotasEnforced", Truth.TRUE, "InRedis", "Well.")

    def condition(self, key: PoolKey) -> Condition | None:
        return self.told

    def weights(self, key: PoolKey) -> Mapping[str, float]:
        return {"acme": 2.0}

    def saw(self, key: PoolKey, seen: PoolSeen) -> None:
        self.seen.append(seen)


async def _rested(pool: Turned) -> FakeTenancy:
    tenancy = FakeTenancy()
    pool.tools = replace(pool.tools, tenancy=cast(Any, tenancy))
    pool.set_spec()
    await pool.until(lambda: pool.status.get("interactive", {}).get("policyGeneration"))
    await pool.turn(20)
    return tenancy


def test_a_pool_at_rest_has_idle_capacity_as_long_as_its_gateways_say_so(run: Any) -> None:
    async def body(pool: Turned) -> None:
        tenancy = await _rested(pool)
        assert not tenancy.seen[0].is_idle  # before its replica served
        assert tenancy.seen[-1] == PoolSeen(True, 16, pool.clock.now_s)
        num_seen = len(tenancy.seen)
        await pool.turn(3)
        assert [seen.is_idle for seen in tenancy.seen[num_seen:]] == [True] * 3

    run(body)


def test_the_status_says_how_quotas_fare_also_of_a_pool_at_rest(run: Any) -> None:
    async def body(pool: Turned) -> None:
        tenancy = await _rested(pool)
        assert pool.condition("QuotasEnforced")["status"] == "True"
        told = Condition("QuotasEnforced", Truth.FALSE, "RedisUnreachable", "Away.")
        tenancy.told = told
        await pool.controller.reconcile(pool.body)  # woken by `on_condition`
        assert pool.condition("QuotasEnforced")["reason"] == "RedisUnreachable"
        num_writes = len(pool.kube.writes)
        await pool.controller.reconcile(pool.body)
        assert len(pool.kube.writes) == num_writes
        tenancy.told = None  # a pool without quotas
        await pool.controller.reconcile(pool.body)
        assert pool.condition("QuotasEnforced") == {}

    run(body)


def test_weights_reach_the_engines(run: Any) -> None:
    async def body(pool: Turned) -> None:
        await _rested(pool)
        (engine,) = pool.kube.engines("chat-interactive").values()
        assert engine.policy.tenants == {"acme": TenantPolicy(2.0)}

    run(body)
