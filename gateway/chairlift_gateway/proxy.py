"""One request through the gateway: class, body, upstream, relay; and a client that leaves midway.

A stream is relayed as it comes, a whole answer once it is complete, so that a replica that fails
midway can still be reported with a status. It never retries: `upstream` did, before the first byte.
`app` puts a `ProxyRoute` on every path.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from starlette.types import Receive, Scope, Send

from chairlift_gateway.access_log import AccessLog
from chairlift_gateway.body_memory import BodyMemory, HeldBody
from chairlift_gateway.client_side import ClientLeft, read_body, while_client_stays
from chairlift_gateway.config import GatewayConfig
from chairlift_gateway.headers import (
    RequestNames,
    find,
    request_names,
    towards_client,
    towards_engine,
)
from chairlift_gateway.identity import Caller, Identification
from chairlift_gateway.metering import Meter, Metering
from chairlift_gateway.metrics import CLIENT_LEFT, GatewayMetrics, TokenClock
from chairlift_gateway.openai_errors import (
    AnswerTooLarge,
    BrokenOff,
    Refusal,
    internal,
    shutting_down,
)
from chairlift_gateway.reply import Reply
from chairlift_gateway.sse import EventSplitter
from chairlift_gateway.targets import Cost, Target
from chairlift_gateway.upstream import UPSTREAM_ERRORS, Call, Upstream
from chairlift_protocol.wire import (
    CLASS_HEADER,
    INTERNAL_TOKEN_HEADER,
    REQUEST_ID_HEADER,
    TENANT_HEADER,
    USAGE_HEADER,
    RequestClass,
)

# A whole answer is held in memory until it is complete; an engine's longest is far below this.
LONGEST_WHOLE_ANSWER_BYTES: Final = 64 * 1024 * 1024

logger = logging.getLogger("chairlift_gateway.proxy")


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request from its head. `arrived_s` is where a client's wait begins.

    caller: or why nobody is served who asks like this.
    """

    target: Target
    caller: Caller | Refusal
    names: RequestNames
    arrived_s: float

    @property
    def request_class(self) -> RequestClass:
        if isinstance(self.caller, Caller):
            return self.caller.request_class
        return RequestClass.BATCH if self.target.is_batch else RequestClass.INTERACTIVE

    @property
    def tenant(self) -> str:
        return self.caller.tenant if isinstance(self.caller, Caller) else "-"


class ProxyRoute:
    """A `Target` as an ASGI application, as Starlette's routes take one."""

    def __init__(self, proxy: Proxy, target: Target) -> None:
        self._proxy = proxy
        self._target = target

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._proxy.serve(self._target, scope, receive, send)


