"""A client's connection: requests as they are read, with bounds on what is read of a head, on how
long one is waited for, and on what is sent ahead; `Upgrade`, and bytes that are no request.

What was read whole gets its own answer, whatever comes behind it; then the connection is closed.
Where there is none, what cannot be read is refused in the shape of OpenAI's errors. It knows no
paths and no tenants. `server` opens one for each client.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

import httptools

from chairlift_gateway.client_request import ClientRequest, RequestHead
from chairlift_gateway.headers import RawHeader
from chairlift_gateway.openai_errors import Refusal, head_too_large, not_http

# Request line and headers; that of others is 8 to 64 KiB.
MAX_HEAD_BYTES: Final = 64 * 1024
# Whole requests that wait for the answer of the one before.
MAX_PIPELINED: Final = 16
# A client that is still sending when it has its answer may not have read that yet, and a closed
# connection would take it away. So this much is read on and dropped, for so long.
MAX_DROPPED_BYTES: Final = 64 * 1024 * 1024
LINGER_S: Final = 10.0

Serve = Callable[[ClientRequest], Coroutine[Any, Any, None]]

logger = logging.getLogger("chairlift_gateway.front_door")


class FrontDoor(asyncio.Protocol):
    """A callback of the parser that raises ends the reading, with the `Refusal` that it raised.

    on_made, on_lost: hear of its beginning and end. keepalive_s: how long a client may be silent
    between two requests.
    """

    _transport: asyncio.Transport

    def __init__(
        self, serve: Serve, on_made: Callable[[FrontDoor], None],
        on_lost: Callable[[FrontDoor], None], keepalive_s: float,
    ) -> None:  # fmt: skip
        self._serve = serve
        self._on_made = on_made
        self._on_lost = on_lost
        self._keepalive_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._new_parser()
        self._answering: ClientRequest | None = None
        self._waiting: deque[ClientRequest] = deque()
        self._reading: ClientRequest | None = None  # the last one of which anything came
        self._idle_since_s = self._loop.time()
        self._silence = self._loop.call_later(keepalive_s, self._end_silence)
        self._url = b""
        self._headers: list[RawHeader] = []
        # Without a body in between; what was given at a time with the end of one is not counted.
        self._num_head_bytes = 0
        self._num_dropped_bytes = 0
        self._is_over = False  # What comes is dropped.
        self._is_draining = False
        self.is_write_paused = False

    def _new_parser(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        # Else a request behind one that closes is an error, and that one has no answer.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._on_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._silence.cancel()
        self._leave()
        self._on_lost(self)

    def eof_received(self) -> None:
        """Most who close say no more than that, so it is taken for one who leaves."""
        self._leave()

    def pause_writing(self) -> None:
        self.is_write_paused = True
        if self._answering is not None:
            self._answering.pause()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        if self._answering is not None:
            self._answering.resume()
        self._loop.call_soon(self._begin_next)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            self._drop(len(data))
            return
        self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            self._read_on_without_upgrade(data[stop.args[0] :])
            return
        except httptools.HttpParserError as error:
            reason = error.__context__
            self._refuse(reason if isinstance(reason, Refusal) else not_http())
            return
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(head_too_large(MAX_HEAD_BYTES))
        elif self._answering is None:
            self._idle_since_s = self._loop.time()

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._url, self._headers = b"", []
        self._num_head_bytes = self._num_dropped_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._num_head_bytes = 0
        if len(self._url) + sum(len(n) + len(v) for n, v in self._headers) > MAX_HEAD_BYTES:
            raise head_too_large(MAX_HEAD_BYTES)
        if self._parser.should_upgrade():
            return  # The parser stops here.
        request = self._request()
        self._headers = []  # Trailers go there, not to the headers that were already judged.
        self._reading = request
        if len(self._waiting) >= MAX_PIPELINED:
            raise not_http()  # Not told: those that wait are answered, and that is all.
        self._waiting.append(request)
        self._begin_next()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        assert self._reading is not None
        if self._reading.is_complete:
            self._drop(len(body))
        else:
            self._reading.feed(body)

    def on_message_complete(self) -> None:
        if self._reading is not None and not self._parser.should_upgrade():
            self._reading.end_body()

    # What a request calls.

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def answered(self, request: ClientRequest) -> None:
        if self._transport.is_closing():
            return
        if request.keeps_alive:
            self.resume_reading()
        elif self._is_over or not request.is_whole:
            self._linger()
        else:
            self._transport.close()

    # What the server calls.

    def drain(self) -> None:
        """Close as soon as what was asked has been answered."""
        self._is_draining = True
        last = self._last()
        if last is None:
            self._transport.close()
        elif not last.is_complete:
            last.keeps_alive = False

    def cut_off(self) -> None:
        self._transport.abort()

    def _request(self) -> ClientRequest:
        version = self._parser.get_http_version()
        head = RequestHead.read(self._parser.get_method(), self._url, self._headers, version)
        keeps_alive = version != "1.0" and self._parser.should_keep_alive()
        return ClientRequest(head, self, keeps_alive=keeps_alive and not self._is_draining)

    def _begin_next(self) -> None:
        """Once the one before is settled, whose place it may need; and of a client that asks on and
        does not read no more than one answer is held."""
        if not self._waiting or self._answering or self.is_write_paused:
            return
        self._answering = request = self._waiting.popleft()
        request.served_by(self._loop.create_task(self._run(request)))

    async def _run(self, request: ClientRequest) -> None:
        try:
            await self._serve(request)
        except Exception:
            logger.exception("a request failed in the gateway")
        finally:
            self._answering = None
            self._idle_since_s = self._loop.time()
            if not request.is_complete and not request.is_left:
                self._transport.abort()
            if not request.keeps_alive or self._transport.is_closing():
                self._waiting.clear()
            elif self._is_draining and not self._waiting:
                self._transport.close()
            self._begin_next()

    def _last(self) -> ClientRequest | None:
        return self._waiting[-1] if self._waiting else self._answering

    def _leave(self) -> None:
        for request in (self._answering, *self._waiting):
            if request is not None:
                request.leave()

    def _end_silence(self) -> None:
        """Whoever began no request, or one and did not go on, is not waited for any longer than
        between two requests."""
        now_s = self._loop.time()
        since_s = self._idle_since_s if self._answering is None else now_s
        if now_s - since_s >= self._keepalive_s:
            self._transport.close()
        else:
            self._silence = self._loop.call_at(since_s + self._keepalive_s, self._end_silence)

    def _linger(self) -> None:
        """Close once the client has read its answer, or has had the time to."""
        self._is_over = True
        try:
            self._transport.write_eof()
        except OSError:  # It has hung up, and the system knows that before the event loop does.
            self._transport.abort()
            return
        self.resume_reading()
        self._silence.cancel()
        self._silence = self._loop.call_later(LINGER_S, self._transport.close)

    def _read_on_without_upgrade(self, rest: bytes) -> None:
        """RFC 9110, 7.8: a server may ignore `Upgrade`, which Java's clients send with each
        request. The parser cannot, and takes the body for another protocol; so the head is given
        to a new one without it."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(not_http())
            return
        version = self._parser.get_http_version().encode()
        head = [method, b" ", self._url, b" HTTP/", version, b"\r\n"]
        for name, value in self._headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self._new_parser()
        self.data_received(b"".join([*head, b"\r\n", rest]))

    def _refuse(self, refusal: Refusal) -> None:
        self._is_over = True
        if self._waiting and not self._waiting[-1].is_whole:
            self._waiting.pop()  # It waits, and will never be whole.
        last = self._last()
        if last is None or last.is_complete:
            self._answer(refusal)
        elif not last.is_whole and not last.is_started:
            last.leave()
            self._answer(refusal)
        else:
            last.keeps_alive = False

    def _answer(self, refusal: Refusal) -> None:
        """To what is no request."""
        ClientRequest(RequestHead("GET", "", "", []), self, keeps_alive=False).refuse(refusal)

    def _drop(self, num_bytes: int) -> None:
        self._num_dropped_bytes += num_bytes
        if self._num_dropped_bytes > MAX_DROPPED_BYTES:
            self._transport.close()
