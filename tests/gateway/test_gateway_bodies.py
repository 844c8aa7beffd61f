"""How much memory bodies hold, of all and of one tenant, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any

import pytest
from aiohttp import web

from chairlift_gateway import client_request
from chairlift_gateway.body_memory import MAX_HELD_BYTES, BodyMemory, HeldBody
from chairlift_gateway.openai_errors import Refusal

MIB = 2**20


def filled(memory: BodyMemory, tenant: str, num_bytes: int) -> HeldBody:
    body = memory.body(tenant)
    body.add(b"x" * num_bytes)
    return body


def test_a_tenant_holds_at_most_half_and_all_together_no_more_than_there_is() -> None:
    memory = BodyMemory(longest_bytes=10, max_bytes=100)
    bodies = [filled(memory, "acme", 10) for _ in range(5)]
    with pytest.raises(Refusal) as refused:
        filled(memory, "acme", 1)
    assert (refused.value.status, refused.value.code) == (503, "busy")
    assert refused.value.retry_after_s == 1
    bodies += [filled(memory, "beta", 40), filled(memory, "zeta", 10)]
    with pytest.raises(Refusal):
        filled(memory, "new", 1)
    for body in bodies:
        body.drop()
    assert memory.held_bytes == 0
    filled(memory, "acme", 50)


def test_what_was_refused_or_dropped_twice_is_freed_once() -> None:
    memory = BodyMemory(longest_bytes=10, max_bytes=100)
    with filled(memory, "beta", 10), pytest.raises(Refusal), memory.body("acme") as body:
        body.add(b"x" * 50)
        body.seal()
        assert body.raw == b"x" * 50
        body.add(b"x")
    assert memory.held_bytes == 0
    body.drop()
    assert (memory.held_bytes, body.raw) == (0, b"")


def test_the_longest_body_that_is_taken_fits_also_where_that_is_longer_than_usual() -> None:
    memory = BodyMemory(longest_bytes=1000, max_bytes=100)
    filled(memory, "acme", 1000)
    with pytest.raises(Refusal):
        filled(memory, "acme", 1)


LARGE, SMALL = 60 * MIB, 10 * MIB  # two large ones fit into one tenant's half, and no small one


async def status(gateway: Any, num_bytes: int) -> int:
    async with gateway.post(data=BytesIO(b"x" * num_bytes)) as answer:
        await answer.read()
        return int(answer.status)


@pytest.mark.anyio
async def test_bodies_beyond_the_bound_are_refused_until_others_are_answered(
    start_engine: Any, start_gateway: Any
) -> None:
    assert 2 * LARGE <= MAX_HELD_BYTES / 2 < 2 * LARGE + SMALL
    num_asked, may_answer = asyncio.Semaphore(0), asyncio.Event()

    async def hold(request: web.Request) -> web.StreamResponse:
        num_asked.release()
        await may_answer.wait()
        return web.json_response({})

    gateway = await start_gateway(await start_engine(hold), max_body_bytes=LARGE)
    held = [asyncio.create_task(status(gateway, LARGE)) for _ in range(2)]
    for _ in held:
        await asyncio.wait_for(num_asked.acquire(), 30)
    async with gateway.post(data=BytesIO(b"x" * SMALL)) as refused:
        assert refused.status == 503 and refused.headers["retry-after"] == "1"
        assert (await refused.json())["error"]["code"] == "busy"
    may_answer.set()
    assert await asyncio.gather(*held) == [200, 200]
    assert await status(gateway, SMALL) == 200


@pytest.mark.anyio
async def test_a_stream_that_has_begun_needs_its_body_no_more(
    start_engine: Any, endless: Any, start_gateway: Any, token: Any
) -> None:
    engine = await start_engine(endless)
    gateway = await start_gateway(engine, max_body_bytes=LARGE)
    async with contextlib.AsyncExitStack() as answers:
        for num_bytes in (LARGE, LARGE, SMALL):
            posted = gateway.post(data=BytesIO(b"x" * num_bytes))
            answer = await answers.enter_async_context(posted)
            assert answer.status == 200
            assert await answer.content.readany() == token("a")
            engine.bodies.clear()


@pytest.mark.anyio
async def test_what_is_only_announced_holds_nothing(start_engine: Any, start_gateway: Any) -> None:
    gateway = await start_gateway(await start_engine(), max_body_bytes=LARGE)

    async def slow() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    announced = {"content-length": str(LARGE)}
    sending = [
        asyncio.create_task(gateway.client.post(
            gateway.url + "/v1/completions", data=slow(), headers=announced
        ))
        for _ in range(10)
    ]  # fmt: skip
    in_flight = "chairlift_gateway_requests_in_flight", "interactive"
    await gateway.until_sample(10, *in_flight)
    assert await status(gateway, SMALL) == 200
    for each in sending:
        each.cancel()
    await asyncio.gather(*sending, return_exceptions=True)


@pytest.mark.anyio
async def test_a_body_of_which_nothing_more_comes_is_refused_and_holds_nothing(
    start_engine: Any, start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_request, "LONGEST_PAUSE_S", 0.5)
    engine = await start_engine()
    gateway = await start_gateway(engine, max_body_bytes=LARGE)

    async def broken_off() -> AsyncIterator[bytes]:
        yield b"x" * (LARGE - 1)
        await asyncio.Event().wait()

    async def refused() -> None:
        announced = {"content-length": str(LARGE)}
        async with gateway.post(data=broken_off(), headers=announced) as answer:
            assert answer.status == 408
            assert (await answer.json())["error"]["code"] == "request_timeout"

    await asyncio.wait_for(asyncio.gather(refused(), refused()), 30)
    assert await status(gateway, SMALL) == 200
    assert len(engine.requests) == 1