class Proxy:
    def __init__(
        self, config: GatewayConfig, identification: Identification, metering: Metering,
        upstream: Upstream, metrics: GatewayMetrics,
    ) -> None:  # fmt: skip
        self._config = config
        self._identification = identification
        self._metering = metering
        self._upstream = upstream
        self._metrics = metrics
        limits_bytes = [config.body_limit_bytes(each) for each in RequestClass]
        self._bodies = BodyMemory(max(limits_bytes))
        self._access_log = AccessLog()
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
            caller=self._caller(target, scope),
            names=request_names(find(scope["headers"], REQUEST_ID_HEADER.encode())),
            arrived_s=time.monotonic(),
        )
        reply = Reply(send, arrival.names.for_client)
        with self._counted(arrival, reply), self._registered():
            await self._answer(arrival, scope, receive, reply)
        self._access_log.note(
            isinstance(arrival.caller, Caller),
            "class=%s status=%d ms=%d replica=%s request=%s path=%s tenant=%s tokens=%d",
            arrival.request_class.value, reply.outcome,
            (time.monotonic() - arrival.arrived_s) * 1000,
            reply.replica, arrival.names.unique, target.path, arrival.tenant, reply.num_tokens,
        )  # fmt: skip

    def _caller(self, target: Target, scope: Scope) -> Caller | Refusal:
        try:
            return self._identification.caller(scope["headers"], is_batch_path=target.is_batch)
        except Refusal as refusal:
            return refusal

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
            if isinstance(arrival.caller, Refusal):
                raise arrival.caller
            limit_bytes = self._config.body_limit_bytes(arrival.request_class)
            with self._bodies.body(arrival.tenant) as body:
                await read_body(scope, receive, body, limit_bytes)
                async with self._metered(arrival, arrival.caller, body, reply) as meter:
                    call = self._call(arrival, scope, body, meter)
                    clock = TokenClock(self._metrics, arrival.request_class, arrival.arrived_s)
                    await while_client_stays(self._relay(call, reply, clock, meter), receive, reply)
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

    @asynccontextmanager
    async def _metered(
        self, arrival: Arrival, caller: Caller, body: HeldBody, reply: Reply
    ) -> AsyncIterator[Meter]:
        """Reserved before it is routed, settled however it ends; refused with what that says."""
        match arrival.target.cost:
            case Cost.NOTHING:
                yield self._metering.unmetered(caller)
                return
            case Cost.A_REQUEST:
                meter = await self._metering.admit_tokenless(caller, arrival.names.unique)
            case Cost.TOKENS:
                meter = await self._metering.admit(caller, arrival.names.unique, body.raw)
        try:
            yield meter
        except (ClientLeft, asyncio.CancelledError, AnswerTooLarge) as error:
            await meter.learn(until_final=not isinstance(error, asyncio.CancelledError))
            raise
        except Exception:
            meter.failed()
            raise
        finally:
            reply.num_tokens = meter.num_tokens
            meter.end()

    def _call(self, arrival: Arrival, scope: Scope, body: HeldBody, meter: Meter) -> Call:
        path, query = arrival.target.path, scope["query_string"].decode("latin-1")
        return Call(
            method="GET" if scope["method"] == "HEAD" else scope["method"],
            target=f"{path}?{query}" if query else path,
            headers=(
                *towards_engine(scope["headers"], self._identification.trusted_header),
                (INTERNAL_TOKEN_HEADER, self._config.internal_token),
                (CLASS_HEADER, arrival.request_class.value),
                (TENANT_HEADER, arrival.tenant),
                (USAGE_HEADER, "1"),
                (REQUEST_ID_HEADER, arrival.names.unique),
            ),
            body=body,
            demand=self._upstream.demand(
                arrival.request_class,
                arrival.tenant,
                body.raw if arrival.target.asks_for_tokens else b"",
            ),
            received_s=time.monotonic(),
            on_sent=meter.sent,
        )

    async def _relay(self, call: Call, reply: Reply, clock: TokenClock, meter: Meter) -> None:
        async with self._upstream.exchange(call) as answer:
            reply.replica = answer.replica.name
            is_stream = answer.response.content_type == "text/event-stream"
            meter.answered(is_stream=is_stream)
            try:
                if is_stream:
                    call.body.drop()
                    await _relay_events(answer.response, reply, clock, meter)
                else:
                    await _relay_whole(answer.response, reply, meter)
            except BrokenOff:
                self._metrics.upstream_failures.labels("in_answer").inc()
                raise


async def _relay_events(
    response: aiohttp.ClientResponse, reply: Reply, clock: TokenClock, meter: Meter
) -> None:
    """Read on only when the client took what came before: `reply.write` waits for it."""
    headers = [*towards_client(response.raw_headers), *meter.headers]
    await reply.start_stream(response.status, headers)
    splitter = EventSplitter()
    while chunk := await _read_some(response):
        events, num_tokens = meter.pass_events(splitter.feed(chunk))
        if events:
            clock.tokens(num_tokens, time.monotonic())
            await reply.write(events)
    await reply.finish(splitter.rest())


async def _relay_whole(response: aiohttp.ClientResponse, reply: Reply, meter: Meter) -> None:
    body = bytearray()
    while chunk := await _read_some(response):
        body += chunk
        if len(body) > LONGEST_WHOLE_ANSWER_BYTES:
            raise AnswerTooLarge(LONGEST_WHOLE_ANSWER_BYTES)
    meter.read_whole(response.status, body)
    headers = [*towards_client(response.raw_headers), *meter.headers]
    await reply.whole(response.status, headers, bytes(body))


async def _read_some(response: aiohttp.ClientResponse) -> bytes:
    """What has come, at least one byte; empty at the end of an answer that is complete."""
    try:
        return await response.content.readany()
    except UPSTREAM_ERRORS as error:
        logger.warning("a replica failed in its answer: %r", error)
        raise BrokenOff from error
