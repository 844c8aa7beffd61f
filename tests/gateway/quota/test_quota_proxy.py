"""Quotas through a whole gateway: scripted engines behind it, a real Redis beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from chairlift_gateway import estimate
from chairlift_gateway.quota.connection import RedisAddress
from chairlift_gateway.quota.keeper import OnRedisFailure
from chairlift_protocol.wire import USAGE_COMMENT, USAGE_HEADER

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("patient")]

PROMPT_TOKENS = 7
DONE = b"data: [DONE]\n\n"


def comment(num_tokens: int) -> bytes:
    body = f'{{"prompt_tokens":{PROMPT_TOKENS},"completion_tokens":{num_tokens}}}'
    return USAGE_COMMENT + body.encode() + b"\n\n"


@pytest.fixture
def speak(sse: Any, token: Any) -> Callable[..., Any]:
    """An engine's stream of so many tokens; then it waits for `may_end`, if there is one."""

    def handler(num_tokens: int, may_end: asyncio.Event | None = None, last: bytes = DONE) -> Any:
        async def answer(request: web.Request) -> web.StreamResponse:
            assert USAGE_HEADER in request.headers
            response: web.StreamResponse = await sse(request)
            await response.write(comment(0))
            for _ in range(num_tokens):
                await response.write(token("a"))
            if may_end is not None:
                await may_end.wait()
            await response.write(comment(num_tokens) + last)
            return response

        return answer

    return handler


async def whole(request: web.Request) -> web.StreamResponse:
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 5, "total_tokens": 12}
    return web.json_response({"choices": [{"text": "hello"}], "usage": usage})


