"""What clients may send on a connection, byte by byte."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from chairlift_gateway import client_request, front_door, server
from chairlift_gateway.client_request import ClientRequest
from chairlift_gateway.front_door import (
    MAX_DROPPED_BYTES,
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    FrontDoor,
)
from chairlift_gateway.server import Server

pytestmark = pytest.mark.anyio

REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
LIVE = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
OK = b"HTTP/1.1 200"


def code_of(body: bytes) -> str:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["code"])


LONG = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"


@pytest.mark.parametrize(
    "head",
    [
        LONG + b"X-Long: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n{}",
        LONG + b"X-Short: a\r\n" * (MAX_HEAD_BYTES // 8) + b"\r\n{}",
        b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        LONG + b"X-Endless: " + b"a" * 16 * MAX_HEAD_BYTES,
        LONG + b"X-Endless: a\r\n" * MAX_HEAD_BYTES,
    ],
    ids=["one long header", "many headers", "a long path", "no end of one", "no end of many"],
)
async def test_a_head_over_the_bound_is_refused_and_the_connection_closed(
    start_engine: Any, start_gateway: Any, connect: Any, head: bytes
) -> None:
    engine = await start_engine()
    connection = await connect(await start_gateway(engine))
    await connection.send(head)
    told, body = await connection.answer()
    assert told.startswith(b"HTTP/1.1 431") and code_of(body) == "headers_too_large"
    assert b"connection: close" in told
    assert await connection.rest() == b""
    assert engine.requests == []


async def test_a_head_below_the_bound_passes_also_behind_a_long_body(
    start_engine: Any, start_gateway: Any, connect: Any
) -> None:
    engine = await start_engine()
    connection = await connect(await start_gateway(engine))
    long = b"".join(b"X-%d: %s\r\n" % (number, b"a" * 6000) for number in range(10))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%bContent-Length: 200000\r\n\r\n"
    for _ in range(2):
        request = head % long + b"x" * 200_000
        await connection.send(request[:50_000], request[50_000:] + head[:20])
        assert (await connection.answer())[0].startswith(OK)
        await connection.send(head[20:] % long, b"x" * 200_000)
        assert (await connection.answer())[0].startswith(OK)
    assert [len(body) for body in engine.bodies] == [200_000] * 4


UPGRADE = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(
    "framed",
    [
        b'Content-Length: 15\r\n\r\n{"prompt": "a"}',
        b'Transfer-Encoding: chunked\r\n\r\na\r\n{"prompt":\r\n5\r\n "a"}\r\n0\r\n\r\n',
    ],
)
async def test_a_request_that_would_like_to_upgrade_is_answered_as_http_1_1(
    start_engine: Any, start_gateway: Any, connect: Any, framed: bytes, is_split: bool
) -> None:
    """Java's HttpClient asks so with each of its requests."""
    engine = await start_engine()
    connection = await connect(await start_gateway(engine))
    request = UPGRADE + framed
    for _ in range(2):
        pieces = [request[i : i + 40] for i in range(0, len(request), 40)]
        await connection.send(*(pieces if is_split else [request]))
        assert (await connection.answer())[0].startswith(OK)
    assert engine.bodies == [b'{"prompt": "a"}'] * 2
    assert {"Upgrade", "HTTP2-Settings"}.isdisjoint(engine.requests[0].headers)


async def test_a_tunnel_is_refused(start_gateway: Any, connect: Any) -> None:
    connection = await connect(await start_gateway())
    await connection.send(b"CONNECT example:443 HTTP/1.1\r\nHost: example:443\r\n\r\n")
    told, body = await connection.answer()
    assert told.startswith(b"HTTP/1.1 400") and code_of(body) == "invalid_http"
    assert await connection.rest() == b""


@pytest.fixture
def gate() -> Any:
    class Gate:
        def __init__(self) -> None:
            self.may_answer = asyncio.Event()

        async def handler(self, request: web.Request) -> web.StreamResponse:
            await self.may_answer.wait()
            return web.json_response({"path": request.path})

    return Gate()


JUNK = [
    b"\x00\xff not http \r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: ten\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 4 * MAX_HEAD_BYTES,
]


