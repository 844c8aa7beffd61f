"""Requests that wait because no replica is ready: bounded in number and time, woken by an event.

When replicas appear, the waiting are let go a few at a time, interactive ones first, so that a wake
from zero does not fall on the first replica as one herd. It knows no HTTP; `upstream` calls it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from chairlift_gateway.metrics import GatewayMetrics
from chairlift_protocol.wire import RequestClass

RELEASED_PER_REPLICA = 8
RELEASE_PAUSE_S = 0.05


def num_to_release(
    num_waiting: Mapping[RequestClass, int], num_routable: Callable[[RequestClass], int]
) -> dict[RequestClass, int]:
    """How many of each class may go now; what interactive ones take, batch ones do not get."""
    num_used, released = 0, {}
    for request_class in RequestClass:
        num_open = RELEASED_PER_REPLICA * num_routable(request_class) - num_used
        released[request_class] = max(0, min(num_open, num_waiting[request_class]))
        num_used += released[request_class]
    return released


class HoldFull(Exception):
    """As many requests wait as may."""


class Holding:
    """num_max: of each class, so that neither takes the other's places."""

    def __init__(
        self,
        num_max: int,
        num_routable: Callable[[RequestClass], int],
        metrics: GatewayMetrics,
    ) -> None:
        self._num_max = num_max
        self._num_routable = num_routable
        self._metrics = metrics
        self._waiting: dict[RequestClass, deque[asyncio.Future[None]]] = {
            RequestClass.INTERACTIVE: deque(),
            RequestClass.BATCH: deque(),
        }
        self._releasing: asyncio.Task[None] | None = None

    @property
    def num_held(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def wait(self, request_class: RequestClass, timeout_s: float) -> bool:
        """Return True when let go, False after timeout_s; raise HoldFull."""
        queue = self._waiting[request_class]
        if len(queue) >= self._num_max:
            raise HoldFull
        waiter = asyncio.get_running_loop().create_future()
        queue.append(waiter)
        self._metrics.count_held(request_class, +1)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
            return True
        except TimeoutError:
            return False
        finally:
            self._metrics.count_held(request_class, -1)
            with suppress(ValueError):
                queue.remove(waiter)

    def release(self) -> None:
        """Replicas appeared: start to let the waiting go, unless that is under way."""
        if self._releasing is None or self._releasing.done():
            self._releasing = asyncio.get_running_loop().create_task(self._release_paced())

    async def close(self) -> None:
        if self._releasing is not None:
            self._releasing.cancel()
            with suppress(asyncio.CancelledError):
                await self._releasing

    async def _release_paced(self) -> None:
        while self._release_some():
            await asyncio.sleep(RELEASE_PAUSE_S)

    def _release_some(self) -> bool:
        """Let a few go for each replica that serves their class; False when there are none."""
        num_waiting = {c: len(queue) for c, queue in self._waiting.items()}
        released = num_to_release(num_waiting, self._num_routable)
        for request_class, count in released.items():
            for _ in range(count):
                waiter = self._waiting[request_class].popleft()
                # One that gave up in this very turn of the loop is still in its queue.
                if not waiter.done():
                    waiter.set_result(None)
        return any(released.values())
