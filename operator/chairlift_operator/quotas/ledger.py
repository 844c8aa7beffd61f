"""What tenants used and were refused in the last minute, from counters that tell sums. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 60.0
# Counters are read every few seconds: a window is whole when its first reading is so near its edge.
SLACK_S: Final = 15.0
LEAST_GAP_S: Final = 2.0  # readings between two are left out: changes may bring many


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one holder: tokens and refusals so far, requests now and the tokens that they hold."""

    num_used: int
    num_refused: int
    num_running: int
    num_reserved: int = 0


@dataclass(frozen=True, slots=True)
class Use:
    """Of one holder in the last minute; None is not known. num_running, num_reserved: now.

    lowered_to: tokens a minute that it may use at most for now, where they are fewer than set.
    """

    num_used: int | None = None
    num_refused: int | None = None
    num_running: int | None = None
    num_reserved: int | None = None
    lowered_to: int | None = None


class Ledger:
    """Readings of one pool's counters, as many as a minute needs."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Mapping[str, Counts]]] = deque()

    def note(self, at_s: float, counts: Mapping[str, Counts]) -> None:
        if self._readings and at_s - self._readings[-1][0] < LEAST_GAP_S:
            return
        self._readings.append((at_s, counts))
        while len(self._readings) > 1 and self._readings[1][0] <= at_s - WINDOW_S:
            self._readings.popleft()

    def is_fresh(self, now_s: float) -> bool:
        return bool(self._readings) and now_s - self._readings[-1][0] <= SLACK_S

    def asking(self) -> list[str]:
        """Holders that have requests now, or used or were refused anything since the first reading
        that is kept."""
        if not self._readings:
            return []
        first, latest = self._readings[0][1], self._readings[-1][1]
        return [
            holder
            for holder, counts in latest.items()
            if counts.num_running or counts != first.get(holder)
        ]

    def use(self, holder: str, now_s: float) -> Use:
        """Not known before a minute was watched, nor when the last reading is old."""
        if not self.is_fresh(now_s):
            return Use()
        latest = self._readings[-1][1].get(holder)
        if latest is None:
            return Use()
        whole = [counts for _, counts in self._readings if holder in counts]
        is_whole = len(whole) == len(self._readings)
        if not is_whole or now_s - self._readings[0][0] < WINDOW_S - SLACK_S:
            return Use(num_running=latest.num_running, num_reserved=latest.num_reserved)
        pairs = [(a[holder], b[holder]) for a, b in zip(whole, whole[1:], strict=False)]
        return Use(
            sum(_rise(before.num_used, after.num_used) for before, after in pairs),
            sum(_rise(before.num_refused, after.num_refused) for before, after in pairs),
            latest.num_running,
            latest.num_reserved,
        )


def _rise(before: int, after: int) -> int:
    """An account that was forgotten, or lost with its Redis, counts from zero again."""
    return after - before if after >= before else after
