"""When something of a journal happened, for people. `explain` and `replay` print it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

# Virtual time begins at 0, and no simulated run lasts for three years.
FIRST_REAL_S: Final = 1e8


def moment(at_s: float) -> str:
    """Date and time of seconds since 1970; of a simulated run, the seconds since its start."""
    if at_s < FIRST_REAL_S:
        return f"{at_s:.0f} s"
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
