"""What has been said to one client so far, so that what happens next can still be said properly.

Before the first byte a failure is a JSON response; inside a stream it is a last event. It knows no
upstream; `relay` and `proxy` drive it.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift_gateway.client_request import ClientRequest
from chairlift_gateway.headers import RawHeader
from chairlift_gateway.openai_errors import Refusal
from chairlift_protocol.wire import REQUEST_ID_HEADER

# A reverse proxy in front of the gateway must not collect a stream.
_UNBUFFERED: RawHeader = (b"x-accel-buffering", b"no")


class Reply:
    """`outcome` is the status sent, or a later truth: a broken stream, a client that left."""

    def __init__(self, request: ClientRequest, request_id: str) -> None:
        self._request = request
        self._id_header: RawHeader = (REQUEST_ID_HEADER.encode(), request_id.encode())
        self.outcome = 0
        self.replica = "-"
        self.num_tokens = 0

    def whole(self, status: int, headers: Sequence[RawHeader], body: bytes) -> None:
        self.outcome = status
        self._request.respond(status, [*headers, self._id_header], body)

    def start_stream(self, status: int, headers: Sequence[RawHeader]) -> None:
        self.outcome = status
        self._request.begin(status, [*headers, _UNBUFFERED, self._id_header])

    def write(self, events: bytes) -> None:
        self._request.write(events)

    def finish(self, events: bytes) -> None:
        self._request.end(events)

    def fail(self, refusal: Refusal) -> None:
        if self._request.is_complete:
            return
        if self._request.is_started:
            self.outcome = refusal.status
            self.finish(refusal.event())
        else:
            self.whole(refusal.status, refusal.headers(), refusal.body())
