"""Whether tenants that wait for the same slots and tokens are served alike, seen from outside.

Counts what is computed for each tenant. While two of one class both have requests waiting that only
their turn keeps from running, what they were served over their weights differs by no more than the
VTC bound (OSDI'24): twice what one prompt or all running requests together can cost, which is no
more than a full KV memory, nor than the costliest request in every slot; and what one was owed at
first, since memory that was short, or a guaranteed seat, had kept it from its turn.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import NamedTuple

from chairlift_engine.config import Capacity
from chairlift_engine.request import Obstacle, Phase, Request
from chairlift_engine.scheduler import Scheduler
from chairlift_engine.tenancy import OUTPUT_COST, PROMPT_COST, cost_of
from chairlift_protocol.wire import RequestClass

_TURN = (Obstacle.SLOTS, Obstacle.SHARE, Obstacle.TURN)
_Key = tuple[RequestClass, str]


class _Start(NamedTuple):
    """Of the time during which two wait side by side."""

    gap: float
    owed: float


class FairnessWatch:
    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._costliest = PROMPT_COST
        self._served: dict[_Key, float] = defaultdict(float)
        self._starts: dict[tuple[_Key, _Key], _Start] = {}
        self.broken = ""
        self.widest = 0.0  # gap seen, over the bound
        self.num_compared = 0

    def count(self, request: Request, start: int, end: int) -> None:
        """Computed, and never before."""
        self._costliest = max(self._costliest, cost_of(request, 0, request.num_final_tokens))
        key = request.request_class, request.tenant
        self._served[key] += cost_of(request, start, end)

    def served_by_tenant(self) -> dict[str, float]:
        """Interactive requests' cost, before weights."""
        return {tenant: cost for (c, tenant), cost in self._served.items() if c == "interactive"}

    def restart(self) -> None:
        """Weights or caps changed."""
        self._starts.clear()

    def observe(self, scheduler: Scheduler) -> None:
        backlogged = self._backlogged(scheduler)
        # Guaranteed seats go to those who waited long, not to the one served least of all.
        unordered = (RequestClass.BATCH,) if scheduler.residency.num_seats_held else ()
        starts: dict[tuple[_Key, _Key], _Start] = {}
        for pair in combinations(sorted(backlogged), 2):
            if pair[0][0] is pair[1][0] and pair[0][0] not in unordered:
                gap = self._gap(scheduler, pair)
                start = self._starts.get(pair) or _Start(gap, _owed(scheduler, pair))
                starts[pair] = start
                self._compare(scheduler, pair, abs(gap - start.gap), start.owed)
        self._starts = starts

    def _compare(
        self, scheduler: Scheduler, pair: tuple[_Key, _Key], gap: float, owed: float
    ) -> None:
        memory = max(
            PROMPT_COST * self._capacity.longest_prompt_tokens,
            OUTPUT_COST * self._capacity.kv_tokens,
        )
        slots = self._costliest * self._capacity.batch_size
        least_weight = min(_weight(scheduler, key[1]) for key in pair)
        bound = 2 * min(memory, slots) / least_weight + owed
        self.num_compared += 1
        self.widest = max(self.widest, gap / bound)
        if gap > bound:
            self.broken = f"{pair}: {gap:.0f} apart, bound {bound:.0f}"

    def _gap(self, scheduler: Scheduler, pair: tuple[_Key, _Key]) -> float:
        first, second = (self._served[key] / _weight(scheduler, key[1]) for key in pair)
        return first - second

    def _backlogged(self, scheduler: Scheduler) -> set[_Key]:
        """With requests that wait, and each of them only for its turn."""
        obstacles: dict[_Key, set[Obstacle | None]] = defaultdict(set)
        for known in scheduler.explain():
            if known.phase is Phase.WAITING:
                key = known.request.request_class, known.request.tenant
                obstacles[key].add(known.obstacle)
        return {key for key, found in obstacles.items() if found <= {*_TURN}}


def _weight(scheduler: Scheduler, tenant: str) -> float:
    return scheduler.residency.tenants.policy_of(tenant).weight


def _owed(scheduler: Scheduler, pair: tuple[_Key, _Key]) -> float:
    ledger = scheduler.residency.tenants.ledgers[pair[0][0]]
    first, second = (ledger.active[tenant].served for _, tenant in pair)
    return abs(first - second)
