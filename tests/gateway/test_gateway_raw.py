"""The whole gateway between raw bytes on both sides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from chairlift_gateway import relay
from chairlift_gateway.metering import Metering

pytestmark = pytest.mark.anyio

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
LIVE = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
WHOLE = OK + b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
STREAM = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE_UNKNOWN = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def saying(*pieces: bytes) -> Any:
    """An engine's script, the same for each request."""

    async def script(side: Any) -> None:
        while await side.request():
            await side.say(*pieces)

    return script


async def test_odd_headers_reach_the_client_as_they_are_and_hop_by_hop_ones_do_not(
    start_scripted: Any, start_gateway: Any, connect: Any
) -> None:
    passed = [
        b"x-empty: ",
        b"set-cookie: a=1",
        b"set-cookie: b=2",
        b'x-odd: \xff"\t;,= "',
        b"!#: 1",
    ]
    stopped = [b"x-hop: 1", b"keep-alive: timeout=5", b"server: e", b"x-chairlift-secret: 1",
               b"date: then", b"te: x", b"trailer: x-late", b"x-request-id: its-own"]  # fmt: skip
    framing = [b"Connection: X-Hop, keep-alive", b"Content-Length:  2  ", b"", b"{}"]
    said = b"\r\n".join([OK[:-2], *passed, *stopped, *framing])
    connection = await connect(await start_gateway(await start_scripted(saying(said))))
    await connection.send(MODELS)
    head, body = await connection.answer()
    lines = head.split(b"\r\n")
    assert (lines[0], body) == (b"HTTP/1.1 200 OK", b"{}")
    assert [line for line in lines if line in passed] == passed
    assert set(stopped).isdisjoint(lines)
    names = [line.partition(b":")[0] for line in lines[1:-2]]
    assert sorted(set(names) - {each.partition(b":")[0] for each in passed}) == [
        b"content-length", b"date", b"x-request-id",
    ]  # fmt: skip


async def test_a_head_alone_is_asked_for_as_a_whole_and_told_without_its_body(
    start_scripted: Any, start_gateway: Any, connect: Any
) -> None:
    engine = await start_scripted(saying(WHOLE))
    connection = await connect(await start_gateway(engine))
    await connection.send(MODELS.replace(b"GET", b"HEAD"), MODELS)
    of_head, (of_get, body) = await connection.head(), await connection.answer()
    assert body == b"{}"
    assert [line.partition(b":")[0] for line in of_head.splitlines()] == [
        line.partition(b":")[0] for line in of_get.splitlines()
    ]
    assert b"content-length: 2\r\n" in of_head


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (MODELS.replace(b"GET", b"HEAD"), STREAM + chunk(DONE) + b"0\r\n\r\n"),
        (POST + b"{}", b"HTTP/1.1 204 No\r\nContent-Type: text/event-stream\r\n\r\n"),
    ],
    ids=["HEAD", "204"],
)
async def test_a_stream_where_no_body_may_be_is_a_head_alone(
    start_scripted: Any, start_gateway: Any, connect: Any, asked: bytes, said: bytes
) -> None:
    connection = await connect(await start_gateway(await start_scripted(saying(said))))
    await connection.send(asked, LIVE)
    assert b"transfer-encoding" not in await connection.head()
    head, body = await connection.answer()
    assert head.startswith(OK) and json.loads(body) == {"status": "alive"}


