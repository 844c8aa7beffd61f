"""Ctrl-C and SIGTERM as two events: the first asks for a drain, the second for an end at once.

Knows no processes. `supervisor` waits on it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopping:
    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()
        self.number: int | None = None

    def on_signal(self, number: int) -> None:
        if self.asked.is_set():
            self.insisted.set()
        else:
            self.number = number
        self.asked.set()


@contextmanager
def stop_signals() -> Iterator[Stopping]:
    stopping, loop = Stopping(), asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stopping.on_signal, number)
    try:
        yield stopping
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def until(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run work, cancelled when the event comes first; True if it came to its own end.

    What work raises is raised here.
    """
    working = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
