"""Work that can wait for its turn: a few pieces in each pass of the event loop, in their order.

An engine's step brings a token for each of its streams at once, and all in one pass would keep a
request that begins from its quota and its replica for as long as they take. It knows no sockets.
`engine_http` takes turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

# Each takes some 25 µs.
FEWEST: Final = 4
# Of what waits: so a gateway that has more to do than it can falls behind with everything alike.
SHARE: Final = 32


class Turns:
    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self, piece: Callable[[], None]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._run_some)
        self._waiting.append(piece)

    def _run_some(self) -> None:
        num_waiting = len(self._waiting)
        try:
            for _ in range(min(num_waiting, max(FEWEST, num_waiting // SHARE))):
                self._waiting.popleft()()
        finally:  # one that fails takes no other's turn
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._run_some)
