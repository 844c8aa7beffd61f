"""What batch work is given while interactive work waits: a few seats and a few tokens. Pure.

A batch request is due when it has waited for `DUE_AFTER_S` or yielded `MAX_PREEMPTIONS` times. Due
ones take the guaranteed seats in the order they began to wait, before interactive requests and
without putting any back; nobody takes a guaranteed seat. Tokens are saved up and spent in whole
blocks, so that a small share of a small budget is neither nothing nor everything.
"""

from __future__ import annotations

from itertools import islice, takewhile

from chairlift_engine.admission import Admission, Obstacle
from chairlift_engine.draft import Draft
from chairlift_engine.request import Request
from chairlift_engine.residency import BATCH, INTERACTIVE, Residency

DUE_AFTER_S = 60.0
# Due requests that one step tries to start.
MAX_TRIED = 8
# After so many starts past a due request that does not fit, interactive ones wait for it to fit.
MAX_DUE_PASSED = 256


class BatchGuarantee:
    def __init__(self, residency: Residency, admission: Admission) -> None:
        self._residency = residency
        self._admission = admission
        self._saved_tokens = 0.0
        self._num_interactive_at_turn = 0
        self.num_interactive_starts = 0

    def plan(self, draft: Draft, now_s: float, passed: list[Request]) -> bool:
        """Start what is due and go on with begun prompts. passed: due ones that do not fit.

        False when interactive requests must wait for one of these.
        """
        due = self._due(now_s) if self._num_seats > self._residency.num_seats_held else []
        begun = self._residency.prefilling[BATCH]
        if not (due or begun):
            self._saved_tokens = 0.0
            return True
        self._save()
        for request in tuple(begun):
            self._spend(draft, request)
        for request in due:
            if self._residency.num_seats_held >= self._num_seats:
                break
            self._try(draft, request, passed)
        return all(request.num_times_passed < MAX_DUE_PASSED for request in passed)

    @property
    def _num_seats(self) -> int:
        policy = self._residency.policy
        if policy.batch_class_share == 0 or policy.batch_min_share == 0:
            return 0
        return max(1, int(policy.batch_min_share * policy.batch_size))

    def _due(self, now_s: float) -> list[Request]:
        residency = self._residency
        aged = takewhile(lambda r: now_s - r.waiting_since_s >= DUE_AFTER_S, residency.batch_queue)
        due = {*islice(aged, MAX_TRIED), *islice(residency.worn_out_batch, MAX_TRIED)}
        return sorted(due, key=lambda r: (r.waiting_since_s, r.number))[:MAX_TRIED]

    def _save(self) -> None:
        policy = self._residency.policy
        per_step = policy.batch_min_share * policy.step_tokens
        most = max(2 * per_step, self._residency.blocks.block_tokens)
        self._saved_tokens = min(self._saved_tokens + per_step, most)

    def _spend(self, draft: Draft, request: Request) -> None:
        num_tokens = self._affordable(draft, request, request.num_computed_tokens)
        if num_tokens:
            draft.add(request, num_tokens)
            self._admission.note_computing(
                request, request.num_computed_tokens, request.num_computed_tokens + num_tokens
            )
            self._saved_tokens -= num_tokens

    def _affordable(self, draft: Draft, request: Request, num_computed: int) -> int:
        return draft.chunk_of(
            request, num_computed, min(draft.budget_tokens, int(self._saved_tokens))
        )

    def _try(self, draft: Draft, request: Request, passed: list[Request]) -> None:
        residency = self._residency
        account = residency.tenants.account_of(request)
        is_free = len(residency.running) < residency.policy.batch_size
        if not (is_free and self._is_turn and residency.tenants.has_slot(account.tenant)):
            return
        found = residency.find_prefix(request)
        if not self._affordable(draft, request, len(found) * residency.blocks.block_tokens):
            return
        obstacle = self._admission.start(request, found, as_seat=True)
        if obstacle is None:
            self._spend(draft, request)
            self._num_interactive_at_turn = self.num_interactive_starts
        elif obstacle is Obstacle.BLOCKS:
            passed.append(request)

    @property
    def _is_turn(self) -> bool:
        """A single slot cannot be shared, only taken in turns: one due request after every
        1 / share - 1 interactive ones, while these wait."""
        policy = self._residency.policy
        if policy.batch_size > 1 or not self._residency.num_waiting[INTERACTIVE]:
            return True
        num_starts = self.num_interactive_starts - self._num_interactive_at_turn
        return num_starts >= round(1 / policy.batch_min_share) - 1
