"""The HTTP edge against a small fake engine on the loopback interface."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from chairlift_operator.decisions import SetPolicy, SetReplicas
from chairlift_operator.direct_cluster import DirectCluster, StartingReplica
from chairlift_operator.engine_client import EngineClient, ReplicaEndpoint
from chairlift_operator.http_asking import EngineError
from chairlift_operator.snapshot import Phase
from chairlift_protocol import wire
from chairlift_protocol.policy import Generation, Policy, SloThresholds
from chairlift_protocol.wire import RequestClass

START = Policy(Generation(0, 0), 64, 2048, 2048, 0.0, SloThresholds(500.0, 50.0))
WANTED = replace(START, generation=Generation(1, 1), batch_size=16)
METRICS = (
    "\n".join(
        f"{name} 0"
        for name in (
            "chairlift_step_seconds_total",
            "chairlift_steps_total",
            "chairlift_step_decode_seqs_total",
            "chairlift_step_prefill_tokens_total",
            "chairlift_step_kv_tokens_total",
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
        )
    )
    + "\n"
)


class FakeEngine:
    """Answers as an engine does; `mood` makes it misbehave."""

    def __init__(self, mood: str = "") -> None:
        self.mood, self.policy = mood, START

    async def metrics(self, request: web.Request) -> web.Response:
        if self.mood == "slow":
            await asyncio.sleep(5)
        if self.mood == "garbage":
            return web.Response(text="<html>")
        if self.mood == "endless":
            return web.Response(body=b"#" * (5 << 20))
        return web.Response(status=500 if self.mood == "broken" else 200, text=METRICS)

    async def ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.mood == "loading" else 200)

    async def admin(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer secret":
            return web.json_response({"error": {"message": "wrong token"}}, status=401)
        if request.method == "PATCH":
            policy = Policy.from_json(await request.json())
            if policy.generation <= self.policy.generation:
                return web.json_response({"error": {"message": "older"}}, status=409)
            if self.mood != "forgetful":
                self.policy = policy
        capacity = {
            "batch_size": 64,
            "step_tokens": 2048,
            "kv_tokens": 65536,
            "model_length_tokens": 4096,
            "block_tokens": 16,
        }
        body = {
            "desired": self.policy.to_json(),
            "effective": self.policy.to_json(),
            "observed": {},
            "capacity": {} if self.mood == "odd" else capacity,
        }
        if self.mood.startswith("capacity "):
            text = json.dumps(body).replace("65536", self.mood.removeprefix("capacity "))
            return web.Response(text=text, content_type="application/json")
        return web.json_response(body)


class FakeFleet:
    def __init__(self, gateway_url: str, endpoints: list[ReplicaEndpoint]) -> None:
        self.gateway_url = gateway_url
        self._endpoints = endpoints

    def endpoints(self) -> list[ReplicaEndpoint]:
        return self._endpoints

    def starting(self) -> list[StartingReplica]:
        return [StartingReplica("batch-0", RequestClass.BATCH)]

    def set_replicas(self, action: SetReplicas) -> str:
        return f"{action.count} from now on"


def _with_engine(
    mood: str, use: Callable[[EngineClient, DirectCluster], Awaitable[Any]], token: str = "secret"
) -> Any:
    async def main() -> Any:
        fake, app = FakeEngine(mood), web.Application()
        app.router.add_get(wire.METRICS_PATH, fake.metrics)
        app.router.add_get(wire.READY_PATH, fake.ready)
        app.router.add_route("*", wire.ADMIN_POLICY_PATH, fake.admin)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            endpoint = ReplicaEndpoint("chat-0", url, url, token)
            async with aiohttp.ClientSession() as session:
                client = EngineClient(session, endpoint, timeout_s=0.3)
                fleet = FakeFleet(url, [endpoint])
                cluster = DirectCluster("default/chat", fleet, session, lambda: 7.0)
                return await use(client, cluster)
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def test_a_policy_is_written_and_read_back() -> None:
    async def use(client: EngineClient, cluster: DirectCluster) -> Any:
        before = await client.read_policy()
        results = await cluster.apply([SetPolicy("chat-0", WANTED, shrinks=True)])
        return before, results, await client.read_policy()

    before, (result,), after = _with_engine("", use)
    assert before.desired == START and before.capacity.kv_tokens == 65536
    assert result.verified and after.effective == WANTED


def test_an_engine_that_does_not_keep_its_policy_is_reported_unverified() -> None:
    (result,) = _with_engine(
        "forgetful", lambda _, cluster: cluster.apply([SetPolicy("chat-0", WANTED, True)])
    )
    assert not result.verified and "read back generation [0, 0]" in result.detail


@pytest.mark.parametrize(
    ("action", "detail"),
    [
        (SetPolicy("chat-0", replace(WANTED, generation=Generation(0, 0)), True), "409: older"),
        (SetPolicy("chat-9", WANTED, True), "chat-9 is gone"),
    ],
)
def test_a_refused_or_impossible_write_is_a_result_not_a_crash(
    action: SetPolicy, detail: str
) -> None:
    (result,) = _with_engine("", lambda _, cluster: cluster.apply([action]))
    assert not result.verified and detail in result.detail


def test_a_pool_is_observed_with_readiness_metrics_and_policy() -> None:
    snapshot = _with_engine("", lambda _, cluster: cluster.observe())
    replica, starting = snapshot.replicas
    assert (starting.name, starting.phase, starting.ready) == ("batch-0", Phase.STARTING, False)
    assert "series chairlift_requests_received_total of class" in snapshot.gateway.failure
    assert (snapshot.pool, snapshot.taken_at_s, replica.name) == ("default/chat", 7.0, "chat-0")
    assert replica.ready and replica.sample.missing == () and replica.sampled_at_s == 7.0
    assert replica.policy.desired == START


@pytest.mark.parametrize(
    ("mood", "token", "failing", "sentence"),
    [
        ("broken", "secret", "scrape_failure", "answered 500"),
        ("garbage", "secret", "scrape_failure", "metrics: not Prometheus text"),
        ("endless", "secret", "scrape_failure", "more than 4194304 bytes"),
        ("odd", "secret", "policy_failure", "policy answer not understood"),
        ("", "wrong", "policy_failure", "answered 401: wrong token"),
        *[
            (f"capacity {number}", "secret", "policy_failure", "policy answer not understood")
            for number in ("1e999", "NaN", "-1", "1e16", "9" * 5000, "[" * 5000)
        ],
    ],
)
def test_an_engine_in_trouble_stays_in_the_snapshot_with_the_reason(
    mood: str, token: str, failing: str, sentence: str
) -> None:
    snapshot = _with_engine(mood, lambda _, cluster: cluster.observe(), token)
    assert sentence in getattr(snapshot.replicas[0], failing)


def test_a_loading_engine_is_seen_but_not_ready() -> None:
    assert not _with_engine("loading", lambda _, c: c.observe()).replicas[0].ready


def test_a_change_of_replicas_goes_to_whoever_runs_them() -> None:
    action = SetReplicas(RequestClass.BATCH, 3, (), "work waits", 60.0)
    (result,) = _with_engine("", lambda _, cluster: cluster.apply([action]))
    assert result.detail == "3 from now on"


def test_an_engine_that_hangs_is_given_up_in_time() -> None:
    with pytest.raises(EngineError, match=r"took over 0\.3 s"):
        _with_engine("slow", lambda client, _: client.scrape())


def test_a_token_never_shows_in_a_representation() -> None:
    assert "secret" not in repr(ReplicaEndpoint("a", "http://x", "http://y", "secret"))
