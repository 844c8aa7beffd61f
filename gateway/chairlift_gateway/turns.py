"""Work that can wait for its turn: a few pieces at once, what is more in the event loop's next
passes, in order.

An engine's step brings a token for each of its streams at once, and all in one pass would keep a
request that begins from its quota and its replica for as long as they take. It knows no sockets.
`engine_http` takes turns.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

# Each takes some 25 µs.
AT_ONCE: Final = 4
# Less than there is between two steps of an engine, more than the pieces of one turn take.
TURN_S: Final = 0.0005
# Of what waits: so a gateway that has more to do than it can falls behind with everything alike.
SHARE: Final = 32


class Turns:
    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Callable[[], None]] = deque()
        self._began_s = float("-inf")
        self._num_done = 0

    def take(self, piece: Callable[[], None]) -> None:
        """Now, if few others did lately."""
        if not self._waiting and self._may_go():
            piece()
            return
        if not self._waiting:
            self._loop.call_soon(self._go_on)
        self._waiting.append(piece)

    def _may_go(self) -> bool:
        now_s = self._now_s()
        if now_s - self._began_s > TURN_S:
            self._began_s, self._num_done = now_s, 0
        self._num_done += 1
        return self._num_done <= AT_ONCE

    def _go_on(self) -> None:
        num_waiting = len(self._waiting)
        try:
            for _ in range(min(num_waiting, max(AT_ONCE, num_waiting // SHARE))):
                self._waiting.popleft()()
        finally:  # one that fails takes no other's turn
            if self._waiting:
                self._loop.call_soon(self._go_on)