@pytest.mark.parametrize("more", [b"", b"Connection: keep-alive\r\n"])
async def test_a_client_of_1_0_gets_a_stream_that_ends_with_its_connection(
    start_scripted: Any, start_gateway: Any, connect: Any, token: Any, more: bytes
) -> None:
    events = [token("a"), token("b") + DONE]
    said = [STREAM, *map(chunk, events), b"0\r\n\r\n"]
    connection = await connect(await start_gateway(await start_scripted(saying(*said))))
    await connection.send(POST.replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\n" + more) + b"{}")
    head = await connection.head()
    assert b"connection: close\r\n" in head
    assert b"transfer-encoding" not in head and b"content-length" not in head
    assert await connection.rest() == b"".join(events)


async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked_once(
    start_scripted: Any, start_gateway: Any, connect: Any
) -> None:
    connection = await connect(await start_gateway(await start_scripted(saying(WHOLE))))
    expecting = POST.replace(b"Host", b"Expect: 100-continue\r\nHost")
    for _ in range(2):
        await connection.send(expecting)
        assert await connection.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await connection.send(b"{}")
        assert (await connection.answer())[0].startswith(OK)
    # Who did not wait is not asked.
    await connection.send(expecting + b"{}")
    assert (await connection.answer())[0].startswith(OK)


@pytest.mark.parametrize("length", [b"2", b"999999999"])
async def test_a_client_that_waits_to_be_asked_is_refused_without(
    start_gateway: Any, connect: Any, length: bytes
) -> None:
    connection = await connect(await start_gateway(serves_anonymous=length != b"2"))
    refused = POST.replace(b"Host", b"Expect: 100-continue\r\nHost")
    await connection.send(refused.replace(b"Length: 2", b"Length: " + length))
    assert (await connection.answer())[0].startswith((b"HTTP/1.1 401", b"HTTP/1.1 413"))


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_head_that_cannot_be_written_fails_its_request_alone(
    start_scripted: Any, start_gateway: Any, connect: Any, monkeypatch: pytest.MonkeyPatch,
    is_stream: bool,
) -> None:  # fmt: skip
    said = STREAM + chunk(DONE) + b"0\r\n\r\n" if is_stream else WHOLE
    gateway = await start_gateway(await start_scripted(saying(said)))
    connection = await connect(gateway)
    with monkeypatch.context() as patch:
        patch.setattr(relay, "towards_client", lambda headers: [(b"x", b"a\r\nb: c")])
        await connection.send(POST + b"{}")
        head, body = await connection.answer()
    assert head.startswith(b"HTTP/1.1 500")
    assert json.loads(body)["error"]["code"] == "internal_error"
    await connection.send(POST + b"{}")
    assert (await connection.head()).startswith(OK)
    assert ("chairlift_gateway_upstream_failures_total", "in_answer") in await gateway.samples()


def num_serving() -> int:
    running = (task.get_coro().__qualname__ for task in asyncio.all_tasks())  # type: ignore[union-attr]
    return sum(1 for name in running if name == "FrontDoor._run")


class Stages:
    """Where a request is when its client leaves."""

    SENT = {"in its head": POST[:-4], "in its body": POST + b"{"}
    SAID = {
        "before its answer": [],
        "in the head of its answer": [WHOLE[:-20]],
        "in a whole answer": [WHOLE[:-1]],
        "before the first event": [STREAM],
        "in a stream": [STREAM, chunk(b"data: 1\n\n"), b"3\r\nd"],
    }
    OTHERS = ("while it is reserved", "while it is held")


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stage", [*Stages.SENT, *Stages.OTHERS, *Stages.SAID])
async def test_of_a_client_that_leaves_nothing_is_left(
    start_scripted: Any, start_gateway: Any, connect: Any, until: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch, stage: str, how: str,
) -> None:  # fmt: skip
    reached, hung_up = asyncio.Event(), asyncio.Event()

    async def script(side: Any) -> None:
        if not (await side.request()).startswith(b"POST /v1/"):
            await side.say(USAGE_UNKNOWN)
            return
        await side.say(*Stages.SAID[stage])
        reached.set()
        await side.hung_up()
        hung_up.set()

    async def reserve(*_: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    if stage == "while it is reserved":
        monkeypatch.setattr(Metering, "admit", reserve)
    gateway = await start_gateway(*[await start_scripted(script)] * (stage != "while it is held"))
    connection = await connect(gateway)
    await connection.send(Stages.SENT.get(stage, POST + b"{}"))
    if stage in Stages.SAID or stage == "while it is reserved":
        await asyncio.wait_for(reached.wait(), 2)
    elif stage == "while it is held":
        await until(lambda: gateway.gateway._upstream._holding.num_held == 1)
    await until(lambda: gateway.server.num_connections > 0)
    await until(lambda: num_serving() == (stage != "in its head"))
    getattr(connection, how)()
    await until(lambda: gateway.server.num_connections == 0 and num_serving() == 0, within_s=2)
    if stage in Stages.SAID:
        await asyncio.wait_for(hung_up.wait(), 2)
    samples = await gateway.samples()
    assert samples["chairlift_gateway_requests_in_flight", "interactive"] == 0
    if stage != "in its head":
        assert samples["chairlift_gateway_responses_total", "interactive", "499"] == 1
    assert gateway.gateway._proxy._bodies.held_bytes == 0


async def test_a_client_that_asks_on_and_does_not_read_has_few_answers_held_for_it(
    start_scripted: Any, start_gateway: Any, connect: Any
) -> None:
    num_asked = 0
    large = b"x" * 2**23

    async def script(side: Any) -> None:
        nonlocal num_asked
        while await side.request():
            num_asked += 1
            await side.say(OK + b"Content-Length: %d\r\n\r\n" % len(large) + large)

    gateway = await start_gateway(await start_scripted(script))
    connection, other = await connect(gateway), await connect(gateway)
    await connection.send(MODELS * 10)
    for _ in range(100):
        await other.send(MODELS.replace(b"/v1/models", b"/health/live"))
        assert (await other.answer())[0].startswith(OK)
    assert 1 <= num_asked <= 2
    for _ in range(10):
        head, body = await connection.answer()
        assert head.startswith(OK) and body == large
    await connection.send(LIVE)
    assert (await connection.answer())[0].startswith(OK)
    assert num_asked == 10


async def test_a_request_behind_an_answer_that_is_not_read_is_answered_before_a_drain_ends(
    start_scripted: Any, start_gateway: Any, connect: Any
) -> None:
    large = b"x" * 2**23
    said = OK + b"Content-Length: %d\r\n\r\n" % len(large) + large
    gateway = await start_gateway(await start_scripted(saying(said)))
    one, two, other = [await connect(gateway) for _ in range(3)]
    await one.send(MODELS)
    await two.send(MODELS + LIVE)
    for _ in range(50):
        await other.send(LIVE)
        await other.answer()
    closing = asyncio.create_task(gateway.server.close(within_s=5))
    assert await other.rest() == b""
    assert (await one.answer())[1] == (await two.answer())[1] == large
    head, _ = await two.answer()
    assert head.startswith(OK) and b"connection: close\r\n" in head
    assert await one.rest() == await two.rest() == b""
    await asyncio.wait_for(closing, 2)
    assert gateway.server.num_connections == 0


async def test_a_server_that_closes_lets_streams_end_and_takes_nobody_new(
    start_scripted: Any, start_gateway: Any, connect: Any, token: Any
) -> None:
    may_end = asyncio.Event()

    async def script(side: Any) -> None:
        await side.request()
        await side.say(STREAM, chunk(token("a")))
        await may_end.wait()
        await side.say(chunk(token("b") + DONE), b"0\r\n\r\n")

    gateway = await start_gateway(await start_scripted(script))
    connection, idle = await connect(gateway), await connect(gateway)
    await connection.send(POST + b"{}")
    assert (await connection.head()).startswith(OK)
    closing = asyncio.create_task(gateway.server.close(within_s=5))
    assert await idle.rest() == b""
    with pytest.raises(ConnectionError):
        await connect(gateway)
    assert not closing.done()
    may_end.set()
    streamed = await connection.rest()
    assert streamed == chunk(token("a")) + chunk(token("b") + DONE) + b"0\r\n\r\n"
    await asyncio.wait_for(closing, 2)


async def test_a_server_that_closes_cuts_off_what_does_not_end(
    start_scripted: Any, start_gateway: Any, connect: Any
) -> None:
    asked, hung_up = asyncio.Event(), asyncio.Event()

    async def script(side: Any) -> None:
        if not (await side.request()).startswith(b"POST /v1/"):
            await side.say(USAGE_UNKNOWN)
            return
        asked.set()
        await side.hung_up()
        hung_up.set()

    gateway = await start_gateway(await start_scripted(script))
    connection = await connect(gateway)
    await connection.send(POST + b"{}")
    await asyncio.wait_for(asked.wait(), 2)
    await asyncio.wait_for(gateway.server.close(within_s=0.1), 2)
    assert (gateway.server.num_connections, num_serving()) == (0, 0)
    await asyncio.wait_for(hung_up.wait(), 2)
    assert await connection.rest() == b""
