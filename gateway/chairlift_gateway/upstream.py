"""From a request to the head of a replica's answer: route, hold, retry once before the first byte.

It knows no client connection: who leaves is cancelled from outside, and a cancelled exchange closes
its upstream connection, which is how an engine learns of it. `proxy` calls it.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import aiohttp

from chairlift_gateway import estimate
from chairlift_gateway.body_memory import HeldBody
from chairlift_gateway.choice import Demand, Replica
from chairlift_gateway.endpoints import EndpointSource
from chairlift_gateway.holding import HoldFull, Holding
from chairlift_gateway.metrics import GatewayMetrics
from chairlift_gateway.openai_errors import BrokenOff, not_ready, unreachable
from chairlift_gateway.prefixes import prefix_names
from chairlift_gateway.routing import LOOK_AGAIN_S, Router, Ticket
from chairlift_protocol.load import Load
from chairlift_protocol.wire import LOAD_HEADER, LOAD_PATH, WAITED_MS_HEADER, RequestClass

# What a replica's failure looks like from here; a client that leaves is a cancellation instead.
UPSTREAM_ERRORS: Final = (aiohttp.ClientError, TimeoutError, OSError)
CONNECT_TIMEOUT_S: Final = 3.0
# Below the 5 s after which a stock uvicorn server closes an idle connection (our engine: 75 s), so
# that a request does not meet one that is just being closed.
KEEPALIVE_S: Final = 3.0
# With no other replica, a second try waits this long for the list to change.
SECOND_TRY_PAUSE_S: Final = 1.0
# What an engine that is broken answers; one that is busy says 503, which is no failure.
BROKEN_STATUSES: Final = (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.BAD_GATEWAY)
PROBE_PAUSE_S: Final = 0.5
# Read from a replica ahead of the client: two of these, then the replica's socket is left full.
READ_AHEAD_BYTES: Final = 64 * 1024

_AUTO_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")

logger = logging.getLogger("chairlift_gateway.upstream")


@dataclass(frozen=True, slots=True)
class Call:
    """A whole request, ready to be sent, also twice. `received_s` is when its last byte came.

    on_sent: called with a replica's address when it is about to get it.
    """

    method: str
    target: str
    headers: Sequence[tuple[str, str]]
    body: HeldBody
    demand: Demand
    received_s: float
    on_sent: Callable[[str], None]


class _Sendable(io.BytesIO):
    def getbuffer(self) -> memoryview:
        """aiohttp asks for it to know the length; one that can be written to would be a copy."""
        return memoryview(self.getvalue())


@dataclass(frozen=True, slots=True)
class Answer:
    ticket: Ticket
    response: aiohttp.ClientResponse

    @property
    def replica(self) -> Replica:
        return self.ticket.replica


def open_session() -> aiohttp.ClientSession:
    """No limit on connections and none on an answer's duration: a stream may last for hours."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_AUTO_HEADERS,
        auto_decompress=False,
        read_bufsize=READ_AHEAD_BYTES,
    )


