"""Where the gateway's paths lead, and what their requests are to a tenant's limits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Cost(Enum):
    """What a request is to its tenant's limits."""

    TOKENS = "tokens"
    A_REQUEST = "a request"  # and no tokens
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a path leads."""

    path: str
    cost: Cost
    is_batch: bool

    @property
    def asks_for_tokens(self) -> bool:
        """What makes a request count as demand."""
        return self.cost is Cost.TOKENS
