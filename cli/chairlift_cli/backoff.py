"""How long to wait before a child that died is started again. Knows no processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# After 1, 2, 4 … seconds; one that lived long, after 1 again.
FIRST_BACKOFF_S: Final = 1.0
LONGEST_BACKOFF_S: Final = 30.0
LONG_LIFE_S: Final = 60.0


class Backoff:
    def __init__(self) -> None:
        self.next_s = FIRST_BACKOFF_S

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around a life: a long one forgives what was before."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            yield
        finally:
            if loop.time() - started_s >= LONG_LIFE_S:
                self.next_s = FIRST_BACKOFF_S

    async def sleep(self) -> None:
        wait_s, self.next_s = self.next_s, min(2 * self.next_s, LONGEST_BACKOFF_S)
        await asyncio.sleep(wait_s)