class Upstream:
    def __init__(
        self,
        source: EndpointSource,
        session: aiohttp.ClientSession,
        metrics: GatewayMetrics,
        *,
        hold_s: Mapping[RequestClass, float],
        hold_max: int,
        max_unstated: int,
    ) -> None:
        self.router = Router(max_unstated)
        self._source = source
        self._session = session
        self._metrics = metrics
        self._hold_s = hold_s
        self._asked_at_s = float("-inf")
        metrics.watch_replicas(lambda c: self.router.num_left_out(c, time.monotonic()))
        self._holding = Holding(
            hold_max, lambda c: self.router.num_routable(c, time.monotonic()), metrics
        )

    async def close(self) -> None:
        await self._holding.close()

    def publish(self, replicas: tuple[Replica, ...]) -> None:
        if self.router.replace(replicas):
            logger.info("replicas: %s", ", ".join(each.name for each in replicas) or "none")
            self._holding.release()

    async def probe(self) -> None:
        """Bring back those that only a probe does, until cancelled."""
        while True:
            await asyncio.sleep(PROBE_PAUSE_S)
            due = self.router.due_for_probe(time.monotonic())
            await asyncio.gather(*(self._probe(replica) for replica in due))

    async def _probe(self, replica: Replica) -> None:
        if await self._ask_load(replica):
            logger.info("replica %s answers again", replica.name)
            self.router.succeeded(replica)
        else:
            self.router.failed(replica, time.monotonic())

    def demand(self, request_class: RequestClass, tenant: str, body: bytes) -> Demand:
        """Of one request, to be made once; body: empty where it asks for no tokens."""
        return self.router.demand(
            request_class,
            estimate.prompt_tokens(body),
            prefix_names(tenant, body),
            is_whole=not estimate.is_stream(body),
        )

    @asynccontextmanager
    async def exchange(self, call: Call) -> AsyncIterator[Answer]:
        """The answer's head, its body still to be read. Raise Refusal when there is none."""
        answer = await self._respond(call)
        try:
            yield answer
        except BrokenOff:
            self.router.failed(answer.replica, time.monotonic())
            raise
        else:
            if answer.response.status not in BROKEN_STATUSES:
                self.router.succeeded(answer.replica)
        finally:
            # A response read to its end has given its connection back; any other one is cut.
            answer.response.close()
            self._end(answer.ticket)

    async def _respond(self, call: Call) -> Answer:
        failed: Replica | None = None
        while True:
            replica = await self._route(call, failed)
            answer = await self._try(call, replica, may_retry=failed is None)
            if answer is not None:
                return answer
            if failed is not None:
                raise unreachable()
            failed = replica

    async def _try(self, call: Call, replica: Replica, *, may_retry: bool) -> Answer | None:
        """None when the replica failed before its first byte, or refused what another may take."""
        ticket = self.router.begin(replica, call.demand)
        answer = None
        try:
            response = await self._send(call, replica)
            self._take_head(ticket, response)
            if may_retry and self._goes_elsewhere(response, replica, call.demand):
                response.close()
            else:
                answer = Answer(ticket, response)
        except UPSTREAM_ERRORS as error:
            logger.warning("replica %s failed before its answer: %r", replica.name, error)
            self._metrics.upstream_failures.labels("before_answer").inc()
            self.router.failed(replica, time.monotonic())
        finally:
            if answer is None:
                self._end(ticket)
        return answer

    def _end(self, ticket: Ticket) -> None:
        if self.router.end(ticket):
            self._holding.release()

    def _take_head(self, ticket: Ticket, response: aiohttp.ClientResponse) -> None:
        self.router.begun(ticket)
        self._learn(ticket.replica, response)
        if response.status in BROKEN_STATUSES:
            self.router.failed(ticket.replica, time.monotonic())

    def _goes_elsewhere(
        self, response: aiohttp.ClientResponse, replica: Replica, demand: Demand
    ) -> bool:
        """A lone busy replica's refusal is an answer; a draining one will have a successor."""
        if response.status != HTTPStatus.SERVICE_UNAVAILABLE:
            return False
        now_s = time.monotonic()
        is_leaving = self.router.is_draining(replica, now_s)
        return is_leaving or self.router.choose(demand, now_s, excluding=replica) is not None

    async def _route(self, call: Call, failed: Replica | None) -> Replica:
        if failed is not None:
            self.publish(self._source.latest())
            now_s = time.monotonic()
            if self.router.choose(call.demand, now_s, excluding=failed) is None:
                await self._hold(call, SECOND_TRY_PAUSE_S)
        while True:
            now_s = time.monotonic()
            chosen = self.router.choose(call.demand, now_s, excluding=failed)
            chosen = chosen or self.router.choose(call.demand, now_s)
            if chosen is not None:
                return chosen
            at_most_s = hold_s = self._hold_s[call.demand.request_class]
            if call.demand.request_class is RequestClass.BATCH:
                # Whether replicas lend changes without the list of them.
                at_most_s = LOOK_AGAIN_S
                if await self._found_lender():
                    continue
            if not await self._hold(call, at_most_s) and now_s - call.received_s >= hold_s:
                raise not_ready(
                    f"No engine replica became ready within {hold_s:g} s; please try again."
                )

    async def _found_lender(self) -> bool:
        """Ask replicas that have not said lately whether they lend; at most one round at a time."""
        now_s = time.monotonic()
        unknown = self.router.unstated(now_s)
        if not unknown or now_s < self._asked_at_s + LOOK_AGAIN_S:
            return False
        self._asked_at_s = now_s
        await asyncio.gather(*(self._ask_load(replica) for replica in unknown))
        return self.router.num_routable(RequestClass.BATCH, time.monotonic()) > 0

    async def _ask_load(self, replica: Replica) -> bool:
        """Whether it answers; also one that does not know of loads may."""
        timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
        try:
            async with self._session.get(replica.url + LOAD_PATH, timeout=timeout) as response:
                self._learn(replica, response)
                return response.status < HTTPStatus.INTERNAL_SERVER_ERROR
        except UPSTREAM_ERRORS as error:
            logger.debug("replica %s does not state its load: %r", replica.name, error)
            return False

    async def _hold(self, call: Call, at_most_s: float) -> bool:
        """Wait for the list of replicas to change, inside the request's own hold time."""
        left_s = call.received_s + self._hold_s[call.demand.request_class] - time.monotonic()
        if left_s <= 0:
            return False
        try:
            return await self._holding.wait(call.demand.request_class, min(left_s, at_most_s))
        except HoldFull:
            raise not_ready(
                "No engine replica is ready and as many requests wait as may; please try again."
            ) from None

    async def _send(self, call: Call, replica: Replica) -> aiohttp.ClientResponse:
        call.on_sent(replica.url)
        waited_ms = max(0, round((time.monotonic() - call.received_s) * 1000))
        return await self._session.request(
            call.method,
            replica.url + call.target,
            headers=[*call.headers, (WAITED_MS_HEADER, str(waited_ms))],
            data=_Sendable(call.body.raw) if call.body.raw else None,
            allow_redirects=False,
        )

    def _learn(self, replica: Replica, response: aiohttp.ClientResponse) -> None:
        header = response.headers.get(LOAD_HEADER)
        if header is None:
            return
        try:
            load = Load.from_json(json.loads(header))
        except (KeyError, TypeError, ValueError, OverflowError):
            logger.debug("replica %s stated a load that cannot be read: %r", replica.name, header)
            return
        self.router.learn(replica, load, time.monotonic())
