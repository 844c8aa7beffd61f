"""Other ways of choosing a replica, to compare the gateway's own with, and parts of it left out.

Each is the gateway's `Router` but for its last decision, so that all see the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from chairlift_gateway.choice import Demand, Replica
from chairlift_gateway.routing import Router


@dataclass(slots=True)
class RandomRouter(Router):
    random: Random = field(default_factory=lambda: Random(0))

    def choose(
        self, demand: Demand, now_s: float, excluding: Replica | None = None
    ) -> Replica | None:
        candidates = self._candidates(demand.request_class, now_s)
        return self.random.choice(candidates).replica if candidates else None


@dataclass(slots=True)
class LeastConnections(Router):
    def choose(
        self, demand: Demand, now_s: float, excluding: Replica | None = None
    ) -> Replica | None:
        candidates = self._candidates(demand.request_class, now_s)
        candidates.sort(key=lambda each: (each.num_requests, each.last_turn))
        return candidates[0].replica if candidates else None


@dataclass(slots=True)
class WithoutAffinity(Router):
    """By predicted wait alone."""

    def choose(
        self, demand: Demand, now_s: float, excluding: Replica | None = None
    ) -> Replica | None:
        return super(WithoutAffinity, self).choose(replace(demand, prefix=None), now_s, excluding)