@pytest.mark.parametrize("junk", JUNK, ids=["no request", "a bad length", "a bad chunk", "a head"])
@pytest.mark.parametrize("is_at_once", [True, False])
async def test_a_request_has_its_own_answer_whatever_comes_behind_it(
    start_engine: Any, start_gateway: Any, connect: Any, gate: Any, junk: bytes, is_at_once: bool
) -> None:
    engine = await start_engine(gate.handler)
    connection = await connect(await start_gateway(engine))
    await connection.send(*([REQUEST + junk] if is_at_once else [REQUEST, junk]))
    await asyncio.wait_for(engine.asked.wait(), 5)
    await connection.send(b"more of it")
    gate.may_answer.set()
    told, body = await connection.answer()
    assert told.startswith(OK) and json.loads(body)["path"] == "/v1/completions"
    assert await connection.rest() == b""
    assert len(engine.requests) == 1


async def test_a_body_that_breaks_off_its_framing_is_refused_and_reaches_no_engine(
    start_engine: Any, start_gateway: Any, connect: Any
) -> None:
    engine = await start_engine()
    connection = await connect(await start_gateway(engine))
    await connection.send(JUNK[2])
    told, body = await connection.answer()
    assert told.startswith(b"HTTP/1.1 400") and code_of(body) == "invalid_http"
    assert await connection.rest() == b""
    assert engine.requests == []


