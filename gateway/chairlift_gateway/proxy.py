"""One request through the gateway: class, body, upstream, relay; and a client that leaves midway.

A stream is relayed as it comes, a whole answer once it is complete, so that a replica that fails
midway can still be reported with a status. It never retries: `upstream` did, before the first byte.
`app` puts a `ProxyRoute` on every path.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import aiohttp
from starlette.types import Receive, Scope, Send

from chairlift_gateway.config import GatewayConfig
from chairlift_gateway.headers import (
    RequestNames,
    bearer_key,
    find,
    request_names,
    towards_client,
    towards_engine,
)
from chairlift_gateway.metrics import CLIENT_LEFT, GatewayMetrics, TokenClock
from chairlift_gateway.openai_errors import (
    Refusal,
    broken_off,
    internal,
    shutting_down,
    too_large,
)
from chairlift_gateway.reply import Reply
from chairlift_gateway.sse import EventSplitter, num_token_events
from chairlift_gateway.upstream import UPSTREAM_ERRORS, Call, Upstream
from chairlift_protocol.wire import (
    CLASS_HEADER,
    INTERNAL_TOKEN_HEADER,
    REQUEST_ID_HEADER,
    RequestClass,
)

# A whole answer is held in memory until it is complete; an engine's longest is far below this.
LONGEST_WHOLE_ANSWER_BYTES: Final = 64 * 1024 * 1024

logger = logging.getLogger("chairlift_gateway.proxy")
access_logger = logging.getLogger("chairlift_gateway.access")


class ClientLeft(Exception):
    """Nobody is there any more to take the answer."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a path leads. `asks_for_tokens` is what makes a request count as demand."""

    path: str
    asks_for_tokens: bool
    is_batch: bool


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request from its head. `arrived_s` is where a client's wait begins."""

    target: Target
    request_class: RequestClass
    names: RequestNames
    arrived_s: float


class ProxyRoute:
    """A `Target` as an ASGI application, as Starlette's routes take one."""

    def __init__(self, proxy: Proxy, target: Target) -> None:
        self._proxy = proxy
        self._target = target

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._proxy.serve(self._target, scope, receive, send)


