"""One pool's quotas: what reaches Redis, gateways and status, with a cluster in a dictionary."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from chairlift_e2e.fake_tenants import MAP, REDIS, Team, tenants_of
from chairlift_operator.kube.api import ApiError
from chairlift_operator.kube.quota_seen import PoolSeen
from chairlift_operator.kube.settings import Settings
from chairlift_operator.quotas.ledger import Counts
from chairlift_operator.quotas.rates import Strain
from chairlift_operator.quotas.store import RedisAccess
from chairlift_protocol.quota import Limits

Json = dict[str, Any]
API_KEY = "ck-0123456789abcdef0123456789"
Body = Callable[[Team], Any]


@pytest.fixture
def run(settings: Settings) -> Callable[[Body], None]:
    async def main(body: Body) -> None:
        await body(Team(settings))

    return lambda body: asyncio.run(main(body))


def test_limits_and_keys_come_into_force_and_the_status_says_so(run: Any) -> None:
    async def body(team: Team) -> None:
        team.set_secret("acme-keys", one=API_KEY)
        team.set_quota(
            "acme", "acme", keys=[{"secret": "acme-keys"}], interactive={"tokensPerMinute": 600}
        )
        await team.turn()
        assert Limits.from_json(team.redis.limits["acme/interactive"]) == Limits(600)
        assert tenants_of(team.kube) == {"acme"}
        assert team.status("acme")["ready"] == "True"
        assert team.condition("acme", "KeysMissing")[0] == "False"
        assert team.turns.condition is not None
        assert team.turns.condition.status.value == "True"

    run(body)


def test_a_tenant_is_never_known_without_its_limits(run: Any) -> None:
    """Neither when it comes nor when it goes."""

    async def body(team: Team) -> None:
        team.set_secret("acme-keys", one=API_KEY)
        team.set_quota("acme", "acme", keys=[{"secret": "acme-keys"}], interactive={})
        await team.turn()
        team.drop_quota("acme")
        await team.turn()
        come, go = team.redis.log
        assert come == ({"*/interactive", "*/batch", "acme/interactive"}, set())
        assert go == ({"*/interactive", "*/batch"}, set())
        assert tenants_of(team.kube) == set()

    run(body)


def test_while_redis_is_away_keys_are_taken_but_none_are_given(run: Any) -> None:
    async def body(team: Team) -> None:
        team.set_secret("acme-keys", one=API_KEY)
        team.set_secret("beta-keys", one=API_KEY[::-1])
        team.set_quota("acme", "acme", keys=[{"secret": "acme-keys"}])
        await team.turn()
        team.redis.fails = "Redis did not answer in time"
        team.set_quota("beta", "beta", keys=[{"secret": "beta-keys"}])
        await team.turn()
        assert tenants_of(team.kube) == {"acme"}
        for name in ("acme", "beta"):
            assert team.condition(name, "RedisReachable")[:2] == ("False", "RedisUnreachable")
            assert team.condition(name, "Ready")[0] == "False"
        told = team.turns.condition
        assert told is not None and told.status.value == "False"
        assert "did not answer" in told.message and "share of the limits" in told.message
        team.drop_quota("acme")
        await team.turn()
        assert tenants_of(team.kube) == set()
        team.redis.fails = None
        await team.turn()
        assert tenants_of(team.kube) == {"beta"} and team.status("beta")["ready"] == "True"

    run(body)


def test_a_secret_is_read_again_each_round_and_a_lost_one_takes_its_keys(run: Any) -> None:
    async def body(team: Team) -> None:
        team.set_quota("acme", "acme", keys=[{"secret": "acme-keys"}])
        await team.turn()
        status, reason, message = team.condition("acme", "KeysMissing")
        assert (status, reason) == ("True", "SecretNotFound") and "acme-keys" in message
        team.set_secret("acme-keys", one=API_KEY)
        await team.turn()
        assert tenants_of(team.kube) == {"acme"}
        team.drop_secret("acme-keys")
        await team.turn()
        assert tenants_of(team.kube) == set()

    run(body)


def test_an_api_server_that_is_away_takes_no_key_from_anybody(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(team: Team) -> None:
        team.set_secret("acme-keys", one=API_KEY)
        team.set_quota("acme", "acme", keys=[{"secret": "acme-keys"}], interactive={})
        await team.turn()

        async def away(path: str) -> Json | None:
            raise ApiError(0, "the API server did not answer in time")

        monkeypatch.setattr(team.kube, "find", away)
        await team.turn()
        assert tenants_of(team.kube) == {"acme"}
        team.lead_anew()
        await team.turn()
        assert tenants_of(team.kube) == {"acme"}
        assert "acme/interactive" in team.redis.limits
        assert team.condition("acme", "KeysMissing")[0] == "Unknown"

    run(body)


@pytest.mark.parametrize("status", [403, 500])
def test_a_secret_that_a_new_leader_may_not_read_takes_no_key_and_one_that_is_gone_does(
    run: Any, status: int
) -> None:
    async def body(team: Team) -> None:
        for tenant in ("acme", "beta"):
            team.set_secret(f"{tenant}-keys", one=f"{API_KEY}-{tenant}")
            team.set_quota(tenant, tenant, keys=[{"secret": f"{tenant}-keys"}])
        await team.turn()
        assert tenants_of(team.kube) == {"acme", "beta"}
        team.kube.hides["/api/v1/namespaces/team/secrets/acme-keys"] = status
        team.drop_secret("beta-keys")
        team.set_secret("gamma-keys", one=f"{API_KEY}-gamma")
        team.set_quota("gamma", "gamma", keys=[{"secret": "gamma-keys"}])
        team.lead_anew()
        await team.turn(2)
        assert tenants_of(team.kube) == {"acme", "gamma"}
        assert team.condition("acme", "KeysMissing")[:2] == ("True", "NotReadable")
        assert team.condition("beta", "KeysMissing")[:2] == ("True", "SecretNotFound")
        team.kube.hides.clear()
        team.drop_secret("acme-keys")
        await team.turn()
        assert tenants_of(team.kube) == {"gamma"}

    run(body)


def test_a_configmap_that_somebody_changed_is_set_again(run: Any) -> None:
    async def body(team: Team) -> None:
        team.set_secret("acme-keys", one=API_KEY)
        team.set_quota("acme", "acme", keys=[{"secret": "acme-keys"}])
        await team.turn()
        await team.kube.patch(MAP, {"data": {"tenants.json": "broken"}}, "kubectl")
        await team.turn()
        assert tenants_of(team.kube) == {"acme"}

    run(body)


def test_a_quota_that_comes_during_a_turn_is_taken_by_the_next(run: Any) -> None:
    async def body(team: Team) -> None:
        team.set_quota("acme", "acme", interactive={})
        await team.turn()
        team.redis.on_sync = lambda: team.set_quota("beta", "beta", interactive={})
        await team.turn()
        assert "beta/interactive" not in team.redis.limits and team.turns.has_news
        team.redis.on_sync = lambda: None
        await team.turn()
        assert team.status("beta")["ready"] == "True" and not team.turns.has_news

    run(body)


def test_a_foreign_configmap_is_left_alone_and_said_and_limits_hold(run: Any) -> None:
    async def body(team: Team) -> None:
        metadata = {"name": "chat-tenants", "namespace": "team"}
        team.kube.objects[MAP] = {"kind": "ConfigMap", "metadata": metadata, "data": {"a": "b"}}
        team.set_quota("acme", "acme", interactive={"concurrency": 1})
        await team.turn()
        assert team.kube.objects[MAP]["data"] == {"a": "b"}
        assert "acme/interactive" in team.redis.limits
        status, reason, message = team.condition("acme", "Ready")
        assert (status, reason) == ("False", "KeysNotWritten") and "rename the pool" in message

    run(body)


def test_a_pool_of_another_operator_is_left_alone(run: Any) -> None:
    async def body(team: Team) -> None:
        annotations = {"chairlift.dev/operator": "elsewhere/chairlift"}
        labels = {"chairlift.dev/pool": "chat"}
        metadata = {"name": "chat-tenants", "namespace": "team", "resourceVersion": "1",
                    "annotations": annotations, "labels": labels}  # fmt: skip
        live = {"kind": "ConfigMap", "metadata": metadata, "data": {}}
        team.kube.objects[MAP] = live
        team.kube.stores.children["ConfigMap"].put(json.loads(json.dumps(live)))
        team.set_quota("acme", "acme", interactive={"concurrency": 1})
        await team.turn()
        assert team.opened == [] and team.kube.writes == []

    run(body)


def test_a_quota_without_a_pool_or_without_its_redis_is_told_what_to_add(run: Any) -> None:
    async def body(team: Team) -> None:
        pool, team.body = team.body, None
        team.set_quota("acme", "acme")
        assert await team.turn()
        assert team.condition("acme", "Accepted")[:2] == ("False", "PoolNotFound")
        team.set_pool({})
        await team.turn()
        status, reason, message = team.condition("acme", "Accepted")
        assert (status, reason) == ("False", "QuotasOff") and "spec.quotas.redis.url" in message
        assert team.turns.condition is None
        team.body = pool
        await team.turn()
        assert team.status("acme")["ready"] == "True"

    run(body)


def test_a_pool_that_is_gone_leaves_no_limits_in_redis(run: Any) -> None:
    async def body(team: Team) -> None:
        team.set_quota("acme", "acme", interactive={"concurrency": 1})
        await team.turn()
        team.body = None
        team.drop_quota("acme")
        team.redis.fails = "Redis cannot be reached"
        assert await team.turn()  # tried again
        assert not team.redis.is_forgotten
        team.redis.fails = None
        assert not await team.turn()
        assert team.redis.is_forgotten

    run(body)


def test_a_pool_that_keeps_no_quotas_any_more_keeps_no_keys_either(run: Any) -> None:
    async def body(team: Team) -> None:
        team.set_secret("acme-keys", one=API_KEY)
        team.set_quota("acme", "acme", keys=[{"secret": "acme-keys"}])
        await team.turn()
        team.set_pool({})
        await team.turn()
        assert MAP not in team.kube.objects and team.redis.is_forgotten
        assert team.condition("acme", "Accepted")[1] == "QuotasOff"
        team.set_pool()
        await team.turn()
        assert tenants_of(team.kube) == {"acme"} and team.status("acme")["ready"] == "True"

    run(body)


def test_only_a_fresh_sight_of_idle_capacity_is_told_to_redis(run: Any) -> None:
    async def body(team: Team) -> None:
        await team.turn()
        assert not team.redis.is_idle
        team.turns.seen = PoolSeen(True, 10, team.now_s)
        await team.turn()
        assert team.redis.is_idle
        await team.turn(3)  # by then it is old
        assert not team.redis.is_idle

    run(body)


def test_rates_that_are_lowered_reach_redis_and_both_status_say_why(run: Any) -> None:
    async def body(team: Team) -> None:
        team.set_quota("acme", "acme", batch={"tokensPerMinute": 60_000})
        team.set_quota("rest", "*", batch={"tokensPerMinute": 90_000})
        team.set_quota("beta", "beta", interactive={"tokensPerMinute": 60_000})
        team.set_quota("late", "acme", batch={"tokensPerMinute": 60_000})
        num_used = 0

        async def turn(num: int, is_crowded: bool | None) -> None:
            nonlocal num_used
            for _ in range(num):
                num_used += 3_000
                team.redis.counts["acme/batch"] = Counts(num_used, 0, 1, 2_000)
                strain = Strain(team.now_s, is_crowded, 100_000.0, 0.0)
                team.turns.seen = PoolSeen(False, 10, team.now_s, strain)
                await team.turn()

        await team.turn()
        await turn(20, is_crowded=False)
        assert team.redis.rates == {} and team.condition("acme", "RatesLowered")[0] == "False"
        await turn(60, is_crowded=True)
        assert team.redis.rates == {"acme/batch": 2_500, "*/batch": 2_500}
        status, reason, message = team.condition("acme", "RatesLowered")
        assert (status, reason) == ("True", "PoolCongested")
        assert message == (
            "Interactive requests wait: batch work 2500 tokens per minute at most for now."
        )
        assert team.condition("rest", "RatesLowered")[0] == "True"
        # Its batch work goes by the limits of everybody else.
        assert team.condition("beta", "RatesLowered")[0] == "True"
        assert team.condition("late", "RatesLowered")[:2] == ("Unknown", "NotInForce")
        assert team.turns.condition is not None
        assert "batch work may use fewer tokens" in team.turns.condition.message
        await turn(1, is_crowded=None)
        assert 2_500 < team.redis.rates["acme/batch"] < 2_750
        team.turns.seen = None
        await team.turn()
        assert team.redis.rates == {}
        assert team.condition("acme", "RatesLowered")[0] == "True"  # Redis keeps it for a while
        await team.turn(4)
        assert team.condition("acme", "RatesLowered")[0] == "False"
        assert "fewer tokens" not in team.turns.condition.message
        await turn(3, is_crowded=True)
        assert team.condition("acme", "RatesLowered")[0] == "True"
        team.set_pool({"redis": {**REDIS, "passwordSecret": "missing"}})
        await turn(1, is_crowded=True)
        assert team.condition("acme", "RatesLowered")[:2] == ("Unknown", "RedisUnreachable")

    run(body)


def test_a_status_is_not_written_for_each_step_of_a_rate(run: Any) -> None:
    async def body(team: Team) -> None:
        team.set_quota("acme", "acme", batch={"tokensPerMinute": 60_000})
        await team.turn()
        for number in range(20):
            strain = Strain(team.now_s, True, 100_000.0, 0.0)
            team.turns.seen = PoolSeen(False, 10, team.now_s, strain)
            team.redis.counts["acme/batch"] = Counts(0, 0, 1, 50_000 + number)
            await team.turn()
            if number == 5:
                assert team.condition("acme", "RatesLowered")[0] == "True"
                num_writes = len(team.kube.writes)
        assert len(team.kube.writes) - num_writes <= 2  # measurements, each minute

    run(body)


def test_what_a_tenant_uses_is_unknown_until_a_minute_was_watched(run: Any) -> None:
    async def body(team: Team) -> None:
        team.set_quota("acme", "acme", interactive={"concurrency": 9})
        await team.turn()
        first = team.status("acme")
        assert (first["used"], first["refused"], first["slotShare"]) == ("Unknown",) * 3
        assert team.condition("acme", "Limited")[0] == "Unknown"
        for num_used in range(0, 160, 5):
            team.redis.counts["acme/interactive"] = Counts(num_used, num_used // 100, 3)
            team.turns.seen = PoolSeen(False, 30, team.now_s)
            await team.turn()
        last = team.status("acme")
        assert 50 <= int(last["used"]) <= 100
        assert last["refused"] == "1" and last["limited"] == "True"
        assert last["interactive"]["running"] == "3" and last["batch"]["used"] == "0"
        assert last["slotShare"] == "10 %"

    run(body)


def test_the_status_is_not_written_again_while_nothing_changes(run: Any) -> None:
    async def body(team: Team) -> None:
        team.set_quota("acme", "acme")
        await team.turn(40)
        num_writes = len(team.kube.writes)
        await team.turn(100)
        assert len(team.kube.writes) == num_writes

    run(body)


def test_passwords_come_from_secrets_and_a_missing_one_is_named(run: Any) -> None:
    async def body(team: Team) -> None:
        redis = {"url": "rediss://redis:6379/0", "user": "op", "passwordSecret": "redis-password",
                 "caSecret": "redis-ca"}  # fmt: skip
        team.set_pool({"redis": redis})
        await team.turn()
        told = team.turns.condition
        assert told is not None and "Secret redis-password holds no password" in told.message
        team.set_secret("redis-password", "Opaque", password="secret\n")
        team.set_secret("redis-ca", "Opaque", **{"ca.crt": "PEM"})
        await team.turn()
        assert team.redis.access == RedisAccess("rediss://redis:6379/0", "op", "secret", "PEM")
        assert "secret" not in repr(team.redis.access)
        team.redis.fails = "Redis does not know us"
        team.set_secret("redis-password", "Opaque", password="other")
        await team.turn(2)
        assert team.redis.access.password == "other" and team.redis.limits

    run(body)


def test_who_does_not_lead_writes_nothing_to_redis(run: Any) -> None:
    async def body(team: Team) -> None:
        team.leads = False
        await team.turn()
        assert team.opened == []

    run(body)
