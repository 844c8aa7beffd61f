from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("POST", "/admin/policy", 404, "not_found"),
        ("POST", "/load", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("DELETE", "/metrics", 405, "method_not_allowed"),
    ],
)
async def test_what_is_not_served_is_refused_in_the_shape_of_openai(
    start_engine: Any, start_gateway: Any, method: str, path: str, status: int, code: str
) -> None:
    engine = await start_engine()
    gateway = await start_gateway(engine)
    async with gateway.client.request(method, gateway.url + path) as answer:
        assert answer.status == status
        assert answer.content_type == "application/json"
        error = (await answer.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("invalid_request_error", code)
        assert f"{method} {path}" in error["message"]
        assert ("allow" in answer.headers) == (status == 405)
    assert engine.requests == []


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_over_the_bound_is_refused_with_the_bound_and_the_connection_lives(
    start_engine: Any, start_gateway: Any, is_chunked: bool
) -> None:
    engine = await start_engine()
    gateway = await start_gateway(engine, max_body_bytes=1000)

    async def pieces() -> Any:
        for _ in range(11):
            yield b"x" * 100

    async with gateway.post(data=pieces() if is_chunked else b"x" * 1100) as answer:
        assert answer.status == 413
        error = (await answer.json())["error"]
        assert error["code"] == "request_too_large" and "1000 bytes" in error["message"]
    async with gateway.post(data=b"x" * 1000) as answer:
        assert answer.status == 200
    assert engine.bodies == [b"x" * 1000]
    samples = await gateway.samples()
    assert samples["chairlift_requests_received_total", "interactive"] == 2
    assert samples["chairlift_gateway_responses_total", "interactive", "413"] == 1


async def test_each_class_has_its_own_longest_body(start_engine: Any, start_gateway: Any) -> None:
    gateway = await start_gateway(
        await start_engine(), max_body_bytes=1000, batch_max_body_bytes=5000
    )
    statuses = {}
    for path in ("/v1/completions", "/batch/v1/completions"):
        for num_bytes in (900, 4000, 6000):
            async with gateway.post(path, data=b"x" * num_bytes) as answer:
                statuses[path, num_bytes] = answer.status
    assert list(statuses.values()) == [200, 413, 413, 200, 200, 413]


async def test_health_follows_the_list_of_replicas_and_the_drain(
    start_engine: Any, start_gateway: Any, write_endpoints: Any
) -> None:
    engine = await start_engine()
    gateway = await start_gateway()

    async def ready() -> int:
        async with gateway.client.get(gateway.url + "/health/ready") as answer:
            return answer.status

    assert await ready() == 503
    write_endpoints(engine)
    async with asyncio.timeout(3):
        while await ready() != 200:
            await asyncio.sleep(0.01)
    gateway.gateway.begin_drain()
    assert await ready() == 503
    async with gateway.client.get(gateway.url + "/health/live") as answer:
        assert answer.status == 200


async def test_a_request_cut_at_the_end_of_a_drain_is_told_so(
    start_engine: Any, start_gateway: Any, sse: Any, token: Any
) -> None:
    async def endless(request: Any) -> Any:
        if request.path == "/v1/completions":
            response = await sse(request)
            await response.write(token("a"))
        else:
            whole_asked.set()
        await asyncio.Event().wait()

    whole_asked = asyncio.Event()
    gateway = await start_gateway(await start_engine(endless))
    stream = await gateway.post()
    assert await stream.content.readany() == token("a")
    asking = asyncio.create_task(
        gateway.client.post(gateway.url + "/v1/chat/completions", data=b"{}")
    )
    await whole_asked.wait()
    gateway.gateway.cut_off()
    last = await stream.read()
    assert last.startswith(b'data: {"error"') and b"gateway_shutting_down" in last
    async with await asking as whole:
        assert whole.status == 503 and whole.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    "path", ["/v1/models", "/batch/v1/models", "/health/live", "/metrics", "/arrivals"]
)
async def test_head_is_answered_as_get_is_without_the_body(
    start_engine: Any, start_gateway: Any, path: str
) -> None:
    engine = await start_engine()
    gateway = await start_gateway(engine)
    async with gateway.client.get(gateway.url + path) as whole:
        assert whole.status == 200 and await whole.read()
    for _ in range(2):
        async with gateway.client.head(gateway.url + path) as answer:
            assert (answer.status, await answer.read()) == (200, b"")
            assert answer.content_type == whole.content_type
            assert answer.headers["content-length"] == whole.headers["content-length"]
    assert {request.method for request in engine.requests} <= {"GET"}
