"""A timeout that an event loop which is busy elsewhere does not use up.

A plain timer counts the loop's own delay as the other side's: where one pass of the loop takes
longer than the timeout, it expires beside an answer that is already in the socket. Whoever waits
for Redis waits with one of these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Final

# However long the loop did not run, that counts as one.
NUM_SLICES: Final = 20
# Nearly all answers come within the first wait, of several slices: they cost one timer.
FIRST_SLICES: Final = 5
# Making a connection passes some ten hands between the socket and whoever asked.
NUM_PASSES: Final = 1 + NUM_SLICES - FIRST_SLICES


class Deadline:
    """Calls on_end, unless it is cancelled before, after NUM_PASSES of the loop: timeout_s on one
    that has time, and later on one that has none."""

    __slots__ = ("_handle", "_loop", "_num_left", "_on_end", "_slice_s")

    def __init__(self, timeout_s: float, on_end: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._slice_s = timeout_s / NUM_SLICES
        self._num_left = NUM_PASSES
        self._handle = self._loop.call_later(FIRST_SLICES * self._slice_s, self._end_slice)

    def cancel(self) -> None:
        self._handle.cancel()

    def _end_slice(self) -> None:
        self._num_left -= 1
        if self._num_left:
            self._handle = self._loop.call_later(self._slice_s, self._end_slice)
        else:
            self._on_end()


class Patience:
    """`asyncio.timeout` until a Deadline."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._deadline = Deadline(self._timeout_s, self._expire)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        where: TracebackType | None,
    ) -> None:  # fmt: skip
        self._deadline.cancel()
        await self._limit.__aexit__(kind, error, where)

    def _expire(self) -> None:
        self._limit.reschedule(asyncio.get_running_loop().time())