class Proxy:
    def __init__(self, config: GatewayConfig, upstream: Upstream, metrics: GatewayMetrics) -> None:
        self._config = config
        self._upstream = upstream
        self._metrics = metrics
        self._serving: set[asyncio.Task[Any]] = set()
        self._is_cut_off = False

    def cut_off(self) -> None:
        """End what is in flight now, each with an error that says so."""
        self._is_cut_off = True
        for task in self._serving:
            task.cancel()

    async def serve(self, target: Target, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = Arrival(
            target=target,
            request_class=self._class_of(target, scope),
            names=request_names(find(scope["headers"], REQUEST_ID_HEADER.encode())),
            arrived_s=time.monotonic(),
        )
        reply = Reply(send, arrival.names.for_client)
        with self._counted(arrival, reply), self._registered():
            await self._answer(arrival, scope, receive, reply)
        access_logger.info(
            "class=%s status=%d ms=%d replica=%s request=%s path=%s",
            arrival.request_class.value, reply.outcome,
            (time.monotonic() - arrival.arrived_s) * 1000,
            reply.replica, arrival.names.unique, target.path,
        )  # fmt: skip

    def _class_of(self, target: Target, scope: Scope) -> RequestClass:
        key = bearer_key(scope["headers"])
        is_batch = target.is_batch or (key is not None and self._config.is_batch_key(key))
        return RequestClass.BATCH if is_batch else RequestClass.INTERACTIVE

    @contextmanager
    def _counted(self, arrival: Arrival, reply: Reply) -> Iterator[None]:
        if not arrival.target.asks_for_tokens:
            yield
            return
        label = arrival.request_class.value
        self._metrics.count_arrival(arrival.request_class)
        with self._metrics.in_flight.labels(label).track_inprogress():
            yield
        self._metrics.responses.labels(label, str(int(reply.outcome))).inc()

    @contextmanager
    def _registered(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            yield
        finally:
            self._serving.discard(task)

    async def _answer(self, arrival: Arrival, scope: Scope, receive: Receive, reply: Reply) -> None:
        """Whatever happens, the client gets an answer, or has left."""
        try:
            body = await _read_body(scope, receive, self._config.max_body_bytes)
            call = self._call(arrival, scope, body)
            clock = TokenClock(self._metrics, arrival.request_class, arrival.arrived_s)
            await _while_client_stays(self._relay(call, reply, clock), receive, reply)
        except Refusal as refusal:
            await reply.fail(refusal)
        except ClientLeft:
            reply.outcome = CLIENT_LEFT
        except asyncio.CancelledError:
            if not self._is_cut_off:
                raise
            await reply.fail(shutting_down())
        except Exception:
            logger.exception("request %s failed in the gateway", arrival.names.unique)
            await reply.fail(internal())

    def _call(self, arrival: Arrival, scope: Scope, body: bytes) -> Call:
        path, query = arrival.target.path, scope["query_string"].decode("latin-1")
        return Call(
            method=scope["method"],
            target=f"{path}?{query}" if query else path,
            headers=(
                *towards_engine(scope["headers"]),
                (INTERNAL_TOKEN_HEADER, self._config.internal_token),
                (CLASS_HEADER, arrival.request_class.value),
                (REQUEST_ID_HEADER, arrival.names.unique),
            ),
            body=body,
            request_class=arrival.request_class,
            received_s=time.monotonic(),
        )

    async def _relay(self, call: Call, reply: Reply, clock: TokenClock) -> None:
        async with self._upstream.exchange(call) as answer:
            reply.replica = answer.replica.name
            try:
                if answer.response.content_type == "text/event-stream":
                    await _relay_events(answer.response, reply, clock)
                else:
                    await _relay_whole(answer.response, reply)
            except Refusal:
                self._metrics.upstream_failures.labels("in_answer").inc()
                raise


async def _relay_events(response: aiohttp.ClientResponse, reply: Reply, clock: TokenClock) -> None:
    """Read on only when the client took what came before: `reply.write` waits for it."""
    await reply.start_stream(response.status, towards_client(response.raw_headers))
    splitter = EventSplitter()
    while chunk := await _read_some(response):
        if events := splitter.feed(chunk):
            clock.tokens(num_token_events(events), time.monotonic())
            await reply.write(events)
    await reply.finish(splitter.rest())


async def _relay_whole(response: aiohttp.ClientResponse, reply: Reply) -> None:
    body = bytearray()
    while chunk := await _read_some(response):
        body += chunk
        if len(body) > LONGEST_WHOLE_ANSWER_BYTES:
            raise Refusal(
                HTTPStatus.BAD_GATEWAY,
                "upstream_answer_too_large",
                f"The answer is longer than {LONGEST_WHOLE_ANSWER_BYTES} bytes; stream it.",
            )
    await reply.whole(response.status, towards_client(response.raw_headers), bytes(body))


async def _read_some(response: aiohttp.ClientResponse) -> bytes:
    """What has come, at least one byte; empty at the end of an answer that is complete."""
    try:
        return await response.content.readany()
    except UPSTREAM_ERRORS as error:
        logger.warning("a replica failed in its answer: %r", error)
        raise broken_off() from error


async def _read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    stated = find(scope["headers"], b"content-length")
    if stated is not None and int(stated) > limit_bytes:
        raise too_large(limit_bytes)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > limit_bytes:
            raise too_large(limit_bytes)
        if not message.get("more_body", False):
            return bytes(body)


async def _while_client_stays(
    work: Coroutine[Any, Any, None], receive: Receive, reply: Reply
) -> None:
    """Run `work`; cancel it and raise ClientLeft once the client is gone.

    No server cancels an application whose client left: only `receive` tells.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_departure(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and not reply.is_finished:
            raise ClientLeft
        await working
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
