"""What happens when, in virtual time: the earliest first, and of one moment in a fixed order."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from enum import IntEnum


class Rank(IntEnum):
    """Who comes first of those due at the same time."""

    POLICY = 0  # before the observation that shall see it
    REPLICA = 1
    TICK = 2
    REST = 3


class Events:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._num_made = 0

    @property
    def next_s(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def at(self, at_s: float, do: Callable[[float], None], rank: Rank = Rank.REST) -> None:
        """Call `do` with the time when it has come."""
        self._num_made += 1
        heapq.heappush(self._heap, (at_s, rank, self._num_made, do))

    def do_next(self) -> None:
        at_s, _, _, do = heapq.heappop(self._heap)
        do(at_s)
