"""From a request to a replica's answer: route, hold, retry once before the first byte.

It knows no client connection: who leaves is cancelled from outside, and a cancelled exchange closes
its upstream connection, which is how an engine learns of it. `proxy` calls it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from chairlift_gateway import estimate
from chairlift_gateway.body_memory import HeldBody
from chairlift_gateway.choice import Demand, Replica
from chairlift_gateway.endpoints import EndpointSource
from chairlift_gateway.engine_http import AnswerHead, EngineConnection, EngineFailed, Sink
from chairlift_gateway.engine_pool import CONNECT_TIMEOUT_S, EnginePool, EngineRequest
from chairlift_gateway.headers import RawHeader, find
from chairlift_gateway.holding import HoldFull, Holding
from chairlift_gateway.metrics import GatewayMetrics
from chairlift_gateway.openai_errors import BrokenOff, not_ready, unreachable
from chairlift_gateway.prefixes import prefix_names
from chairlift_gateway.routing import LOOK_AGAIN_S, Router, Ticket
from chairlift_protocol.load import Load
from chairlift_protocol.wire import LOAD_HEADER, LOAD_PATH, WAITED_MS_HEADER, RequestClass

# With no other replica, a second try waits this long for the list to change.
SECOND_TRY_PAUSE_S: Final = 1.0
# What an engine that is broken answers; one that is busy says 503, which is no failure.
BROKEN_STATUSES: Final = (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.BAD_GATEWAY)
PROBE_PAUSE_S: Final = 0.5
# Of a page that only its headers are wanted of.
MAX_LOAD_PAGE_BYTES: Final = 64 * 1024

_LOAD_HEADER: Final = LOAD_HEADER.encode()
_WAITED_MS_HEADER: Final = WAITED_MS_HEADER.encode()

# Takes the head of a replica's answer; returns what takes the rest.
Begin = Callable[[AnswerHead, Replica, EngineConnection], Sink]

logger = logging.getLogger("chairlift_gateway.upstream")


@dataclass(frozen=True, slots=True)
class Call:
    """A whole request, ready to be sent, also twice. `received_s` is when its last byte came.

    on_sent: called with a replica's address when it is about to get it.
    """

    method: str
    target: str
    headers: Sequence[RawHeader]
    body: HeldBody
    demand: Demand
    received_s: float
    on_sent: Callable[[str], None]


class Upstream:
    def __init__(
        self,
        source: EndpointSource,
        engines: EnginePool,
        metrics: GatewayMetrics,
        *,
        hold_s: Mapping[RequestClass, float],
        hold_max: int,
        max_unstated: int,
    ) -> None:
        self.router = Router(max_unstated)
        self._source = source
        self._engines = engines
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

    async def exchange(self, call: Call, begin: Begin) -> None:
        """Return once the answer was relayed to its end. Raise Refusal where there is none, or not
        all of one, and whatever `begin` and its sink raise."""
        failed: Replica | None = None
        while True:
            replica = await self._route(call, failed)
            if await self._try(call, replica, begin, may_retry=failed is None):
                return
            if failed is not None:
                raise unreachable()
            failed = replica

    async def _try(self, call: Call, replica: Replica, begin: Begin, *, may_retry: bool) -> bool:
        """False when it failed before its first byte, or refused what another may take."""
        ticket = self.router.begin(replica, call.demand)
        taken: AnswerHead | None = None

        def take(head: AnswerHead, connection: EngineConnection) -> Sink | None:
            nonlocal taken
            self._take_head(ticket, head)
            if may_retry and self._goes_elsewhere(head, replica, call.demand):
                return None
            taken = head
            return begin(head, replica, connection)

        try:
            call.on_sent(replica.url)
            await self._engines.ask(replica.url, _request(call), take)
        except EngineFailed as error:
            self._failed(replica, error, is_in_answer=taken is not None)
            if taken is not None:
                raise BrokenOff from error
        finally:
            self._end(ticket)
        if taken is not None and taken.status not in BROKEN_STATUSES:
            self.router.succeeded(replica)
        return taken is not None

    def _failed(self, replica: Replica, error: EngineFailed, *, is_in_answer: bool) -> None:
        where = "in" if is_in_answer else "before"
        logger.warning("replica %s failed %s its answer: %s", replica.name, where, error)
        self._metrics.upstream_failures.labels(f"{where}_answer").inc()
        self.router.failed(replica, time.monotonic())

    def _end(self, ticket: Ticket) -> None:
        if self.router.end(ticket):
            self._holding.release()

    def _take_head(self, ticket: Ticket, head: AnswerHead) -> None:
        self.router.begun(ticket)
        self._learn(ticket.replica, head)
        if head.status in BROKEN_STATUSES:
            self.router.failed(ticket.replica, time.monotonic())

    def _goes_elsewhere(self, head: AnswerHead, replica: Replica, demand: Demand) -> bool:
        """A lone busy replica's refusal is an answer; a draining one will have a successor."""
        if head.status != HTTPStatus.SERVICE_UNAVAILABLE:
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
        try:
            answer = await self._engines.fetch(
                replica.url, EngineRequest("GET", LOAD_PATH),
                within_s=CONNECT_TIMEOUT_S, max_bytes=MAX_LOAD_PAGE_BYTES,
            )  # fmt: skip
        except EngineFailed as error:
            logger.debug("replica %s does not state its load: %s", replica.name, error)
            return False
        self._learn(replica, answer.head)
        return answer.head.status < HTTPStatus.INTERNAL_SERVER_ERROR

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

    def _learn(self, replica: Replica, head: AnswerHead) -> None:
        header = find(head.headers, _LOAD_HEADER)
        if header is None:
            return
        try:
            load = Load.from_json(json.loads(header))
        except (KeyError, TypeError, ValueError, OverflowError):
            logger.debug("replica %s stated a load that cannot be read: %r", replica.name, header)
            return
        self.router.learn(replica, load, time.monotonic())


def _request(call: Call) -> EngineRequest:
    waited_ms = max(0, round((time.monotonic() - call.received_s) * 1000))
    waited = (_WAITED_MS_HEADER, str(waited_ms).encode())
    return EngineRequest(call.method, call.target, (*call.headers, waited), call.body.raw)