async def refuse(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no"}}, status=400)


async def test_a_stream_is_charged_what_the_engine_says_and_clients_see_no_comments(
    start_engine: Any, metered: Any, speak: Any, token: Any, until: Any
) -> None:
    gateway, pool = await metered(await start_engine(speak(3)))
    async with gateway.post(data=b'{"stream": true}') as answer:
        assert await answer.read() == token("a") * 3 + DONE
    await until(lambda: pool.used("acme") == PROMPT_TOKENS + 3)
    assert pool.num_leases("acme") == 0


async def test_a_whole_answer_is_charged_its_usage(
    start_engine: Any, metered: Any, until: Any
) -> None:
    gateway, pool = await metered(await start_engine(whole))
    async with gateway.post() as answer:
        assert answer.status == 200
    await until(lambda: pool.used("acme") == 12)
    samples = await gateway.samples()
    assert samples["chairlift_gateway_tenant_tokens_total", "interactive", "acme"] == 12
    assert samples["chairlift_gateway_quota_redis_up",] == 1


async def test_a_client_that_leaves_midway_is_charged_what_came(
    start_engine: Any, metered: Any, speak: Any, token: Any, until: Any
) -> None:
    engine = await start_engine(speak(4, asyncio.Event()))
    gateway, pool = await metered(engine)
    async with gateway.post(data=b'{"stream": true}') as answer:
        await answer.content.readexactly(4 * len(token("a")))
        assert pool.num_leases("acme") == 1
    await until(lambda: pool.used("acme") == PROMPT_TOKENS + 4)
    assert pool.num_leases("acme") == 0


async def test_failures_before_a_first_token_cost_nothing(
    start_engine: Any, metered: Any, unused_url: str, until: Any
) -> None:
    class Nowhere:
        name, url = "r0", unused_url

    async def broken(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionError

    refusing, breaking = await start_engine(refuse), await start_engine(broken)
    for engine in (refusing, Nowhere(), breaking):
        gateway, pool = await metered(engine, hold_s=0.1)
        async with gateway.post() as answer:
            assert answer.status in (400, 503)
        await until(lambda pool=pool: pool.num_leases("acme") == 0)
        assert pool.used("acme") == 0


async def test_a_stream_that_breaks_off_is_charged_what_came(
    start_engine: Any, metered: Any, sse: Any, token: Any, until: Any
) -> None:
    async def breaking(request: web.Request) -> web.StreamResponse:
        response: web.StreamResponse = await sse(request)
        await response.write(comment(0) + token("a") * 2)
        assert request.transport is not None
        request.transport.abort()
        return response

    gateway, pool = await metered(await start_engine(breaking))
    async with gateway.post(data=b'{"stream": true}') as answer:
        assert b"upstream_failed" in await answer.read()
    await until(lambda: pool.used("acme") == PROMPT_TOKENS + 2)


async def test_over_its_limit_a_tenant_gets_429_with_when_to_come_back_and_others_are_served(
    start_engine: Any, metered: Any
) -> None:
    engine = await start_engine(whole)
    gateway, pool = await metered(engine, limits={"tokens_per_minute": 600, "burst_ms": 60_000})
    pool.limit("zeta", requests_per_minute=60)
    body = b'{"max_tokens": 590}'
    async with gateway.post(data=body) as answer:
        assert answer.status == 200
        assert answer.headers["x-ratelimit-limit-tokens"] == "600"
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) <= 400
    await engine.asked.wait()
    async with gateway.post(data=b'{"max_tokens": 1}' + b" " * 4_000) as answer:
        assert answer.status == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.headers["x-ratelimit-reset-tokens"]
        error = (await answer.json())["error"]
        assert error["code"] == "rate_limit_exceeded"
        assert "600 tokens per minute" in error["message"]
    async with gateway.post(headers={"x-tenant": "zeta"}) as answer:
        assert answer.status == 200
        assert answer.headers["x-ratelimit-remaining-requests"] == "29"
    assert len(engine.requests) == 2
    samples = await gateway.samples()
    key = ("chairlift_gateway_tenant_requests_refused_total", "interactive", "tokens", "acme")
    assert samples[key] == 1


async def test_a_client_and_the_metrics_are_told_of_a_lowered_rate(
    metered: Any, start_engine: Any
) -> None:
    engine = await start_engine(whole)
    gateway, pool = await metered(engine, limits={"tokens_per_minute": 6_000})
    pool.client.set(pool.keys.rate("acme/interactive"), 20)
    async with gateway.post() as answer:
        assert answer.status == 200
        assert answer.headers["x-ratelimit-limit-tokens"] == "20"
    async with gateway.post() as answer:
        assert answer.status == 429
        assert answer.headers["x-ratelimit-limit-tokens"] == "20"
        assert "(lowered from 6000 while" in (await answer.json())["error"]["message"]
    pool.client.delete(pool.keys.rate("acme/interactive"))
    samples = await gateway.samples()
    key = ("chairlift_gateway_tenant_requests_refused_total", "interactive", "congestion", "acme")
    assert samples[key] == 1


async def test_concurrency_is_held_until_streams_end(
    start_engine: Any, metered: Any, speak: Any, until: Any
) -> None:
    may_end = asyncio.Event()
    gateway, pool = await metered(await start_engine(speak(1, may_end)), limits={"concurrency": 2})
    body = b'{"stream": true}'
    async with gateway.post(data=body) as first, gateway.post(data=body) as second:
        async with gateway.post(data=body) as third:
            assert third.status == 429
        may_end.set()
        await first.read()
        await second.read()
    await until(lambda: pool.num_leases("acme") == 0)
    async with gateway.post(data=body) as answer:
        assert answer.status == 200


async def test_batch_requests_are_charged_to_an_account_of_their_own(
    start_engine: Any, metered: Any, until: Any
) -> None:
    gateway, pool = await metered(await start_engine(whole))
    async with gateway.post("/batch/v1/completions") as answer:
        assert answer.status == 200
    key = pool.keys.account("acme/batch")
    await until(lambda: pool.client.hget(key, "used") == "12")
    assert pool.used("acme") == 0


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_counting_tokens_is_a_request_that_costs_none_and_says_nothing_of_answers(
    start_engine: Any, metered: Any, until: Any, path: str
) -> None:
    limits = {"requests_per_minute": 60, "tokens_per_minute": 60_000, "burst_ms": 60_000}
    gateway, pool = await metered(await start_engine(whole), limits=limits)
    async with gateway.post(path) as answer:
        assert answer.status == 200
        assert answer.headers["x-ratelimit-remaining-requests"] == "59"
    await until(lambda: pool.num_leases("acme") == 0)
    assert pool.used("acme") == 0
    async with gateway.post(data=b"{}") as answer:
        reserved = estimate.prompt_tokens(b"{}") + estimate.FIRST_ANSWER_TOKENS
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(60_000 - reserved)


async def test_requests_per_minute_hold_for_counting_tokens_too(
    start_engine: Any, metered: Any
) -> None:
    limits = {"requests_per_minute": 1, "burst_ms": 60_000}
    engine = await start_engine(whole)
    gateway, _ = await metered(engine, limits=limits)
    for status in (200, 429):
        async with gateway.post("/tokenize") as answer:
            assert answer.status == status
    assert len(engine.requests) == 1


async def test_a_list_of_models_is_not_limited(start_engine: Any, metered: Any) -> None:
    gateway, _ = await metered(await start_engine(), limits={"concurrency": 0})
    async with gateway.client.get(gateway.url + "/v1/models") as answer:
        assert answer.status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("limit", ["concurrency", "requests_per_minute", "tokens_per_minute"])
async def test_a_class_that_is_closed_gets_403_and_is_not_told_to_come_back(
    start_engine: Any, metered: Any, limit: str, path: str
) -> None:
    engine = await start_engine(whole)
    gateway, _ = await metered(engine, limits={limit: 0})
    async with gateway.post("/batch" + path) as answer:
        assert answer.status == 403
        assert "retry-after" not in answer.headers
        assert (await answer.json())["error"] == {
            "message": "Not allowed for tenant acme's batch class: its limits admit no request.",
            "type": "invalid_request_error", "param": None, "code": "class_not_allowed",
        }  # fmt: skip
    samples = await gateway.samples()
    key = ("chairlift_gateway_tenant_requests_refused_total", "batch", "not_allowed", "acme")
    assert samples[key] == 1
    assert not engine.requests


async def test_who_may_only_borrow_is_served_by_an_idle_pool_and_told_to_come_back_otherwise(
    start_engine: Any, metered: Any
) -> None:
    limits = {"tokens_per_minute": 0, "may_borrow": True}
    gateway, pool = await metered(await start_engine(whole), limits=limits)
    async with gateway.post() as answer:
        assert (answer.status, answer.headers["retry-after"]) == (429, "60")
    pool.client.set(pool.keys.idle, 1)
    async with gateway.post() as answer:
        assert answer.status == 200


async def test_a_pool_that_denies_without_redis_says_503(
    start_engine: Any, start_gateway: Any, unused_url: str
) -> None:
    engine = await start_engine(whole)
    settings: dict[str, Any] = {
        "redis": RedisAddress(unused_url.replace("http", "redis")), "quota_pool": "team/chat",
    }  # fmt: skip
    gateway = await start_gateway(engine, on_redis_failure=OnRedisFailure.DENY, **settings)
    async with gateway.post() as answer:
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        assert (await answer.json())["error"]["code"] == "quota_unavailable"
    open_gateway: Awaitable[Any] = start_gateway(
        engine, on_redis_failure=OnRedisFailure.ALLOW, **settings
    )
    async with (await open_gateway).post() as answer:
        assert answer.status == 200


async def test_requests_sent_ahead_have_one_place_after_another(
    start_engine: Any, metered: Any, connect: Any
) -> None:
    gateway, _ = await metered(await start_engine(whole), limits={"concurrency": 1})
    connection = await connect(gateway)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Tenant: acme\r\nContent-Length: 2\r\n"
    await connection.send((head + b"\r\n{}") * 8)
    for _ in range(8):
        assert (await connection.answer())[0].startswith(b"HTTP/1.1 200")
