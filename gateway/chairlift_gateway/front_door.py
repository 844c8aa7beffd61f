"""A client's connection as uvicorn reads it, with what uvicorn leaves open: a bound on what is read
of a head, and on how long one is waited for, `Upgrade`, and bytes that are no request.

What was read whole gets its own answer first; then what cannot be read is refused in the shape of
OpenAI's errors, and the connection closed. It knows no paths and no tenants. `__main__` gives it to
uvicorn.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from chairlift_gateway.openai_errors import Refusal

# Request line and headers; that of others is 8 to 64 KiB.
MAX_HEAD_BYTES: Final = 64 * 1024
# Whole requests that wait for the answer of the one before.
MAX_PIPELINED: Final = 16
# A client that is still sending when it has its answer may not have read that yet, and a closed
# connection would take it away. So this much is read on and dropped, for so long.
MAX_DROPPED_BYTES: Final = 64 * 1024 * 1024
LINGER_S: Final = 10.0


class FrontDoor(HttpToolsProtocol):
    """A callback of the parser that raises ends the reading, with the `Refusal` that it raised."""

    is_over = False  # What comes is dropped.
    _running: RequestResponseCycle | None = None
    # Without a body in between; what was given at a time with the end of one is not counted.
    _num_head_bytes = 0
    _num_dropped_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_more()

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn tells the newest request alone, which may still wait."""
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self.is_over:
            self._drop(len(data))
            return
        self._unset_keepalive_if_required()
        self._num_head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            self._read_on_without_upgrade(data[stop.args[0] :])
            return
        except httptools.HttpParserError as error:
            reason = error.__context__
            self._refuse(reason if isinstance(reason, Refusal) else _not_http())
            return
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())
            return
        self._expect_more()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes = 0
        self._num_dropped_bytes = 0

    def on_headers_complete(self) -> None:
        self._num_head_bytes = 0
        if len(self.url) + sum(len(n) + len(v) for n, v in self.headers) > MAX_HEAD_BYTES:
            raise _head_too_large()
        if self.parser.should_upgrade():
            return  # The parser stops here.
        super().on_headers_complete()
        self.headers = []  # Trailers go there, not to the headers that were already judged.
        if not self.cycle.keep_alive:
            self.cycle.transport = _Ending(self, self.cycle)
        if len(self.pipeline) > MAX_PIPELINED:
            raise _too_many_at_once()
        if self.pipeline:
            self.flow.resume_reading()  # Else nobody would notice that the client has left.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        if self.cycle.response_complete:
            self._drop(len(body))
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _expect_more(self) -> None:
        """Whoever began no request, or one and did not go on, is not waited for any longer than
        between two requests."""
        if self.cycle is None or self.cycle.response_complete:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def linger(self) -> None:
        """Close once the client has read its answer, or has had the time to."""
        self.is_over = True
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _read_on_without_upgrade(self, rest: bytes) -> None:
        """RFC 9110, 7.8: a server may ignore `Upgrade`, which Java's clients send with each
        request. The parser cannot, and takes the body for another protocol; so the head is given
        to a new one without it."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(_not_http())
            return
        head = [method, b" ", self.url, b" HTTP/", self.parser.get_http_version().encode(), b"\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"".join([*head, b"\r\n", rest]))

    def _refuse(self, refusal: Refusal) -> None:
        self.is_over = True
        last: RequestResponseCycle | None = self.cycle
        if self.pipeline and last is not None and last.more_body:
            self.pipeline.popleft()  # It waits, and will never be whole.
            last = self.pipeline[0][0] if self.pipeline else self._running
        if last is None or last.response_complete:
            self._answer(refusal)
        elif last.more_body and not last.response_started:
            last.disconnected = True
            last.message_event.set()
            self._answer(refusal)
        else:
            last.keep_alive = False
            last.transport = _Ending(self, last)

    def _answer(self, refusal: Refusal) -> None:
        body = refusal.body()
        headers = [
            *self.server_state.default_headers,
            *refusal.headers(),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self.transport.write(STATUS_LINE[refusal.status] + lines + b"\r\n" + body)
        self.linger()

    def _drop(self, num_bytes: int) -> None:
        self._num_dropped_bytes += num_bytes
        if self._num_dropped_bytes > MAX_DROPPED_BYTES:
            self.transport.close()


class _Ending(asyncio.Transport):
    """What a request writes to whose answer is the last of its connection."""

    def __init__(self, door: FrontDoor, cycle: RequestResponseCycle) -> None:
        super().__init__()
        self._door = door
        self._cycle = cycle
        self._connection = door.transport

    def write(self, data: Any) -> None:
        self._connection.write(data)

    def is_closing(self) -> bool:
        return self._connection.is_closing()

    def close(self) -> None:
        if self._cycle.more_body or self._door.is_over:
            self._door.linger()
        else:
            self._connection.close()


def _head_too_large() -> Refusal:
    return Refusal(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        "headers_too_large",
        f"Request line and headers are longer than the {MAX_HEAD_BYTES} bytes that this gateway "
        "takes.",
    )


def _not_http() -> Refusal:
    return Refusal(
        HTTPStatus.BAD_REQUEST, "invalid_http", "What was sent is no request of HTTP/1.1."
    )


def _too_many_at_once() -> Refusal:
    return Refusal(
        HTTPStatus.BAD_REQUEST,
        "too_many_pipelined",
        f"More than {MAX_PIPELINED} requests wait on this connection.",
    )
