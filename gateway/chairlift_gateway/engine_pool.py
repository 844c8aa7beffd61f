"""Connections to engines, kept for the next request for less long than engines keep them.

It knows no replicas: an engine is an address. `upstream` and `engine_usage` ask.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from chairlift_gateway.engine_http import (
    AnswerHead,
    EngineConnection,
    EngineFailed,
    HeadTaker,
    Sink,
)
from chairlift_gateway.headers import RawHeader, written_head
from chairlift_gateway.turns import Turns

CONNECT_TIMEOUT_S: Final = 3.0
# Below the 5 s after which a stock uvicorn server closes an idle connection (our engine: 75 s), so
# that a request does not meet one that is just being closed.
KEEPALIVE_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """target: path and query, below the engine's URL. headers: without Host and Content-Length."""

    method: str
    target: str
    headers: Iterable[RawHeader] = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    head: AnswerHead
    body: bytes


@dataclass(frozen=True, slots=True)
class _Address:
    host: str
    port: int
    authority: bytes
    prefix: str


class EnginePool:
    def __init__(self) -> None:
        self._idle: defaultdict[str, list[EngineConnection]] = defaultdict(list)
        self._turns = Turns()
        self._sweeping: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def ask(self, url: str, request: EngineRequest, on_head: HeadTaker) -> None:
        """Return once the answer has ended, or is not wanted. Raise EngineFailed, or what those
        raised that took it. Cancelled, it closes the connection."""
        address = _address(url)
        head = _head(address, request)
        connection = self._take(url) or await self._connect(url, address)
        try:
            await connection.ask(head, request.body, on_head)
        finally:
            self._give_back(url, connection)

    async def fetch(
        self, url: str, request: EngineRequest, *, within_s: float, max_bytes: int
    ) -> WholeAnswer:
        """Raise EngineFailed."""
        answer = _Collected(max_bytes)
        try:
            async with asyncio.timeout(within_s):
                await self.ask(url, request, answer.begin)
        except TimeoutError:
            raise EngineFailed(f"it did not answer within {within_s:g} s") from None
        return answer.whole()

    def close(self) -> None:
        self._is_closed = True
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        if self._sweeping is not None:
            self._sweeping.cancel()

    def _take(self, url: str) -> EngineConnection | None:
        idle = self._idle.get(url)
        while idle:
            connection = idle.pop()
            if connection.is_reusable:
                return connection
        return None

    async def _connect(self, url: str, address: _Address) -> EngineConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: EngineConnection(lambda lost: self._forget(url, lost), self._turns),
                    address.host,
                    address.port,
                )
        except TimeoutError:
            raise EngineFailed(f"it took no connection within {CONNECT_TIMEOUT_S:g} s") from None
        except (OSError, UnicodeError) as error:  # the latter for a name that cannot be looked up
            raise EngineFailed(str(error)) from error
        return connection

    def _give_back(self, url: str, connection: EngineConnection) -> None:
        if self._is_closed or not connection.is_reusable:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle[url].append(connection)
        if self._sweeping is None:
            self._sweeping = loop.call_later(KEEPALIVE_S, self._sweep)

    def _forget(self, url: str, connection: EngineConnection) -> None:
        idle = self._idle.get(url, [])
        if connection in idle:
            idle.remove(connection)
            if not idle:
                del self._idle[url]

    def _sweep(self) -> None:
        """Close what has been idle for too long; the longest idle ones come first."""
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - KEEPALIVE_S
        for url, idle in list(self._idle.items()):
            kept = [each for each in idle if each.idle_since_s > oldest_s]
            for connection in idle[: len(idle) - len(kept)]:
                connection.close()
            if kept:
                self._idle[url] = kept
            else:
                del self._idle[url]
        self._sweeping = None
        if self._idle:
            first_s = min(idle[0].idle_since_s for idle in self._idle.values())
            self._sweeping = loop.call_at(first_s + KEEPALIVE_S, self._sweep)


class _Collected:
    """An answer as a whole."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._head: AnswerHead | None = None
        self._body = bytearray()

    def begin(self, head: AnswerHead, connection: EngineConnection) -> Sink:
        self._head = head
        return self._feed

    def whole(self) -> WholeAnswer:
        assert self._head is not None
        return WholeAnswer(self._head, bytes(self._body))

    def _feed(self, data: bytes, is_end: bool) -> None:
        self._body += data
        if len(self._body) > self._max_bytes:
            raise EngineFailed(f"its answer is longer than {self._max_bytes} bytes")


@lru_cache(maxsize=1024)
def _address(url: str) -> _Address:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return _Address(parts.hostname, parts.port or 80, parts.netloc.encode(), parts.path.rstrip("/"))


def _head(address: _Address, request: EngineRequest) -> bytes:
    target = address.prefix + request.target
    headers = [(b"host", address.authority), *request.headers]
    if request.body or request.method == "POST":
        headers.append((b"content-length", str(len(request.body)).encode()))
    first_line = f"{request.method} {target} HTTP/1.1".encode("latin-1")
    return written_head(first_line, headers)
