"""Runs one generation over HTTP, whole or streamed, and ends it at once when its client leaves.

Starlette cancels nothing for a client that hangs up on a plain response, and only between frames of
a streamed one; so one watcher beside either abandons the generation, and its reader wakes up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi.responses import JSONResponse, Response
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from chairlift_engine.server.body_reader import HeldBody, ignored_headers
from chairlift_engine.server.errors import ApiError
from chairlift_engine.server.generation import ClientLeft, Generation
from chairlift_engine.server.order import Order
from chairlift_engine.server.origin import Origin
from chairlift_engine.server.replica import Replica, Serving
from chairlift_engine.server.shapes import (
    DONE_FRAME,
    Choice,
    Document,
    Json,
    Shape,
    frame,
    usage_comment,
    usage_of,
)
from chairlift_engine.server.text_stream import Piece, joined
from chairlift_engine.tokenizer import Tokenizer


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
        writer = _Writer(
            order, document, self._generation, serving.tokenizer, self._origin.reads_usage
        )
        on_closed = self._replica.usage.enter(
            self._origin.request_id, order.num_prompt_tokens, self._generation
        )
        try:
            self._generation.start(on_closed)
            if order.stream:
                await _stream(writer, send)
            else:
                response = await _whole(writer)
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


@dataclass(frozen=True, slots=True)
class _Writer:
    """What both forms of an answer are written from."""

    order: Order
    document: Document
    generation: Generation
    tokenizer: Tokenizer
    states_usage: bool = False

    @property
    def usage(self) -> Json:
        order = self.order
        return usage_of(
            order.num_prompt_tokens, order.num_cached_tokens, self.generation.num_output_tokens
        )

    def usage_comment(self, num_output_tokens: int) -> bytes:
        """For the gateway, which charges a stream that breaks off too; empty for others."""
        if not self.states_usage:
            return b""
        return usage_comment(self.order.num_prompt_tokens, num_output_tokens)

    @property
    def headers(self) -> dict[str, str]:
        return ignored_headers(self.order.ignored)

    def choice(self, piece: Piece) -> Choice:
        logprobs = None
        if self.order.wants_logprobs:
            logprobs = self.document.shape.logprobs(piece.scored, self.tokenizer)
        return Choice(piece.text, piece.finish_reason, logprobs)


async def _whole(writer: _Writer) -> JSONResponse:
    choices: list[list[Piece]] = [[] for _ in writer.order.requests]
    while pieces := await writer.generation.read():
        for index, piece in pieces:
            choices[index].append(piece)
    listed = [writer.choice(joined(own)) for own in choices]
    return JSONResponse(writer.document.whole(listed, writer.usage), headers=writer.headers)


async def _stream(writer: _Writer, send: Send) -> None:
    """The status waits for the first token, so that a failure before it has a status of its own."""
    pieces = await writer.generation.read()
    headers = {"cache-control": "no-cache", **writer.headers}
    start = Response(media_type="text/event-stream", headers=headers)
    del start.headers["content-length"]
    await send({"type": "http.response.start", "status": 200, "headers": start.raw_headers})
    last = DONE_FRAME
    try:
        if opening := writer.usage_comment(0):
            await send({"type": "http.response.body", "body": opening, "more_body": True})
        async for event in _events(writer, pieces):
            await send({"type": "http.response.body", "body": event, "more_body": True})
    except ApiError as error:
        last = frame(error.body())
    last = writer.usage_comment(writer.generation.num_output_tokens) + last
    await send({"type": "http.response.body", "body": last, "more_body": False})


async def _events(writer: _Writer, pieces: list[tuple[int, Piece]]) -> AsyncIterator[bytes]:
    """A server-sent event for each piece that says something, from the first pieces on."""
    document = writer.document
    no_usage = {"usage": None} if writer.order.include_usage else {}
    opened: set[int] = set()
    while pieces:
        for index, piece in pieces:
            if index not in opened:
                opened.add(index)
                if (opening := document.shape.opening(index)) is not None:
                    yield document.chunk([opening], **no_usage)
            if piece.text or piece.finish_reason is not None:
                delta = document.shape.delta(index, writer.choice(piece))
                yield document.chunk([delta], **no_usage)
        pieces = await writer.generation.read()
    if writer.order.include_usage:
        yield document.chunk([], usage=writer.usage)
