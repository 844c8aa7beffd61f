"""A gateway and scripted engines on real loopback sockets, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from chairlift_gateway.app import Gateway, open_gateway
from chairlift_gateway.config import GatewayConfig
from chairlift_gateway.endpoints import FileEndpoints
from chairlift_gateway.engine_pool import EnginePool
from chairlift_gateway.server import Server
from chairlift_protocol.load import Load
from chairlift_protocol.wire import INTERNAL_TOKEN_HEADER, LOAD_HEADER, LOAD_PATH, USAGE_PATH

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Wait for a condition that nothing announces."""

    async def wait(condition: Callable[[], bool], within_s: float = 5.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.005)

    return wait


@dataclass
class FakeEngine:
    """Answers as `handler` says and remembers what it was asked.

    used: tokens of prompt and answer of every request, for gateways that ask; empty of one that
    knows no request, None of an engine that cannot be asked. is_final: no token comes on top; None
    of an engine that does not say.
    """

    name: str
    handler: Handler
    url: str = ""
    requests: list[web.Request] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    lend_share: float = 1.0
    used: tuple[int, ...] | None = None
    is_final: bool | None = True
    usage_asked: list[dict[str, Any]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == LOAD_PATH:
            load = Load(0, 0, 0, 0, self.lend_share, (0, 0), False)
            return web.json_response(load.to_json(), headers={LOAD_HEADER: load.to_header()})
        if request.path == USAGE_PATH:
            return await self._usage(request)
        self.requests.append(request)
        self.bodies.append(await request.read())
        self.asked.set()
        try:
            return await self.handler(request)
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def _usage(self, request: web.Request) -> web.StreamResponse:
        assert request.headers[INTERNAL_TOKEN_HEADER] == "pool-token"
        asked = await request.json()
        self.usage_asked.append(asked)
        if self.used is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        if not self.used:
            return web.json_response({"used": {}})
        told = dict(zip(("prompt_tokens", "completion_tokens"), self.used, strict=True))
        said = told if self.is_final is None else {**told, "final": self.is_final}
        return web.json_response({"used": dict.fromkeys(asked["requests"], said)})


async def _say_ok(request: web.Request) -> web.StreamResponse:
    return web.json_response({"object": "text_completion"})


@pytest.fixture
async def start_engine() -> AsyncIterator[Callable[..., Awaitable[FakeEngine]]]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(handler: Handler = _say_ok, name: str = "r0") -> FakeEngine:
            engine = FakeEngine(name, handler)
            app = web.Application(client_max_size=2**26)
            app.router.add_route("*", "/{path:.*}", engine.answer)
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            return engine

        yield start


def _reset(writer: asyncio.StreamWriter) -> None:
    told = writer.get_extra_info("socket")
    told.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class EngineSide:
    """An engine's end of one connection, in raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    async def request(self) -> bytes:
        """The next one as it came, with its body; raise IncompleteReadError where none comes."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        _, _, behind = head.partition(b"content-length: ")
        return head + await self.reader.readexactly(int(behind.partition(b"\r")[0] or b"0"))

    async def say(self, *pieces: bytes) -> None:
        """Each in a packet of its own."""
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()
            for _ in range(2):  # passes of the event loop: in the second one it is read
                await asyncio.sleep(0)

    async def hung_up(self) -> None:
        """Until the gateway has closed it."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass

    def send(self, data: bytes) -> None:
        """Without a pass of the event loop until what is done next."""
        self._writer.write(data)

    def say_no_more(self) -> None:
        self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        _reset(self._writer)

    def abort(self) -> None:
        self._writer.transport.abort()


Script = Callable[[EngineSide], Awaitable[None]]


@dataclass
class ScriptedEngine:
    """connections: each was closed by it where its script has ended."""

    script: Script
    name: str
    url: str = ""
    connections: list[EngineSide] = field(default_factory=list)
    running: set[asyncio.Task[None]] = field(default_factory=set)

    def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(EngineSide(reader, writer))
        self.running.add(asyncio.create_task(self._serve(self.connections[-1])))

    async def _serve(self, side: EngineSide) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self.script(side)
        finally:
            side.close()

    async def end(self) -> None:
        for task in self.running:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            for task in self.running:
                await task
        for side in self.connections:
            side.abort()
        await asyncio.sleep(0)  # in which they are closed


@pytest.fixture
async def start_scripted() -> AsyncIterator[Callable[..., Awaitable[ScriptedEngine]]]:
    """An engine that says byte by byte what its script does; a script that fails fails the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            script: Script, name: str = "r0", host: str = "127.0.0.1"
        ) -> ScriptedEngine:
            engine = ScriptedEngine(script, name)
            server = await asyncio.start_server(engine.take, host, 0)
            stack.callback(server.close)
            stack.push_async_callback(engine.end)
            port = server.sockets[0].getsockname()[1]
            engine.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            return engine

        yield start