async def test_requests_sent_ahead_are_answered_in_order_as_far_as_they_are_few(
    start_engine: Any, start_gateway: Any, connect: Any, gate: Any
) -> None:
    engine = await start_engine(gate.handler)
    connection = await connect(await start_gateway(engine))
    await connection.send(REQUEST + LIVE * MAX_PIPELINED)
    gate.may_answer.set()
    for _ in range(MAX_PIPELINED + 1):
        assert (await connection.answer())[0].startswith(OK)
    gate.may_answer.clear()
    engine.asked.clear()
    await connection.send(REQUEST + LIVE * 10 * MAX_PIPELINED)
    await asyncio.wait_for(engine.asked.wait(), 5)
    gate.may_answer.set()
    for _ in range(MAX_PIPELINED + 1):
        assert (await connection.answer())[0].startswith(OK)
    assert await connection.rest() == b""


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_what_follows_a_body_is_no_header(
    start_engine: Any, start_gateway: Any, connect: Any
) -> None:
    engine = await start_engine()
    connection = await connect(await start_gateway(engine))
    await connection.send(CHUNKED + b"2\r\n{}\r\n", b"0\r\nX-Late: 1\r\nAuthorization: a\r\n\r\n")
    assert (await connection.answer())[0].startswith(OK)
    assert "X-Late" not in engine.requests[0].headers
    await connection.send(CHUNKED + b"2\r\n{}\r\n0\r\n" + b"X-Late: 1\r\n" * MAX_HEAD_BYTES)
    assert (await connection.answer())[0].startswith(b"HTTP/1.1 431")
    assert len(engine.requests) == 1


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@pytest.mark.parametrize(("num_bytes", "status"), [(10 * 2**20, b"401"), (10 * 2**20 + 1, b"413")])
async def test_a_client_that_sends_all_before_it_reads_still_gets_its_refusal(
    start_engine: Any, start_gateway: Any, connection: str, num_bytes: int, status: bytes
) -> None:
    """As many do; a connection closed under them would be all that they see."""
    gateway = await start_gateway(await start_engine(), serves_anonymous=status == b"413")
    port = int(gateway.url.rpartition(":")[2])
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: %b\r\n" % connection.encode()
    head += b"Content-Length: %d\r\n\r\n" % num_bytes

    def post() -> bytes:
        with socket.create_connection(("127.0.0.1", port), 5) as client:
            client.sendall(head)
            for _ in range(num_bytes // 2**20):
                client.sendall(b"x" * 2**20)
            client.sendall(b"x" * (num_bytes % 2**20))
            told = client.recv(65536)
            if connection == "close":
                while more := client.recv(65536):
                    told += more
            else:
                client.sendall(LIVE)
                assert client.recv(65536).startswith(OK)
            return told

    assert (await asyncio.to_thread(post)).startswith(b"HTTP/1.1 " + status)


@pytest.fixture
async def refusing() -> AsyncIterator[SimpleNamespace]:
    """A server that refuses all, and closes a connection that is idle for a second."""

    async def refuse(request: ClientRequest) -> None:
        request.respond(401, [], b"no")

    listener = socket.create_server(("127.0.0.1", 0))
    served = Server(refuse, keepalive_s=1)
    await served.listen(listener)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    yield SimpleNamespace(url=url, server=served)
    await served.close(within_s=5)


async def test_a_connection_that_is_idle_after_a_refused_body_is_closed(
    refusing: Any, connect: Any
) -> None:
    connection = await connect(refusing)
    await connection.send(REQUEST[:-2])
    assert (await connection.answer())[0].startswith(b"HTTP/1.1 401")
    await connection.send(REQUEST[-2:])
    assert await connection.rest() == b""


async def test_a_client_that_does_not_hang_up_after_its_refusal_is_cut_off_in_time(
    refusing: Any, connect: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_door, "LINGER_S", 0.1)
    connection = await connect(refusing)
    await connection.send(JUNK[0])
    assert (await connection.answer())[0].startswith(b"HTTP/1.1 400")
    assert await connection.rest() == b""
    await until(lambda: refusing.server.num_connections == 0)


async def test_a_client_that_hangs_up_before_it_is_refused_is_no_failure_of_the_gateways(
    refusing: Any, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    port = int(refusing.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(REQUEST[:-2].replace(b"Host: x", b"Connection: close"))
    connection = await connect(refusing)
    await connection.send(REQUEST)
    assert (await connection.answer())[0].startswith(b"HTTP/1.1 401")
    assert refusing.server.num_connections == 1
    assert caplog.records == []


async def test_what_was_dropped_of_one_request_does_not_count_for_the_next(
    refusing: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_door, "MAX_DROPPED_BYTES", 1000)
    connection = await connect(refusing)
    for _ in range(3):
        await connection.send(CHUNKED)
        assert (await connection.answer())[0].startswith(b"HTTP/1.1 401")
        await connection.send(b"258\r\n" + b"x" * 600 + b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("behind", [REQUEST, REQUEST[:-1]], ids=["a request", "part of one"])
async def test_a_client_that_leaves_is_noticed_behind_what_it_sent_ahead(
    start_engine: Any, never: Any, start_gateway: Any, connect: Any, behind: bytes
) -> None:
    engine = await start_engine(never)
    connection = await connect(await start_gateway(engine))
    await connection.send(REQUEST + behind)
    await engine.asked.wait()
    connection.close()
    async with asyncio.timeout(5):
        await engine.left.wait()
    assert len(engine.requests) == 1


async def test_a_client_that_leaves_is_noticed_behind_a_whole_body_that_came_early(
    start_engine: Any, never: Any, start_gateway: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_request, "MAX_EARLY_BYTES", 1)
    engine = await start_engine(never)
    connection = await connect(await start_gateway(engine))
    await connection.send(REQUEST)
    await engine.asked.wait()
    connection.close()
    async with asyncio.timeout(5):
        await engine.left.wait()


async def test_a_connection_that_is_being_made_holds_no_drain(
    refusing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_made = asyncio.Event()

    def make(*arguments: Any) -> FrontDoor:
        is_made.set()  # and its connection_made is called after what waits for this
        return FrontDoor(*arguments)

    monkeypatch.setattr(server, "FrontDoor", make)
    address = ("127.0.0.1", int(refusing.url.rpartition(":")[2]))
    with socket.create_connection(address) as client:
        client.setblocking(False)
        async with asyncio.timeout(5):
            await is_made.wait()
            await refusing.server.close(within_s=60)
            assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


@pytest.mark.parametrize("begun", [b"", REQUEST[:9]], ids=["nothing", "half a head"])
@pytest.mark.parametrize("num_before", [0, 1])
async def test_a_connection_on_which_no_request_comes_is_closed(
    refusing: Any, connect: Any, num_before: int, begun: bytes
) -> None:
    connection = await connect(refusing)
    for _ in range(num_before):
        await connection.send(REQUEST)
        assert (await connection.answer())[0].startswith(b"HTTP/1.1 401")
    await connection.send(begun)
    assert await connection.rest() == b""


async def test_a_client_that_goes_on_for_ever_is_cut_off(start_gateway: Any, connect: Any) -> None:
    connection = await connect(await start_gateway(serves_anonymous=False))
    await connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                          b"Content-Length: 1000000000000\r\n\r\n")  # fmt: skip
    assert (await connection.answer())[0].startswith(b"HTTP/1.1 401")
    with pytest.raises(ConnectionError):
        for _ in range(2 * MAX_DROPPED_BYTES // 2**20):
            await connection.send(b"x" * 2**20)
