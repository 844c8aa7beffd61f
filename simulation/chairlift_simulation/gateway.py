"""The gateway in virtual time: its own routing and release decisions, its waits as events.

Knows no engine: what it sends and refuses goes to its `Outlet`. Times are arguments; what shall
happen later is asked of `Events`. `pool_run` calls it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

from chairlift_gateway.choice import Demand, Replica
from chairlift_gateway.config import GatewayConfig
from chairlift_gateway.holding import RELEASE_PAUSE_S, num_to_release
from chairlift_gateway.prefixes import MAX_BLOCKS
from chairlift_gateway.routing import LOOK_AGAIN_S, Router, Ticket
from chairlift_operator.exposition import GatewayClassSample
from chairlift_protocol.load import Load
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.arrival_traces import PREFIX_BLOCK_TOKENS
from chairlift_simulation.events import Events
from chairlift_simulation.records import Journey
from chairlift_simulation.replica import VirtualRequest

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH


class Outlet(Protocol):
    def send(self, journey: Journey, replica: str, now_s: float) -> None: ...

    def refuse(self, journey: Journey, why: str, now_s: float) -> None: ...

    def load_of(self, replica: str) -> Load: ...


_DEFAULTS = GatewayConfig(endpoints_path=None, internal_token="")


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """How long and how many requests, of each class, may wait while no replica is ready."""

    hold_s: float = _DEFAULTS.hold_s
    batch_hold_s: float = _DEFAULTS.batch_hold_s
    num_max: int = _DEFAULTS.hold_max

    def of(self, request_class: RequestClass) -> float:
        return self.batch_hold_s if request_class is BATCH else self.hold_s


class VirtualGateway:
    def __init__(self, events: Events, outlet: Outlet, limits: HoldLimits, router: Router) -> None:
        self._events = events
        self._outlet = outlet
        self._limits = limits
        self._router = router
        self._num_received = dict.fromkeys(RequestClass, 0)
        self._held: dict[RequestClass, deque[Journey]] = {c: deque() for c in RequestClass}
        self._demands: dict[Journey, Demand] = {}
        self._sent: dict[Journey, Ticket] = {}
        self._is_releasing = self._is_looking = False

    @property
    def num_held(self) -> int:
        return sum(map(len, self._held.values()))

    def samples(self) -> tuple[GatewayClassSample, ...]:
        return tuple(
            GatewayClassSample(c, float(self._num_received[c]), float(len(self._held[c])))
            for c in RequestClass
        )

    def publish(self, replicas: tuple[Replica, ...], now_s: float) -> None:
        if self._router.replace(replicas) and not self._is_releasing:
            self._is_releasing = True
            self._release(now_s)

    def receive(self, journey: Journey, now_s: float) -> None:
        request = journey.request
        self._num_received[request.request_class] += 1
        self._demands[journey] = self._router.demand(
            request.request_class, request.prompt_tokens, _prefix_names(request)
        )
        if not self._route(journey, now_s):
            self._hold(journey, now_s)

    def learn(self, journey: Journey, now_s: float) -> None:
        """The head of its answer came, and with it the replica's load."""
        ticket = self._sent[journey]
        replica = ticket.replica
        self._router.begun(ticket)
        self._router.learn(replica, self._outlet.load_of(replica.name), now_s)

    def end(self, journey: Journey) -> None:
        self._router.end(self._sent.pop(journey))

    def _route(self, journey: Journey, now_s: float) -> bool:
        demand = self._demands[journey]
        replica = self._router.choose(demand, now_s)
        if replica is None:
            return False
        self._sent[journey] = self._router.begin(replica, demand)
        del self._demands[journey]
        self._outlet.send(journey, replica.name, now_s)
        return True

    def _hold(self, journey: Journey, now_s: float) -> None:
        request_class = journey.request.request_class
        queue = self._held[request_class]
        if len(queue) >= self._limits.num_max:
            self._refuse(journey, "held by the gateway: too many", now_s)
            return
        queue.append(journey)
        ends_s = journey.request.due_s + self._limits.of(request_class)
        self._events.at(max(now_s, ends_s), lambda at_s: self._give_up(journey, at_s))
        if request_class is BATCH and not self._is_looking:
            self._is_looking = True
            self._look(now_s)

    def _give_up(self, journey: Journey, now_s: float) -> None:
        queue = self._held[journey.request.request_class]
        if journey in queue:
            queue.remove(journey)
            self._refuse(journey, "no replica became ready in time", now_s)

    def _refuse(self, journey: Journey, why: str, now_s: float) -> None:
        del self._demands[journey]
        self._outlet.refuse(journey, why, now_s)

    def _look(self, now_s: float) -> None:
        """Held batch work asks whether a replica lends."""
        queue = self._held[BATCH]
        if not self._router.num_routable(BATCH, now_s):
            for replica in self._router.unstated(now_s):
                self._router.learn(replica, self._outlet.load_of(replica.name), now_s)
        while queue and self._route(queue[0], now_s):
            queue.popleft()
        self._is_looking = bool(queue)
        if queue:
            self._events.at(now_s + LOOK_AGAIN_S, self._look)

    def _release(self, now_s: float) -> None:
        num_waiting = {c: len(queue) for c, queue in self._held.items()}
        released = num_to_release(num_waiting, lambda c: self._router.num_routable(c, now_s))
        for request_class, count in released.items():
            for journey in [self._held[request_class].popleft() for _ in range(count)]:
                self._route(journey, now_s)
        self._is_releasing = any(released.values())
        if self._is_releasing:
            self._events.at(now_s + RELEASE_PAUSE_S, self._release)


def _prefix_names(request: VirtualRequest) -> tuple[int, ...]:
    """As the gateway names blocks of text, for blocks of tokens."""
    num_whole = min(MAX_BLOCKS, request.prompt_tokens // PREFIX_BLOCK_TOKENS)
    root = crc32(request.tenant.encode())
    return tuple(crc32(b"%d" % block, root) for block in request.prefix_blocks[:num_whole])
