"""How often something happened lately: a count that halves every few seconds. Pure."""

from __future__ import annotations

import math
from typing import Final

MEMORY_S: Final = 30.0  # an event's weight falls by e in this time


class RecentRate:
    def __init__(self, now_s: float) -> None:
        self._since_s = self._as_of_s = now_s
        self._count = 0.0

    def add(self, count: int, now_s: float) -> None:
        self._count = self._decayed(now_s) + count
        self._as_of_s = now_s

    def per_s(self, now_s: float) -> float:
        """0 when nothing happened yet."""
        # What has been watched for less than the memory has not had the time to add up.
        weight_s = MEMORY_S * -math.expm1(-max(now_s - self._since_s, 1.0) / MEMORY_S)
        return self._decayed(now_s) / weight_s

    def _decayed(self, now_s: float) -> float:
        return self._count * math.exp(-max(now_s - self._as_of_s, 0.0) / MEMORY_S)
