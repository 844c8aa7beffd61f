"""What has been said to one client so far, so that what happens next can still be said properly.

Before the first byte a failure is a JSON response; inside a stream it is a last event. It knows no
upstream; `proxy` drives it.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Send

from chairlift_gateway.openai_errors import Refusal
from chairlift_protocol.wire import REQUEST_ID_HEADER

RawHeader = tuple[bytes, bytes]

# A reverse proxy in front of the gateway must not collect a stream.
_UNBUFFERED: RawHeader = (b"x-accel-buffering", b"no")


class Reply:
    """`outcome` is the status sent, or a later truth: a broken stream, a client that left."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._id_header: RawHeader = (REQUEST_ID_HEADER.encode(), request_id.encode())
        self._is_started = False
        self.is_finished = False
        self.outcome = 0
        self.replica = "-"
        self.num_tokens = 0

    async def whole(self, status: int, headers: Sequence[RawHeader], body: bytes) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*headers, length])
        await self.finish(body)

    async def start_stream(self, status: int, headers: Sequence[RawHeader]) -> None:
        await self._start(status, [*headers, _UNBUFFERED])

    async def write(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def finish(self, body: bytes = b"") -> None:
        # Set first: a server reports a complete response as a client that is gone.
        self.is_finished = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, refusal: Refusal) -> None:
        if self.is_finished:
            return
        if self._is_started:
            self.outcome = refusal.status
            await self.finish(refusal.event())
        else:
            await self.whole(refusal.status, refusal.headers(), refusal.body())

    async def _start(self, status: int, headers: Sequence[RawHeader]) -> None:
        self._is_started = True
        self.outcome = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, self._id_header],
            }
        )
