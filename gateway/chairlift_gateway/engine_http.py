"""One HTTP/1.1 connection to an engine, in callbacks: no task is woken for what comes. An answer's
head is handed on in the pass of the event loop in which it was read, what follows in its turn.

It knows no replicas and no clients. `engine_pool` opens and keeps connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import httptools

from chairlift_gateway.headers import RawHeader, find
from chairlift_gateway.turns import Turns

# Status line and headers.
MAX_HEAD_BYTES: Final = 64 * 1024
# A long body is given to the socket in pieces, so that it is not held a second time.
PIECE_BYTES: Final = 256 * 1024
# What waits for its turn of one answer; more is passed on at once.
MAX_LATER_BYTES: Final = 64 * 1024


class EngineFailed(Exception):
    """A replica gave no answer, or not all of one."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """Names of headers are lower case."""

    status: int
    headers: list[RawHeader]

    @property
    def is_event_stream(self) -> bool:
        kind = find(self.headers, b"content-type") or b""
        return kind.partition(b";")[0].strip().lower() == b"text/event-stream"


# Takes what has come of an answer's body, and whether that was the end of it.
Sink = Callable[[bytes, bool], None]
# Takes an answer's head; None where its body is not wanted.
HeadTaker = Callable[[AnswerHead, "EngineConnection"], Sink | None]


class EngineConnection(asyncio.Protocol):
    """One exchange at a time. Whatever its `HeadTaker` or `Sink` raises ends that, and the
    connection."""

    idle_since_s = 0.0
    _transport: asyncio.Transport

    def __init__(self, on_lost: Callable[[EngineConnection], None], turns: Turns) -> None:
        self._on_lost = on_lost
        self._turns = turns
        self._later = bytearray()
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._outcome: asyncio.Future[None] | None = None
        self._on_head: HeadTaker | None = None
        self._sink: Sink | None = None
        self._unsent = memoryview(b"")
        self._is_write_paused = False
        self._begin_answer()

    def _begin_answer(self) -> None:
        self._head: AnswerHead | None = None
        self._headers: list[RawHeader] = []
        self._parts: list[bytes] = []
        self._num_head_bytes = 0
        self._is_complete = self._keeps_alive = False

    @property
    def is_reusable(self) -> bool:
        return self._outcome is None and not self._transport.is_closing()

    @property
    def _is_asked(self) -> bool:
        return self._outcome is not None and not self._outcome.done()

    def ask(self, head: bytes, body: bytes, on_head: HeadTaker) -> asyncio.Future[None]:
        """Done once the answer has ended or is not wanted; it may hold EngineFailed, or what was
        raised by those that took it."""
        self._begin_answer()
        self._on_head = on_head
        self._outcome = outcome = self._loop.create_future()
        if len(body) <= PIECE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._unsent = memoryview(body)
            self._send_pieces()
        return outcome

    def pause(self) -> None:
        """Read nothing more until resumed."""
        self._transport.pause_reading()

    def resume(self) -> None:
        self._transport.resume_reading()

    def close(self) -> None:
        """At once; an engine ends what it does for a connection that is closed."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def eof_received(self) -> None:
        """Nothing more is sent either: an engine may read no more, and would be waited for."""
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unsent = memoryview(b"")
        self._parse_later()
        if self._is_asked:
            if exc is None and self._ends_with_the_connection():
                self._is_complete = True
                self._hand_on()
            else:
                self._fail(EngineFailed(f"it closed the connection ({exc or 'in good order'})"))
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        # Of a write that fails in this callback, asyncio ends the transport twice.
        self._loop.call_soon(self._send_pieces)

    def _send_pieces(self) -> None:
        while self._unsent and not (self._is_write_paused or self._transport.is_closing()):
            piece, self._unsent = self._unsent[:PIECE_BYTES], self._unsent[PIECE_BYTES:]
            self._transport.write(piece)

    def data_received(self, data: bytes) -> None:
        """A head is what a client waits for; what follows it takes its turn."""
        if not self._is_asked:
            self.close()
        elif self._sink is None:
            self._parse(data)
        else:
            has_turn = bool(self._later)
            self._later += data
            if not has_turn:
                self._turns.take(self._parse_later)
            if len(self._later) > MAX_LATER_BYTES:
                self._parse_later()

    def _parse_later(self) -> None:
        data, self._later = bytes(self._later), bytearray()
        if data and self._is_asked:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            reason = error.__context__ or error
            self._fail(EngineFailed(f"its answer is no HTTP/1.1: {reason!r}"))
            return
        if self._head is None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._fail(EngineFailed("its answer's head is too long"))
            return
        self._hand_on()

    def _hand_on(self) -> None:
        try:
            if self._on_head is not None:
                assert self._head is not None
                take, self._on_head = self._on_head, None
                self._sink = take(self._head, self)
                if self._sink is None:
                    self._settle()
                    self.close()
                    return
            assert self._sink is not None
            data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._sink(data, self._is_complete)
        except Exception as error:
            self._fail(error)
            return
        if self._is_complete:
            is_sent = not self._unsent and not self._transport.get_write_buffer_size()
            self._settle()
            if not (self._keeps_alive and is_sent):
                self.close()

    def _ends_with_the_connection(self) -> bool:
        """RFC 9112, 6.3: an answer that states no length, of which a good end is all there is."""
        if self._head is None:
            return False
        framing = (b"content-length", b"transfer-encoding")
        return not any(name in framing for name, _ in self._head.headers)

    def _settle(self) -> None:
        self._ended().set_result(None)
        self.resume()  # whoever paused it has nothing more to resume

    def _fail(self, error: Exception) -> None:
        self._ended().set_exception(error)
        self.close()

    def _ended(self) -> asyncio.Future[None]:
        assert self._outcome is not None
        outcome, self._outcome, self._sink = self._outcome, None, None
        return outcome

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise EngineFailed("it answers more than it was asked")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is None:  # else it is a trailer
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < HTTPStatus.OK:
            self._headers = []  # an interim answer, which the true one follows
        else:
            self._head = AnswerHead(status, self._headers)

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if self._head is not None:
            self._is_complete = True
            self._keeps_alive = self._parser.should_keep_alive()
