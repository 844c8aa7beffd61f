from __future__ import annotations

import asyncio
import hashlib
import io
import json
from typing import Any

import pytest
from aiohttp import web

from chairlift_protocol.wire import (
    CLASS_HEADER,
    INTERNAL_TOKEN_HEADER,
    REQUEST_ID_HEADER,
    TENANT_HEADER,
    WAITED_MS_HEADER,
)

pytestmark = pytest.mark.anyio

DONE = b"data: [DONE]\n\n"


async def test_an_event_reaches_the_client_before_the_next_one_exists(
    start_engine: Any, start_gateway: Any, sse: Any, token: Any
) -> None:
    seen = asyncio.Event()

    async def two_events(request: web.Request) -> web.StreamResponse:
        response = await sse(request)
        await response.write(token("a"))
        await seen.wait()
        await response.write(token("b") + DONE)
        return response

    gateway = await start_gateway(await start_engine(two_events))
    async with gateway.post() as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["x-accel-buffering"] == "no"
        assert await answer.content.readany() == token("a")
        seen.set()
        assert await answer.content.read() == token("b") + DONE


async def test_an_event_that_comes_in_pieces_is_relayed_whole(
    start_engine: Any, start_gateway: Any, sse: Any, token: Any
) -> None:
    async def in_pieces(request: web.Request) -> web.StreamResponse:
        response = await sse(request)
        for byte in token("abc"):
            await response.write(bytes([byte]))
        return response

    gateway = await start_gateway(await start_engine(in_pieces))
    async with gateway.post() as answer:
        assert await answer.content.readany() == token("abc")


async def test_body_status_and_headers_of_a_whole_answer_pass_unchanged(
    start_engine: Any, start_gateway: Any
) -> None:
    async def busy(request: web.Request) -> web.StreamResponse:
        return web.Response(status=429, body=b'{"error": 1}', headers={"retry-after": "7"})

    engine = await start_engine(busy)
    gateway = await start_gateway(engine)
    body = json.dumps({"prompt": "ä" * 2_000_000}, ensure_ascii=False).encode()
    async with gateway.post("/v1/chat/completions?a=%20b", data=io.BytesIO(body)) as answer:
        assert (answer.status, await answer.read()) == (429, b'{"error": 1}')
        assert answer.headers["retry-after"] == "7"
        assert answer.headers["content-length"] == "12"
    assert engine.bodies == [body]
    assert engine.requests[0].path_qs == "/v1/chat/completions?a=%20b"
    async with gateway.client.get(gateway.url + "/batch/v1/models") as answer:
        assert answer.status == 429
    assert (engine.requests[1].method, engine.requests[1].path) == ("GET", "/v1/models")


async def test_an_engine_sees_the_gateways_internal_headers_and_never_a_clients(
    start_engine: Any, start_gateway: Any
) -> None:
    engine = await start_engine()
    gateway = await start_gateway(engine)
    forged = {
        INTERNAL_TOKEN_HEADER: "guess",
        CLASS_HEADER: "batch",
        TENANT_HEADER: "other",
        WAITED_MS_HEADER: "99999",
        REQUEST_ID_HEADER: "job-1",
        "Authorization": "Bearer secret",
        "traceparent": "00-ab-cd-01",
    }
    for _ in range(2):
        async with gateway.post(headers=forged) as answer:
            assert answer.headers[REQUEST_ID_HEADER] == "job-1"
    first, second = (request.headers for request in engine.requests)
    assert first[INTERNAL_TOKEN_HEADER] == "pool-token"
    assert first[CLASS_HEADER] == "interactive"
    assert int(first[WAITED_MS_HEADER]) < 5000
    assert first["traceparent"] == "00-ab-cd-01"
    assert first[TENANT_HEADER] == "anonymous" and "authorization" not in first
    assert first[REQUEST_ID_HEADER].startswith("job-1-")
    assert first[REQUEST_ID_HEADER] != second[REQUEST_ID_HEADER]


@pytest.mark.parametrize(
    ("path", "key", "expected"),
    [
        ("/v1/completions", None, "interactive"),
        ("/v1/completions", "some-key", "interactive"),
        ("/v1/completions", "night-key", "batch"),
        ("/batch/v1/completions", None, "batch"),
        ("/batch/v1/chat/completions", "some-key", "batch"),
        ("/batch/tokenize", None, "batch"),
        ("/tokenize", "night-key", "batch"),
    ],
)
async def test_the_class_comes_from_the_path_or_the_key(
    start_engine: Any, start_gateway: Any, path: str, key: str | None, expected: str
) -> None:
    engine = await start_engine()
    digests = tuple(hashlib.sha256(each).hexdigest() for each in (b"x", b"night-key"))
    gateway = await start_gateway(engine, batch_key_digests=digests)
    async with gateway.post(path, headers={"Authorization": f"Bearer {key}"} if key else {}):
        pass
    assert engine.requests[0].headers[CLASS_HEADER] == expected
    assert engine.requests[0].path == path.removeprefix("/batch")


