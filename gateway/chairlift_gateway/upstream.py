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

from chairlift_gateway.endpoints import EndpointSource
from chairlift_gateway.holding import HoldFull, Holding
from chairlift_gateway.metrics import GatewayMetrics
from chairlift_gateway.openai_errors import not_ready, unreachable
from chairlift_gateway.routing import LOOK_AGAIN_S, Replica, Router
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
# Read from a replica ahead of the client: two of these, then the replica's socket is left full.
READ_AHEAD_BYTES: Final = 64 * 1024

_AUTO_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")

logger = logging.getLogger("chairlift_gateway.upstream")


@dataclass(frozen=True, slots=True)
class Call:
    """A whole request, ready to be sent, also twice. `received_s` is when its last byte came.

    on_sent: called when a replica is about to get it.
    """

    method: str
    target: str
    headers: Sequence[tuple[str, str]]
    body: bytes
    request_class: RequestClass
    received_s: float
    on_sent: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Answer:
    replica: Replica
    response: aiohttp.ClientResponse


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
    ) -> None:
        self.router = Router()
        self._source = source
        self._session = session
        self._metrics = metrics
        self._hold_s = hold_s
        self._asked_at_s = float("-inf")
        self._holding = Holding(
            hold_max, lambda c: self.router.num_routable(c, time.monotonic()), metrics
        )

    async def close(self) -> None:
        await self._holding.close()

    def publish(self, replicas: tuple[Replica, ...]) -> None:
        if self.router.replace(replicas):
            logger.info("replicas: %s", ", ".join(each.name for each in replicas) or "none")
            self._holding.release()

    @asynccontextmanager
    async def exchange(self, call: Call) -> AsyncIterator[Answer]:
        """The answer's head, its body still to be read. Raise Refusal when there is none."""
        answer = await self._respond(call)
        try:
            yield answer
        finally:
            # A response read to its end has given its connection back; any other one is cut.
            answer.response.close()
            self.router.end(answer.replica)

    async def _respond(self, call: Call) -> Answer:
        failed: Replica | None = None
        while True:
            replica = await self._route(call, failed)
            response = await self._try(call, replica, may_retry=failed is None)
            if response is not None:
                return Answer(replica, response)
            if failed is not None:
                raise unreachable()
            failed = replica

    async def _try(
        self, call: Call, replica: Replica, *, may_retry: bool
    ) -> aiohttp.ClientResponse | None:
        """None when the replica failed before its first byte, or refused what another may take."""
        self.router.begin(replica)
        response = None
        try:
            response = await self._send(call, replica)
            self._learn(replica, response)
            if response.status == HTTPStatus.SERVICE_UNAVAILABLE and may_retry:
                if self._has_prospects_without(replica, call.request_class):
                    response.close()
                    response = None
        except UPSTREAM_ERRORS as error:
            logger.warning("replica %s failed before its answer: %r", replica.name, error)
            self._metrics.upstream_failures.labels("before_answer").inc()
            self.router.avoid(replica, time.monotonic())
        finally:
            if response is None:
                self.router.end(replica)
        return response

    def _has_prospects_without(self, replica: Replica, request_class: RequestClass) -> bool:
        """A lone busy replica's refusal is an answer; a draining one will have a successor."""
        now_s = time.monotonic()
        is_leaving = self.router.is_draining(replica, now_s)
        return is_leaving or (
            self.router.choose(request_class, now_s, excluding=replica) is not None
        )

    async def _route(self, call: Call, failed: Replica | None) -> Replica:
        if failed is not None:
            self.publish(self._source.latest())
            now_s = time.monotonic()
            if self.router.choose(call.request_class, now_s, excluding=failed) is None:
                await self._hold(call, SECOND_TRY_PAUSE_S)
        while True:
            now_s = time.monotonic()
            chosen = self.router.choose(call.request_class, now_s, excluding=failed)
            chosen = chosen or self.router.choose(call.request_class, now_s)
            if chosen is not None:
                return chosen
            at_most_s = hold_s = self._hold_s[call.request_class]
            if call.request_class is RequestClass.BATCH:
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
        return self.router.choose(RequestClass.BATCH, time.monotonic()) is not None

    async def _ask_load(self, replica: Replica) -> None:
        timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
        try:
            async with self._session.get(replica.url + LOAD_PATH, timeout=timeout) as response:
                self._learn(replica, response)
        except UPSTREAM_ERRORS as error:
            logger.debug("replica %s does not state its load: %r", replica.name, error)

    async def _hold(self, call: Call, at_most_s: float) -> bool:
        """Wait for the list of replicas to change, inside the request's own hold time."""
        left_s = call.received_s + self._hold_s[call.request_class] - time.monotonic()
        if left_s <= 0:
            return False
        try:
            return await self._holding.wait(call.request_class, min(left_s, at_most_s))
        except HoldFull:
            raise not_ready(
                "No engine replica is ready and as many requests wait as may; please try again."
            ) from None

    async def _send(self, call: Call, replica: Replica) -> aiohttp.ClientResponse:
        call.on_sent()
        waited_ms = max(0, round((time.monotonic() - call.received_s) * 1000))
        return await self._session.request(
            call.method,
            replica.url + call.target,
            headers=[*call.headers, (WAITED_MS_HEADER, str(waited_ms))],
            data=io.BytesIO(call.body) if call.body else None,
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
