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

# What the loop did not run for counts as one slice: the rest is left to the other side.
NUM_SLICES: Final = 4
# Making a connection passes more than ten hands, each a pass of the loop.
NUM_PASSES: Final = 20


class Deadline:
    """Calls on_end after timeout_s and NUM_PASSES of the loop, unless it is cancelled before: on a
    loop that has time the passes take none."""

    __slots__ = ("_handle", "_loop", "_num_left", "_on_end", "_slice_s")

    def __init__(self, timeout_s: float, on_end: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._slice_s = timeout_s / NUM_SLICES
        self._num_left = NUM_PASSES
        self._handle: asyncio.Handle = self._loop.call_later(self._slice_s, self._go_on)

    def cancel(self) -> None:
        self._handle.cancel()

    def _go_on(self) -> None:
        self._num_left -= 1
        if self._num_left > NUM_PASSES - NUM_SLICES:
            self._handle = self._loop.call_later(self._slice_s, self._go_on)
        elif self._num_left:
            self._handle = self._loop.call_soon(self._go_on)
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