async def test_a_client_that_leaves_a_stream_ends_the_upstream_request(
    start_engine: Any, endless: Any, start_gateway: Any, token: Any
) -> None:
    engine = await start_engine(endless)
    gateway = await start_gateway(engine)
    answer = await gateway.post()
    assert await answer.content.readany() == token("a")
    answer.close()
    async with asyncio.timeout(2):
        await engine.left.wait()
    await gateway.until_sample(1, "chairlift_gateway_responses_total", "interactive", "499")
    assert (await gateway.samples())["chairlift_gateway_requests_in_flight", "interactive"] == 0


async def test_a_client_that_leaves_before_a_whole_answer_ends_the_upstream_request(
    start_engine: Any, never: Any, start_gateway: Any
) -> None:
    engine = await start_engine(never)
    gateway = await start_gateway(engine)
    asking = asyncio.create_task(gateway.client.post(gateway.url + "/v1/completions", data=b"{}"))
    await engine.asked.wait()
    asking.cancel()
    async with asyncio.timeout(2):
        await engine.left.wait()
    await gateway.until_sample(1, "chairlift_gateway_responses_total", "interactive", "499")


async def test_a_replica_that_fails_midway_ends_a_stream_with_one_error_and_no_done(
    start_engine: Any, start_gateway: Any, sse: Any, token: Any
) -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        response = await sse(request)
        await response.write(token("a") + b'data: {"choices": [{"te')
        assert request.transport is not None
        request.transport.close()
        return response

    engine = await start_engine(breaks)
    gateway = await start_gateway(
        engine,
    )
    async with gateway.post() as answer:
        assert answer.status == 200
        first, last, nothing = (await answer.read()).split(b"\n\n")
    assert first + b"\n\n" == token("a")
    assert json.loads(last.removeprefix(b"data: "))["error"] == {
        "message": "The engine replica failed before its answer was complete.",
        "type": "server_error",
        "param": None,
        "code": "upstream_failed",
    }
    assert nothing == b""
    assert len(engine.requests) == 1
    samples = await gateway.samples()
    assert samples["chairlift_gateway_responses_total", "interactive", "502"] == 1
    assert samples["chairlift_gateway_upstream_failures_total", "in_answer"] == 1


async def test_a_replica_that_fails_midway_in_a_whole_answer_gives_502_and_is_not_asked_again(
    start_engine: Any, start_gateway: Any
) -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": "100"})
        await response.prepare(request)
        await response.write(b'{"object"')
        assert request.transport is not None
        request.transport.close()
        return response

    engine = await start_engine(breaks)
    gateway = await start_gateway(engine, await start_engine(name="r1"))
    async with gateway.post() as answer:
        assert answer.status == 502
        assert (await answer.json())["error"]["code"] == "upstream_failed"
    assert len(engine.requests) == 1


async def test_a_client_that_does_not_read_stops_the_reading_from_the_replica(
    start_engine: Any, start_gateway: Any, sse: Any, token: Any
) -> None:
    event = token("x" * 60_000)
    num_written = 0
    blocked = asyncio.Event()

    async def firehose(request: web.Request) -> web.StreamResponse:
        nonlocal num_written
        response = await sse(request)
        while num_written < 1000:
            writing = asyncio.create_task(response.write(event))
            if not (await asyncio.wait({writing}, timeout=0.3))[0]:
                blocked.set()
            await writing
            num_written += 1
        return response

    gateway = await start_gateway(await start_engine(firehose))
    answer = await gateway.post()
    async with asyncio.timeout(5):
        await blocked.wait()
    assert num_written < 500
    total = 0
    while chunk := await answer.content.readany():
        total += len(chunk)
    assert total == 1000 * len(event)


async def test_the_openai_client_reads_a_stream_and_its_error(
    start_engine: Any, start_gateway: Any, sse: Any, token: Any
) -> None:
    openai = pytest.importorskip("openai")

    async def breaks(request: web.Request) -> web.StreamResponse:
        response = await sse(request)
        await response.write(token("a"))
        if (await request.json())["prompt"] == "break":
            assert request.transport is not None
            request.transport.close()
        else:
            await response.write(token("b") + DONE)
        return response

    gateway = await start_gateway(await start_engine(breaks))
    async with openai.AsyncOpenAI(
        base_url=gateway.url + "/v1", api_key="k", max_retries=0
    ) as client:

        async def texts(prompt: str) -> list[str]:
            stream = await client.completions.create(model="m", prompt=prompt, stream=True)
            return [chunk.choices[0].text async for chunk in stream]

        assert await texts("go") == ["a", "b"]
        with pytest.raises(openai.APIError, match="failed before its answer was complete"):
            await texts("break")
