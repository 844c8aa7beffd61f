"""What is known of a quantity: a value, idleness, or nothing. Unknown is not zero.

Numbers enter the operator through `checked`, before any arithmetic. Knows no engine and no cluster;
used by everything that reads measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# A thousand years of tokens from a large machine; beyond it floats no longer count by ones.
LARGEST: Final = 1e15


@dataclass(frozen=True, slots=True)
class Value:
    value: float
    observed_at_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Idle:
    """Fresh and complete, but nothing happened that could be measured."""

    observed_at_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """No usable measurement; never a reason to raise or to lower anything."""

    reason: str
    observed_at_s: float
    source: str


Signal = Value | Idle | Unknown


def checked(value: float) -> float | None:
    """The number itself, or None for NaN, a negative or an absurd size: no counter is one."""
    return value if 0 <= value <= LARGEST else None
