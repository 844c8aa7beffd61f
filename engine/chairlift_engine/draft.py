"""The step being planned: whose prompt gets how many tokens, and what that cost its tenant. Pure.

A chunk is charged when it is planned, so that the next one goes to whoever is then served least;
what is not computed after all is refunded.
"""

from __future__ import annotations

from typing import NamedTuple

from chairlift_engine.request import Phase, Request
from chairlift_engine.residency import BATCH, Residency
from chairlift_engine.runner import ScheduledChunk
from chairlift_engine.tenancy import cost_of


class _Planned(NamedTuple):
    num_tokens: int
    cost: float
    num_charged_before: int


class Draft:
    """budget_tokens: what may still be added to the step."""

    def __init__(self, residency: Residency, budget_tokens: int, chunk_tokens: int) -> None:
        self.budget_tokens = budget_tokens
        self.num_batch_tokens = 0
        self._residency = residency
        self._chunk_tokens = chunk_tokens
        self._planned: dict[Request, _Planned] = {}

    def num_planned(self, request: Request) -> int:
        planned = self._planned.get(request)
        return 0 if planned is None else planned.num_tokens

    def chunk_of(self, request: Request, num_computed: int, budget_tokens: int) -> int:
        """Prefill tokens to compute now beyond the first `num_computed`; 0 when there is no room.

        All but a prompt's last chunk end on the block grid, so that a prompt is cut alike whatever
        runs beside it.
        """
        remaining = request.num_tokens - num_computed
        most = self._chunk_tokens - self.num_planned(request)
        num_tokens = min(remaining, most, budget_tokens)
        if num_tokens < remaining:
            block_tokens = self._residency.blocks.block_tokens
            num_tokens = (num_computed + num_tokens) // block_tokens * block_tokens - num_computed
        return max(num_tokens, 0)

    def add(self, request: Request, num_tokens: int) -> None:
        """More of a running request's prompt."""
        before = self._planned.get(request) or _Planned(0, 0.0, request.num_charged_tokens)
        start = request.num_computed_tokens + before.num_tokens
        end = start + num_tokens
        cost = cost_of(request, max(start, request.num_charged_tokens), end)
        self._residency.tenants.account_of(request).charge(cost)
        request.num_charged_tokens = max(request.num_charged_tokens, end)
        self._planned[request] = _Planned(
            before.num_tokens + num_tokens, before.cost + cost, before.num_charged_before
        )
        self.budget_tokens -= num_tokens
        if request.request_class is BATCH:
            self.num_batch_tokens += num_tokens

    def chunks(self) -> list[ScheduledChunk]:
        """Of the requests that were not put back after their chunk had been planned."""
        for request in [r for r in self._planned if r.phase is not Phase.PREFILL]:
            self._refund(request, self._planned.pop(request))
        return [
            ScheduledChunk(request, request.num_computed_tokens, planned.num_tokens)
            for request, planned in self._planned.items()
        ]

    def refund_all(self) -> None:
        """The step was not computed."""
        for request, planned in self._planned.items():
            self._refund(request, planned)
        self._planned.clear()

    def _refund(self, request: Request, planned: _Planned) -> None:
        request.num_charged_tokens = planned.num_charged_before
        if request.phase is not Phase.ENDED:
            self._residency.tenants.refund(request, planned.cost)
