"""How much of a replica's queue one tenant may hold. Pure.

Eight times what is left (dynamic thresholds, Choudhury and Hahne 1998): one flood fills eight
ninths of the queue and nine of them 72 parts of 73, so whoever else comes finds room, and no number
of tenants need be known.
"""

from __future__ import annotations

from typing import Final

OF_WHAT_IS_LEFT: Final = 8


def tenants_room(max_waiting: int, num_waiting: int) -> int:
    """Requests of one tenant that may wait while so many wait in all."""
    return OF_WHAT_IS_LEFT * max(0, max_waiting - num_waiting)
