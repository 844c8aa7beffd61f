"""Which replicas get nothing for a while because they failed, for how long, and how they come back.
Pure; times are arguments.

One failure is an accident: the replica is avoided for a moment. Each further one in a row doubles
that. Who failed several times in a row is readmitted by a probe alone, so that no client pays for
finding out. Not all may be out at once: a fault that all have is not the replicas'.
`routing` keeps one for each replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

AVOID_S: Final = 2.0
LONGEST_AVOID_S: Final = 60.0
# So many failures in a row are no accident any more.
PROBED_FROM: Final = 3
MAX_SHARE: Final = 0.5


@dataclass(slots=True)
class Failures:
    """In a row, up to now."""

    num_in_a_row: int = 0
    until_s: float = float("-inf")

    def failed(self, now_s: float) -> None:
        """Requests that failed together count once: they say the same."""
        if now_s < self.until_s:
            return
        self.num_in_a_row += 1
        self.until_s = now_s + min(LONGEST_AVOID_S, AVOID_S * 2 ** (self.num_in_a_row - 1))

    def succeeded(self) -> None:
        self.num_in_a_row = 0
        self.until_s = float("-inf")

    def is_out(self, now_s: float) -> bool:
        return now_s < self.until_s or self.num_in_a_row >= PROBED_FROM

    def is_due(self, now_s: float) -> bool:
        """For a probe."""
        return self.num_in_a_row >= PROBED_FROM and now_s >= self.until_s


def avoided(failures: Sequence[Failures], now_s: float) -> list[bool]:
    """Of the replicas of a class: those out, longest in trouble first, up to their share of all."""
    num_most = max(1, int(MAX_SHARE * len(failures)))
    out = [i for i, each in enumerate(failures) if each.is_out(now_s)]
    out.sort(key=lambda i: -failures[i].num_in_a_row)
    kept_out = set(out[:num_most])
    return [i in kept_out for i in range(len(failures))]
