"""Stop strings over text that arrives in pieces: the same cut, however the text was split.

The stop string that is complete first wins (of two complete at the same character, the longer), as
if the text arrived one character at a time. Text that may still become a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """The text that may now be shown, and whether a stop string has been met after it.

        One that is complete with text that may not stop is not met, there or later.
        """
        if not self._stops:
            return text, False
        num_old, text = len(self._held), self._held + text
        ends = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := text.find(stop, max(0, num_old + 1 - len(stop)))) >= 0
        ]
        if ends and may_stop:
            self._held = ""
            return text[: min(ends)[1]], True
        num_held = max(_overlap(text, stop) for stop in self._stops)
        shown = text[: len(text) - num_held]
        self._held = text[len(shown) :]
        return shown, False

    def flush(self) -> str:
        """What was held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, short of all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
