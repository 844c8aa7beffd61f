"""Time as an argument: the engine and the simulator ask a Clock, tests hand in their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Monotonic seconds; only differences mean anything."""
        ...

    def sleep(self, duration_s: float) -> None: ...


class MonotonicClock:
    def now_s(self) -> float:
        return time.monotonic()

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)


class VirtualClock:
    """Advances only when slept on: simulated hours pass in seconds."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, duration_s: float) -> None:
        self._now_s += duration_s
