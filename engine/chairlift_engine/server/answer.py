"""Runs one generation over HTTP, whole or streamed, and ends it at once when its client leaves.

Starlette cancels nothing for a client that hangs up on a plain response, and only between frames of
a streamed one; so one watcher beside either abandons the generation, and its reader wakes up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from fastapi.responses import JSONResponse, Response
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from chairlift_engine.server.body_reader import HeldBody, ignored_header
from chairlift_engine.server.errors import ApiError
from chairlift_engine.server.generation import ClientLeft, Generation
from chairlift_engine.server.order import Order
from chairlift_engine.server.origin import Origin
from chairlift_engine.server.replica import Replica, Serving
from chairlift_engine.server.shapes import DONE_FRAME, Choice, Document, Shape, frame, usage_of
from chairlift_engine.server.text_stream import Piece
from chairlift_protocol.wire import IGNORED_FIELDS_HEADER


class Answer(Response):
    """Receives the request's body too. `take_order` is run in the thread pool."""

    def __init__(
        self,
        replica: Replica,
        body: HeldBody,
        origin: Origin,
        take_order: Callable[[bytes, Origin], Order],
        shape: Shape,
    ) -> None:
        super().__init__()
        self._replica = replica
        self._body = body
        self._origin = origin
        self._take_order = take_order
        self._shape = shape
        self._generation: Generation | None = None
        self._client_left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._body:
            await self._body.receive(Request(scope, receive))
            with self._replica.admitted() as serving, self._watching(receive):
                order = await serving.in_pool(self._read_body)
                self._body.drop()
                if not self._client_left:
                    serving.door.check(self._origin, len(order.requests))
                    with serving.door.timed(order.requests, self._origin):
                        await self._generate(order, serving, scope, receive, send)

    def _read_body(self) -> Order:
        return self._take_order(self._body.raw, self._origin)

    async def _generate(
        self, order: Order, serving: Serving, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._generation = Generation(order, serving.bridge, serving.tokenizer)
        document = Document(order.id, serving.model_name, self._shape)
        try:
            self._generation.start()
            if order.stream:
                await _stream(order, document, self._generation, send)
            else:
                response = await _whole(order, document, self._generation)
                await response(scope, receive, send)
        except ClientLeft:
            return
        finally:
            self._generation.abandon()

    @contextmanager
    def _watching(self, receive: Receive) -> Iterator[None]:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._client_left = True
            if self._generation is not None:
                self._generation.abandon()

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()


async def _whole(order: Order, document: Document, generation: Generation) -> JSONResponse:
    texts: list[list[str]] = [[] for _ in order.requests]
    reasons: list[str | None] = [None for _ in order.requests]
    while pieces := await generation.read():
        for index, piece in pieces:
            texts[index].append(piece.text)
            reasons[index] = piece.finish_reason
    choices = [Choice("".join(t), reason) for t, reason in zip(texts, reasons, strict=True)]
    usage = usage_of(order.num_prompt_tokens, generation.num_output_tokens)
    return JSONResponse(document.whole(choices, usage), headers=_headers(order))


async def _stream(order: Order, document: Document, generation: Generation, send: Send) -> None:
    """The status waits for the first token, so that a failure before it has a status of its own."""
    pieces = await generation.read()
    headers = {"cache-control": "no-cache", **_headers(order)}
    start = Response(media_type="text/event-stream", headers=headers)
    del start.headers["content-length"]
    await send({"type": "http.response.start", "status": 200, "headers": start.raw_headers})
    last = DONE_FRAME
    try:
        async for event in _events(order, document, generation, pieces):
            await send({"type": "http.response.body", "body": event, "more_body": True})
    except ApiError as error:
        last = frame(error.body())
    await send({"type": "http.response.body", "body": last, "more_body": False})


async def _events(
    order: Order, document: Document, generation: Generation, pieces: list[tuple[int, Piece]]
) -> AsyncIterator[bytes]:
    """A server-sent event for each piece that says something, from the first pieces on."""
    no_usage = {"usage": None} if order.include_usage else {}
    opened: set[int] = set()
    while pieces:
        for index, piece in pieces:
            if index not in opened:
                opened.add(index)
                if (opening := document.shape.opening(index)) is not None:
                    yield document.chunk([opening], **no_usage)
            if piece.text or piece.finish_reason is not None:
                delta = document.shape.delta(index, piece.text, piece.finish_reason)
                yield document.chunk([delta], **no_usage)
        pieces = await generation.read()
    if order.include_usage:
        usage = usage_of(order.num_prompt_tokens, generation.num_output_tokens)
        yield document.chunk([], usage=usage)


def _headers(order: Order) -> dict[str, str]:
    return {IGNORED_FIELDS_HEADER: ignored_header(order.ignored)} if order.ignored else {}
