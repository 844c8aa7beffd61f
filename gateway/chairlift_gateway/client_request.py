"""One request on a client's connection: its body as it is read, its answer as it is written.

`front_door` reads and writes for it; whoever serves it sees nothing else of the connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final, Protocol, Self
from urllib.parse import unquote

import httptools

from chairlift_gateway.body_memory import HeldBody
from chairlift_gateway.headers import RawHeader, find, written_head
from chairlift_gateway.openai_errors import Refusal, too_large, too_slow

# Between two parts of a body. A client that vanished without a word would hold what it has sent,
# and a drain, for as long as the process lives.
LONGEST_PAUSE_S: Final = 60.0
# Of a body that nobody has begun to read; then the connection is left full.
MAX_EARLY_BYTES: Final = 64 * 1024
_BODYLESS: Final = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)


class ClientLeft(Exception):
    """Nobody is there any more to take the answer."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Names of headers are lower case; path without what is escaped in it, query as it came."""

    method: str
    path: str
    query: str
    headers: list[RawHeader]
    http_version: str = "1.1"

    @classmethod
    def read(cls, method: bytes, url: bytes, headers: list[RawHeader], version: str) -> Self:
        """url: as it stands in the request line."""
        parsed = httptools.parse_url(url)
        path = parsed.path.decode("ascii")
        query = (parsed.query or b"").decode("latin-1")
        return cls(method.decode("ascii"), unquote(path), query, headers, version)


class Source(Protocol):
    """Where an answer comes from, that need not come faster than the client takes it."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Line(Protocol):
    """A request's connection."""

    @property
    def is_write_paused(self) -> bool: ...

    def write(self, data: bytes) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def answered(self, request: ClientRequest) -> None: ...


class ClientRequest:
    """is_whole: its body was read to the end. keeps_alive: its connection outlives it."""

    def __init__(self, head: RequestHead, line: Line, *, keeps_alive: bool) -> None:
        self.head = head
        self.keeps_alive = keeps_alive
        self.is_whole = self.is_started = self.is_complete = self.is_left = False
        self._line = line
        self._serving: asyncio.Task[None] | None = None
        self._early = bytearray()
        self._body: HeldBody | None = None
        self._limit_bytes = 0
        self._read: asyncio.Future[None] | None = None
        self._last_part_s = 0.0
        self._pausing: asyncio.TimerHandle | None = None
        self._source: Source | None = None
        self._unsent = b""
        self._is_chunked = False

    # What the connection calls.

    def served_by(self, task: asyncio.Task[None]) -> None:
        self._serving = task

    def feed(self, part: bytes) -> None:
        if self._read is None:
            self._early += part
            if len(self._early) > MAX_EARLY_BYTES:
                self._line.pause_reading()
            return
        self._last_part_s = asyncio.get_running_loop().time()
        self._add(part)

    def end_body(self) -> None:
        self.is_whole = True
        if self._read is not None and not self._read.done():
            self._read.set_result(None)

    def leave(self) -> None:
        """The client is gone, or will get no answer of this request's own."""
        if self.is_complete or self.is_left:
            return
        self.is_left = True
        if self._read is not None and not self._read.done():
            self._read.set_exception(ClientLeft())
        elif self._serving is not None:
            self._serving.cancel()

    def pause(self) -> None:
        if self._source is not None:
            self._source.pause()

    def resume(self) -> None:
        if self._source is not None:
            self._source.resume()

    # What whoever serves it calls.

    async def read_body(self, body: HeldBody, limit_bytes: int) -> None:
        """Raise Refusal or ClientLeft."""
        stated = find(self.head.headers, b"content-length")
        if stated is not None and int(stated) > limit_bytes:
            raise too_large(limit_bytes)
        self._body, self._limit_bytes = body, limit_bytes
        self._read = asyncio.get_running_loop().create_future()
        self._add(bytes(self._early))
        self._early = bytearray()
        self._line.resume_reading()  # Also behind a whole body: that its client leaves is read.
        if self.is_whole and not self._read.done():
            self._read.set_result(None)
        if not self._read.done():
            self._expect_more()
        try:
            await self._read
        finally:
            if self._pausing is not None:
                self._pausing.cancel()
        body.seal()

    def pace(self, source: Source) -> None:
        """Have it paused while the client does not take what came from it."""
        self._source = source
        if self._line.is_write_paused:
            source.pause()

    def has_no_body(self, status: int) -> bool:
        return self.head.method == "HEAD" or status in _BODYLESS

    def respond(self, status: int, headers: Sequence[RawHeader], body: bytes) -> None:
        if status not in _BODYLESS:
            headers = [*headers, (b"content-length", str(len(body)).encode())]
        head = self._head(status, headers)
        self.is_started = True
        self._write(head + (b"" if self.has_no_body(status) else body))
        self._complete()

    def refuse(self, refusal: Refusal) -> None:
        self.respond(refusal.status, refusal.headers(), refusal.body())

    def begin(self, status: int, headers: Sequence[RawHeader]) -> None:
        """A body of unknown length follows; the head goes with its first part. Raise ValueError,
        as `respond` does, for a header that is none; then nothing has begun."""
        self._is_chunked = self.head.http_version != "1.0"
        if self._is_chunked:
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        else:
            self.keeps_alive = False
        self._unsent = self._head(status, headers)
        self.is_started = True

    def write(self, part: bytes) -> None:
        if part or self._unsent:
            self._write(self._unsent + self._framed(part))
            self._unsent = b""

    def end(self, part: bytes = b"") -> None:
        last = b"0\r\n\r\n" if self._is_chunked else b""
        self._write(self._unsent + self._framed(part) + last)
        self._unsent = b""
        self._complete()

    def _add(self, part: bytes) -> None:
        assert self._body is not None and self._read is not None
        if self._read.done():
            return
        try:
            self._body.add(part)
            if self._body.num_bytes > self._limit_bytes:
                raise too_large(self._limit_bytes)
        except Refusal as refusal:
            self._read.set_exception(refusal)

    def _expect_more(self) -> None:
        expected = find(self.head.headers, b"expect") or b""
        if expected.lower() == b"100-continue" and self.head.http_version != "1.0":
            self._line.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._last_part_s = asyncio.get_running_loop().time()
        self._end_pause()

    def _end_pause(self) -> None:
        assert self._read is not None
        loop = asyncio.get_running_loop()
        left_s = self._last_part_s + LONGEST_PAUSE_S - loop.time()
        if left_s > 0:
            self._pausing = loop.call_later(left_s, self._end_pause)
        elif not self._read.done():
            self._read.set_exception(too_slow(LONGEST_PAUSE_S))

    def _framed(self, part: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(part), part) if part and self._is_chunked else part

    def _head(self, status: int, headers: Sequence[RawHeader]) -> bytes:
        more = [(b"date", _date(int(time.time())))]
        if not self.keeps_alive:
            more.append((b"connection", b"close"))
        return written_head(_status_line(status), [*more, *headers])

    def _write(self, data: bytes) -> None:
        if not self.is_left:
            self._line.write(data)

    def _complete(self) -> None:
        self.is_complete = True
        self._source = None
        if not self.is_left:
            self._line.answered(self)


@lru_cache(maxsize=1)
def _date(now_s: int) -> bytes:
    return formatdate(now_s, usegmt=True).encode()


@lru_cache(maxsize=64)
def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}".encode()
