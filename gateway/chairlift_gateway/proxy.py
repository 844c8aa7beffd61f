"""One request through the gateway: class, body, upstream, relay; and a client that leaves midway.

One task decides: who asks, what is reserved, which replica. What the replica then says passes in
callbacks (`relay`). It never retries: `upstream` did, before the first byte.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from chairlift_gateway.access_log import AccessLog
from chairlift_gateway.body_memory import BodyMemory, HeldBody
from chairlift_gateway.client_request import ClientLeft, ClientRequest
from chairlift_gateway.config import GatewayConfig
from chairlift_gateway.headers import RequestNames, find, request_names, towards_engine
from chairlift_gateway.identity import Caller, Identification
from chairlift_gateway.metering import Meter, Metering
from chairlift_gateway.metrics import CLIENT_LEFT, GatewayMetrics, TokenClock
from chairlift_gateway.openai_errors import AnswerTooLarge, Refusal, internal, shutting_down
from chairlift_gateway.relay import Relay
from chairlift_gateway.reply import Reply
from chairlift_gateway.targets import Cost, Target
from chairlift_gateway.upstream import Call, Upstream
from chairlift_protocol.wire import (
    CLASS_HEADER,
    INTERNAL_TOKEN_HEADER,
    REQUEST_ID_HEADER,
    TENANT_HEADER,
    USAGE_HEADER,
    RequestClass,
)

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

    async def serve(self, target: Target, request: ClientRequest) -> None:
        headers = request.head.headers
        arrival = Arrival(
            target=target,
            caller=self._caller(target, request),
            names=request_names(find(headers, REQUEST_ID_HEADER.encode())),
            arrived_s=time.monotonic(),
        )
        reply = Reply(request, arrival.names.for_client)
        with self._counted(arrival, reply), self._registered():
            await self._answer(arrival, request, reply)
        self._access_log.note(
            isinstance(arrival.caller, Caller),
            "class=%s status=%d ms=%d replica=%s request=%s path=%s tenant=%s tokens=%d",
            arrival.request_class.value, reply.outcome,
            (time.monotonic() - arrival.arrived_s) * 1000,
            reply.replica, arrival.names.unique, target.path, arrival.tenant, reply.num_tokens,
        )  # fmt: skip

    def _caller(self, target: Target, request: ClientRequest) -> Caller | Refusal:
        try:
            headers = request.head.headers
            return self._identification.caller(headers, is_batch_path=target.is_batch)
        except Refusal as refusal:
            return refusal

    @contextmanager
    def _counted(self, arrival: Arrival, reply: Reply) -> Iterator[None]:
        if not arrival.target.asks_for_tokens:
            yield
            return
        label = arrival.request_class.value
        self._metrics.count_arrival(arrival.request_class)
        with self._metrics.of(arrival.request_class).in_flight.track_inprogress():
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

    async def _answer(self, arrival: Arrival, request: ClientRequest, reply: Reply) -> None:
        """Whatever happens, the client gets an answer, or has left."""
        try:
            if isinstance(arrival.caller, Refusal):
                raise arrival.caller
            limit_bytes = self._config.body_limit_bytes(arrival.request_class)
            with self._bodies.body(arrival.tenant) as body:
                await request.read_body(body, limit_bytes)
                async with self._metered(arrival, arrival.caller, body, reply) as meter:
                    call = self._call(arrival, request, body, meter)
                    clock = TokenClock(self._metrics, arrival.request_class, arrival.arrived_s)
                    relay = Relay(request, body, reply, clock, meter)
                    await self._upstream.exchange(call, relay.begin)
        except Refusal as refusal:
            reply.fail(refusal)
        except ClientLeft:
            reply.outcome = CLIENT_LEFT
        except asyncio.CancelledError:
            if request.is_left:
                reply.outcome = CLIENT_LEFT
            elif self._is_cut_off:
                reply.fail(shutting_down())
            else:
                raise
        except Exception:
            logger.exception("request %s failed in the gateway", arrival.names.unique)
            reply.fail(internal())

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
        except (asyncio.CancelledError, AnswerTooLarge):
            await meter.learn(until_final=not self._is_cut_off)
            raise
        except Exception:
            meter.failed()
            raise
        finally:
            reply.num_tokens = meter.num_tokens
            meter.end()

    def _call(self, arrival: Arrival, request: ClientRequest, body: HeldBody, meter: Meter) -> Call:
        path, head = arrival.target.path, request.head
        own = (
            (INTERNAL_TOKEN_HEADER, self._config.internal_token),
            (CLASS_HEADER, arrival.request_class.value),
            (TENANT_HEADER, arrival.tenant),
            (USAGE_HEADER, "1"),
            (REQUEST_ID_HEADER, arrival.names.unique),
        )
        return Call(
            method="GET" if head.method == "HEAD" else head.method,
            target=f"{path}?{head.query}" if head.query else path,
            headers=(
                *towards_engine(head.headers, self._identification.trusted_header),
                *((name.encode(), value.encode()) for name, value in own),
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
