"""A line for each request; of refused callers that nobody knows, whom nothing else bounds, a few.

`proxy` writes to it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

# Of some 180 bytes each, so that a flood fills no disk: 80 MB a day.
MAX_UNKNOWN_PER_S: Final = 5

logger = logging.getLogger("chairlift_gateway.access")


class AccessLog:
    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._until_s = 0.0
        self._num_unknown = 0

    def note(self, is_known: bool, line: str, *values: Any) -> None:
        if (now_s := self._now_s()) >= self._until_s:
            self._begin_second(now_s)
        if not is_known:
            self._num_unknown += 1
            if self._num_unknown > MAX_UNKNOWN_PER_S:
                return
        logger.info(line, *values)

    def _begin_second(self, now_s: float) -> None:
        if (num_left_out := self._num_unknown - MAX_UNKNOWN_PER_S) > 0:
            logger.info("left out: %d refusals of unknown callers", num_left_out)
        self._until_s = now_s + 1
        self._num_unknown = 0
