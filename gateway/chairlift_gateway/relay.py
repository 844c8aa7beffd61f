"""A replica's answer on its way to the client, in the callbacks in which it comes.

A stream is relayed as it comes, a whole answer once it is complete, so that a replica that fails
midway can still be reported with a status. `proxy` makes one for each request, `upstream` has it
begin.
"""

from __future__ import annotations

import time
from typing import Final

from chairlift_gateway.body_memory import HeldBody
from chairlift_gateway.choice import Replica
from chairlift_gateway.client_request import ClientRequest, Source
from chairlift_gateway.engine_http import AnswerHead, Sink
from chairlift_gateway.headers import towards_client
from chairlift_gateway.metering import Meter
from chairlift_gateway.metrics import TokenClock
from chairlift_gateway.openai_errors import AnswerTooLarge
from chairlift_gateway.reply import Reply
from chairlift_gateway.sse import EventSplitter

# A whole answer is held in memory until it is complete; an engine's longest is far below this.
LONGEST_WHOLE_ANSWER_BYTES: Final = 64 * 1024 * 1024


class Relay:
    def __init__(
        self, request: ClientRequest, body: HeldBody, reply: Reply, clock: TokenClock, meter: Meter
    ) -> None:
        self._request = request
        self._body = body
        self._reply = reply
        self._clock = clock
        self._meter = meter

    def begin(self, head: AnswerHead, replica: Replica, source: Source) -> Sink:
        self._reply.replica = replica.name
        is_stream = head.is_event_stream and not self._request.has_no_body(head.status)
        self._meter.answered(is_stream=is_stream)
        if not is_stream:
            self._head = head
            self._whole = bytearray()
            return self._collect
        self._body.drop()
        self._request.pace(source)
        self._splitter = EventSplitter()
        headers = [*towards_client(head.headers), *self._meter.headers]
        self._reply.start_stream(head.status, headers)
        return self._pass_events

    def _pass_events(self, data: bytes, is_end: bool) -> None:
        events = self._splitter.feed(data)
        if events:
            events, num_tokens = self._meter.pass_events(events)
            self._clock.tokens(num_tokens, time.monotonic())
        if is_end:
            self._reply.finish(events + self._splitter.rest())
        else:
            self._reply.write(events)

    def _collect(self, data: bytes, is_end: bool) -> None:
        self._whole += data
        if len(self._whole) > LONGEST_WHOLE_ANSWER_BYTES:
            raise AnswerTooLarge(LONGEST_WHOLE_ANSWER_BYTES)
        if is_end:
            self._meter.read_whole(self._head.status, self._whole)
            headers = [*towards_client(self._head.headers), *self._meter.headers]
            self._reply.whole(self._head.status, headers, bytes(self._whole))
