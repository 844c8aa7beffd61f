from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from chairlift_gateway.access_log import MAX_UNKNOWN_PER_S, AccessLog
from chairlift_gateway.metrics import MAX_TENANTS, GatewayMetrics
from chairlift_protocol.metrics import GATEWAY_TENANT_REFUSED, GATEWAY_TENANT_TOKENS
from chairlift_protocol.wire import OTHER_TENANTS, RequestClass

pytestmark = pytest.mark.anyio

TTFT = "chairlift_gateway_time_to_first_token_seconds"
GAP = "chairlift_gateway_inter_token_gap_seconds"
ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'


async def test_tokens_are_timed_from_arrival_and_from_each_other(
    start_engine: Any, start_gateway: Any, sse: Any, token: Any
) -> None:
    async def chat(request: web.Request) -> web.StreamResponse:
        response = await sse(request)
        await response.write(ROLE)
        await asyncio.sleep(0.06)
        for text in "abc":
            await response.write(token(text))
            await asyncio.sleep(0.02)
        await response.write(b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')
        return response

    gateway = await start_gateway(await start_engine(chat))
    async with gateway.post("/batch/v1/chat/completions") as answer:
        await answer.read()
    samples = await gateway.samples()
    assert samples[TTFT + "_count", "batch"] == 1
    assert 0.06 <= samples[TTFT + "_sum", "batch"] < 1
    assert samples[GAP + "_count", "batch"] == 2
    assert 0.03 <= samples[GAP + "_sum", "batch"] < 1
    # The other class shows, at zero.
    assert samples[TTFT + "_count", "interactive"] == samples[GAP + "_count", "interactive"] == 0


async def test_a_hold_is_part_of_the_time_to_the_first_token(
    start_engine: Any, start_gateway: Any, write_endpoints: Any, sse: Any, token: Any
) -> None:
    async def one(request: web.Request) -> web.StreamResponse:
        response = await sse(request)
        await response.write(token("a"))
        return response

    engine = await start_engine(one)
    gateway = await start_gateway()
    asking = asyncio.create_task(gateway.client.post(gateway.url + "/v1/completions", data=b"{}"))
    await gateway.until_sample(1, "chairlift_gateway_requests_held", "interactive")
    await asyncio.sleep(0.1)
    write_endpoints(engine)
    async with await asking as answer:
        await answer.read()
    assert (await gateway.samples())[TTFT + "_sum", "interactive"] >= 0.1


async def test_every_arrival_is_counted_once_and_only_those_that_ask_for_tokens(
    start_engine: Any, start_gateway: Any
) -> None:
    gateway = await start_gateway(await start_engine())
    for path in ("/v1/completions", "/v1/chat/completions", "/batch/v1/completions", "/tokenize"):
        async with gateway.post(path) as answer:
            assert answer.status == 200
    async with gateway.client.get(gateway.url + "/v1/models") as answer:
        assert answer.status == 200
    samples = await gateway.samples()
    received, responses = "chairlift_requests_received_total", "chairlift_gateway_responses_total"
    assert samples[received, "interactive"] == samples[responses, "interactive", "200"] == 2
    assert samples[received, "batch"] == samples[responses, "batch", "200"] == 1
    assert samples["chairlift_gateway_requests_in_flight", "interactive"] == 0
    # A whole answer has no first token to be seen.
    assert samples[TTFT + "_count", "interactive"] == 0


async def test_each_request_leaves_one_line_in_the_log(
    start_engine: Any, start_gateway: Any, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "chairlift_gateway.access"]

    gateway = await start_gateway(await start_engine())
    with caplog.at_level(logging.INFO, "chairlift_gateway.access"):
        async with gateway.post("/batch/v1/completions", headers={"x-request-id": "job-7"}):
            pass
        await until(lines)
    (line,) = lines()
    assert re.fullmatch(
        r"class=batch status=200 ms=\d+ replica=r0 request=job-7-\w{12} path=/v1/completions "
        r"tenant=anonymous tokens=\d+",
        line,
    )


def test_ten_thousand_tenants_have_a_bounded_number_of_series() -> None:
    metrics, reasons = GatewayMetrics(), ("concurrency", "requests", "tokens", "unavailable")
    for number in range(10_000):
        for request_class in RequestClass:
            metrics.count_tenant_tokens(f"tenant-{number}", request_class, 3)
            for reason in reasons:
                metrics.count_tenant_refused(f"tenant-{number}", request_class, reason)
    series = {
        family.name: {
            (s.labels["tenant"], s.labels["class"], s.labels.get("reason")): s.value
            for s in family.samples
            if s.name.endswith("_total")
        }
        for family in text_string_to_metric_families(metrics.exposition().decode())
        if "_tenant_" in family.name
    }
    num_named = (MAX_TENANTS + 1) * len(RequestClass)
    tokens = series[GATEWAY_TENANT_TOKENS.removesuffix("_total")]
    refused = series[GATEWAY_TENANT_REFUSED.removesuffix("_total")]
    assert (len(tokens), len(refused)) == (num_named, num_named * len(reasons))
    assert tokens[OTHER_TENANTS, "batch", None] == 3 * (10_000 - MAX_TENANTS)
    assert sum(tokens.values()) == 3 * 2 * 10_000


async def test_a_flood_of_unknown_callers_leaves_a_few_lines_a_second_and_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log, now_s = AccessLog(lambda: now_s), 100.0
    with caplog.at_level(logging.INFO, "chairlift_gateway.access"):
        for number in range(20):
            log.note(False, "unknown %d", number)
            log.note(True, "known %d", number)
        now_s += 1
        log.note(False, "unknown again")
        now_s += 1
        log.note(True, "known again")
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if line.startswith("known")] == [
        *(f"known {number}" for number in range(20)), "known again",
    ]  # fmt: skip
    assert [line for line in lines if not line.startswith("known")] == [
        *(f"unknown {number}" for number in range(MAX_UNKNOWN_PER_S)),
        f"left out: {20 - MAX_UNKNOWN_PER_S} refusals of unknown callers",
        "unknown again",
    ]


async def test_who_is_not_known_is_logged_now_and_then(
    start_engine: Any, start_gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await start_gateway(await start_engine(), serves_anonymous=False)
    with caplog.at_level(logging.INFO, "chairlift_gateway.access"):
        for _ in range(200):
            async with gateway.post() as answer:
                assert answer.status == 401
    said = [line for line in caplog.messages if "status=401" in line]
    assert MAX_UNKNOWN_PER_S <= len(said) < 100
