"""What tenants used and were refused in a minute, from counters that tell sums. Pure.

Of many tenants each is read less often: then it is the minute before its last reading, and the
first rise of it counts by the part that lies in that minute.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 60.0
# Counters are read every few seconds: a window is whole when its first reading is so near its edge.
SLACK_S: Final = 15.0
LEAST_GAP_S: Final = 2.0  # readings between two are left out: changes may bring many


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one holder: tokens and refusals so far, requests now and the tokens that they hold; None
    where no gateway has counted those."""

    num_used: int
    num_refused: int
    num_running: int
    num_reserved: int | None = 0


@dataclass(frozen=True, slots=True)
class Use:
    """Of one holder in a minute; None is not known. num_running, num_reserved: at the end of it.

    lowered_to: tokens a minute that it may use at most for now, where they are fewer than set.
    """

    num_used: int | None = None
    num_refused: int | None = None
    num_running: int | None = None
    num_reserved: int | None = None
    lowered_to: int | None = None


@dataclass(frozen=True, slots=True)
class _Reading:
    at_s: float
    counts: Counts


class Ledger:
    """Readings of one pool's counters, of each holder as many as a minute needs."""

    def __init__(self) -> None:
        self._readings: dict[str, list[_Reading]] = {}
        self._noted_at_s = -math.inf

    def note(self, at_s: float, counts: Mapping[str, Counts]) -> None:
        self._noted_at_s = at_s
        for holder, read in counts.items():
            known = self._readings.setdefault(holder, [])
            if known and at_s - known[-1].at_s < LEAST_GAP_S:
                continue
            if len(known) > 1 and known[-2].counts == known[-1].counts == read:
                known.pop()  # one who rests takes no more room
            known.append(_Reading(at_s, read))
            while len(known) > 1 and known[1].at_s <= at_s - WINDOW_S:
                known.pop(0)

    def keep_only(self, holders: Collection[str]) -> None:
        for holder in self._readings.keys() - holders:
            del self._readings[holder]

    def is_fresh(self, now_s: float) -> bool:
        """Whether any counter was read lately."""
        return now_s - self._noted_at_s <= SLACK_S

    def asking(self) -> Iterator[str]:
        """Holders that have requests now, or used or were refused anything since the first reading
        that is kept, by what is known of each."""
        for holder, known in self._readings.items():
            latest = known[-1].counts
            if latest.num_running or latest != known[0].counts:
                yield holder

    def use(self, holder: str, now_s: float, every_s: float) -> Use:
        """every_s: how often it is read. Not known before a minute was watched, nor when the last
        reading is old."""
        known = self._readings.get(holder)
        if known is None or now_s - known[-1].at_s > max(SLACK_S, 2 * every_s):
            return Use()
        latest = known[-1]
        begin_s = latest.at_s - WINDOW_S
        num_running, num_reserved = latest.counts.num_running, latest.counts.num_reserved
        if known[0].at_s > begin_s + SLACK_S:
            return Use(num_running=num_running, num_reserved=num_reserved)
        num_used = num_refused = 0.0
        for before, after in zip(known, known[1:], strict=False):
            share = min(1.0, (after.at_s - begin_s) / (after.at_s - before.at_s))
            num_used += share * _rise(before.counts.num_used, after.counts.num_used)
            num_refused += share * _rise(before.counts.num_refused, after.counts.num_refused)
        return Use(round(num_used), round(num_refused), num_running, num_reserved)


def _rise(before: int, after: int) -> int:
    """An account that was forgotten, or lost with its Redis, counts from zero again."""
    return after - before if after >= before else after
