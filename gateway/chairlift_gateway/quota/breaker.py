"""Whether Redis is asked at all. Pure.

Requests never try it out: once it is open, only a probe closes it, so that while Redis is away
nobody waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# One slow answer is a hiccup; two in a row are paid for by 20 ms of waiting each.
FAILURES_TO_OPEN: Final = 2
FIRST_PROBE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 2.0


@dataclass(slots=True)
class Breaker:
    is_open: bool = False
    _num_failures: int = 0
    _pause_s: float = FIRST_PROBE_S

    def failed(self, *, at_once: bool = False) -> bool:
        """Say whether this opened it. at_once: no second failure is needed to be sure."""
        self._num_failures += 1
        if self.is_open or not (at_once or self._num_failures >= FAILURES_TO_OPEN):
            return False
        self.is_open, self._pause_s = True, FIRST_PROBE_S
        return True

    def succeeded(self) -> None:
        """An answer that was under way when it opened does not close it."""
        self._num_failures = 0

    def close(self) -> None:
        self.is_open, self._num_failures = False, 0

    def next_pause_s(self) -> float:
        """How long to wait before the next probe: each time longer."""
        pause_s = self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        return pause_s
