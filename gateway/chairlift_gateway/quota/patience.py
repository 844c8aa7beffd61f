"""A timeout that an event loop which is busy elsewhere does not use up.

A plain timer counts the loop's own delay as the other side's: where one pass of the loop takes
longer than the timeout, it expires beside an answer that is already in the socket. `connection` and
`keeper` wait for Redis with this one.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final

# An answer passes some ten hands between the socket and whoever asked, each a pass of the loop.
NUM_SLICES: Final = 20


class Patience:
    """`asyncio.timeout` in slices, each of which is at least one pass of the loop: TimeoutError
    after timeout_s on a loop that has time, and later on one that has none."""

    def __init__(self, timeout_s: float) -> None:
        self._slice_s = timeout_s / NUM_SLICES
        self._num_left = NUM_SLICES
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._limit.__aenter__()
        self._wait_a_slice()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        where: TracebackType | None,
    ) -> None:  # fmt: skip
        self._timer.cancel()
        await self._limit.__aexit__(kind, error, where)

    def _wait_a_slice(self) -> None:
        self._timer = self._loop.call_later(self._slice_s, self._end_slice)

    def _end_slice(self) -> None:
        self._num_left -= 1
        if self._num_left:
            self._wait_a_slice()
        else:
            self._limit.reschedule(self._loop.time())