@pytest.fixture
def write_endpoints(tmp_path: Path) -> Callable[..., Path]:
    """Replace the list of replicas as a supervisor does."""
    path = tmp_path / "endpoints.json"

    def write(*engines: Any) -> Path:
        listed = [{"name": engine.name, "url": engine.url} for engine in engines]
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({"replicas": listed}))
        os.replace(fresh, path)
        return path

    return write


@dataclass
class RunningGateway:
    url: str
    gateway: Gateway
    server: Server
    client: aiohttp.ClientSession

    def post(self, path: str = "/v1/completions", **kwargs: Any) -> Any:
        return self.client.post(self.url + path, **{"data": b"{}", **kwargs})

    async def samples(self) -> dict[tuple[str, ...], float]:
        """Every sample of /metrics by its name and the values of its labels."""
        async with self.client.get(self.url + "/metrics") as response:
            assert response.status == 200
            families = text_string_to_metric_families(await response.text())
            return {
                (sample.name, *sample.labels.values()): sample.value
                for family in families
                for sample in family.samples
            }

    async def until_sample(self, expected: float, *key: str) -> None:
        deadline_s = time.monotonic() + 5
        while (seen := (await self.samples()).get(key)) != expected:
            assert time.monotonic() < deadline_s, f"{key} is {seen}, not {expected}"


@contextlib.asynccontextmanager
async def _served(gateway: Gateway) -> AsyncIterator[tuple[str, Server]]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(gateway.serve)
    await server.listen(listener)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        await server.close(within_s=5)


@pytest.fixture
async def start_gateway(
    write_endpoints: Callable[..., Path],
) -> AsyncIterator[Callable[..., Awaitable[RunningGateway]]]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(*engines: Any, **settings: Any) -> RunningGateway:
            path = write_endpoints(*engines)
            config = GatewayConfig(endpoints_path=path, internal_token="pool-token", **settings)
            gateway = await stack.enter_async_context(open_gateway(config, FileEndpoints(path)))
            url, server = await stack.enter_async_context(_served(gateway))
            client = await stack.enter_async_context(aiohttp.ClientSession())
            return RunningGateway(url, gateway, server, client)

        yield start


class Connection:
    """A client's, in raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, *pieces: bytes) -> None:
        """Each in a packet of its own."""
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()
            await asyncio.sleep(0)

    async def head(self) -> bytes:
        return await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 5)

    async def answer(self) -> tuple[bytes, bytes]:
        head = await self.head()
        length = next(
            int(line.split(b":")[1])
            for line in head.splitlines()
            if line.lower().startswith(b"content-length")
        )
        return head, await self._reader.readexactly(length)

    async def rest(self) -> bytes:
        """Until it is closed."""
        return await asyncio.wait_for(self._reader.read(), 5)

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        _reset(self._writer)


@pytest.fixture
async def connect() -> Any:
    """Its side holds little of what it does not read."""
    opened: list[Connection] = []

    async def connect(gateway: Any) -> Connection:
        taker = socket.socket()
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        taker.setblocking(False)
        address = ("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        try:
            await asyncio.get_running_loop().sock_connect(taker, address)
        except OSError:
            taker.close()
            raise
        opened.append(Connection(*await asyncio.open_connection(sock=taker)))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
async def pool() -> AsyncIterator[EnginePool]:
    """Connections to engines, without a gateway."""
    pool = EnginePool()
    yield pool
    pool.close()


@pytest.fixture
def unused_url() -> str:
    """Where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def sse() -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """The head of a streamed answer; the handler writes the events."""

    async def prepare(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        return response

    return prepare


@pytest.fixture
def token() -> Callable[[str], bytes]:
    """A completion's event with that text."""

    def event(text: str) -> bytes:
        choice = {"index": 0, "text": text, "finish_reason": None}
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    return event


@pytest.fixture
def never() -> Handler:
    """An engine's, of one that hangs."""

    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    return hang


@pytest.fixture
def endless(sse: Any, token: Any, never: Handler) -> Handler:
    """An engine's, of one that hangs after a first token."""

    async def begin(request: web.Request) -> web.StreamResponse:
        response = await sse(request)
        await response.write(token("a"))
        return await never(request)

    return begin
