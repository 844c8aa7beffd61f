"""When a pool's turn is: each at a moment of its own, so that they do not come at once. Pure."""

from __future__ import annotations

import math
import zlib
from typing import Final

PoolKey = tuple[str, str]
_NUM_PHASES: Final = 1 << 32


def turn_of(key: PoolKey, num_turns: int) -> int:
    return _number(key) % num_turns


def is_due(key: PoolKey, last_s: float, now_s: float, every_s: float) -> bool:
    """Whether the pool's moment, one in each period, lies between last_s and now_s."""
    phase_s = _number(key) / _NUM_PHASES * every_s
    return math.floor((now_s - phase_s) / every_s) > math.floor((last_s - phase_s) / every_s)


def _number(key: PoolKey) -> int:
    return zlib.crc32("/".join(key).encode())
