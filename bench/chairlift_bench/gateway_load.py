"""Streams asked for over plain sockets, as cheaply as Python can: for `bench_gateway`.

It understands as much of HTTP as an engine, a gateway and nginx write to it.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

PROMPT: Final = "Why is the sky blue on a day like this? " * 10
_END: Final = b"0\r\n\r\n"
_EVENT: Final = b"data: {"


class Refused(Exception):
    """It answered something else than a stream; the message holds its head."""


@dataclass(frozen=True, slots=True)
class Target:
    """host, port: whom to ask. key: an API key, where one is wanted."""

    name: str
    port: int
    key: str = "-"

    def request(self, num_tokens: int) -> bytes:
        body = json.dumps(
            {"model": "m", "prompt": PROMPT, "max_tokens": num_tokens, "stream": True}
        ).encode()
        return (
            f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\n"
            f"authorization: Bearer {self.key}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode() + body


@dataclass(slots=True)
class Told:
    """first_s: from the request to the first event, of each. num_events: of all."""

    first_s: list[float] = field(default_factory=list)
    num_events: int = 0


class _Connection(asyncio.Protocol):
    def __init__(self, told: Told) -> None:
        self._told = told
        self._done: asyncio.Future[None] | None = None
        self._asked_s: float | None = None
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def ask(self, request: bytes) -> None:
        """Return once the answer has ended. Raise Refused."""
        self._done = asyncio.get_running_loop().create_future()
        self._head = b""
        self._asked_s = time.perf_counter()
        self._transport.write(request)
        await self._done

    def data_received(self, data: bytes) -> None:
        assert self._done is not None
        num_events = data.count(_EVENT)
        self._told.num_events += num_events
        if self._asked_s is not None:
            self._head += data
            if b"\r\n\r\n" in self._head and not self._head.startswith(b"HTTP/1.1 200"):
                self._fail(self._head.decode("latin-1"))
                return
            if num_events:
                self._told.first_s.append(time.perf_counter() - self._asked_s)
                self._asked_s = None
        if data.endswith(_END) and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail("the connection was closed")

    def close(self) -> None:
        self._transport.close()

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(Refused(why))


class Client:
    """Keeps connections for what comes next; `told` is of all that was asked."""

    def __init__(self, target: Target) -> None:
        self.told = Told()
        self._target = target
        self._idle: list[_Connection] = []
        self._all: list[_Connection] = []

    async def ask(self, request: bytes) -> None:
        connection = self._idle.pop() if self._idle else await self._connect()
        await connection.ask(request)
        self._idle.append(connection)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self.told), "127.0.0.1", self._target.port
        )
        self._all.append(connection)
        return connection

    def close(self) -> None:
        for connection in self._all:
            connection.close()


async def steadily(
    target: Target, requests_per_s: float, duration_s: float, num_tokens: int
) -> Told:
    """Requests that arrive whatever the last one took."""
    request = target.request(num_tokens)
    begin_s = time.perf_counter()
    with closing(Client(target)) as client:
        async with asyncio.TaskGroup() as tasks:
            for number in range(round(duration_s * requests_per_s)):
                await asyncio.sleep(begin_s + number / requests_per_s - time.perf_counter())
                tasks.create_task(client.ask(request))
        return client.told


async def together(target: Target, num_streams: int, num_tokens: int) -> Told:
    """So many streams at the same time, all of one length."""
    request = target.request(num_tokens)
    with closing(Client(target)) as client:
        await asyncio.gather(*(client.ask(request) for _ in range(num_streams)))
        return client.told
