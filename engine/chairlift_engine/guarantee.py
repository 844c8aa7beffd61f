"""What batch work is given while interactive work waits: a few seats and a few tokens. Pure.

A batch request is due when it has waited for `DUE_AFTER_S` or yielded `MAX_PREEMPTIONS` times. Due
ones take the guaranteed seats, the tenant served least first, before interactive requests and
without putting any back; nobody takes a guaranteed seat. Tokens are saved up and spent in whole
blocks, so that a small share of a small budget is neither nothing nor everything.
"""

from __future__ import annotations

from operator import itemgetter

from chairlift_engine.admission import Admission
from chairlift_engine.draft import Draft
from chairlift_engine.request import Obstacle, Request
from chairlift_engine.residency import BATCH, INTERACTIVE, MAX_PREEMPTIONS, Residency
from chairlift_engine.tenancy import Account

DUE_AFTER_S = 60.0
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
        residency = self._residency
        due: list[Request] = []
        if residency.num_waiting[BATCH] and self._num_seats > residency.num_seats_held:
            due = self._due(now_s)
        begun = residency.prefilling[BATCH]
        if not (due or begun):
            self._saved_tokens = 0.0
            return True
        self._save()
        for request in tuple(begun):
            self._spend(draft, request)
        for request in due:
            if residency.num_seats_held >= self._num_seats:
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
        """At most one of each tenant, the one served least first."""
        due = [
            (account.served, account.number, request)
            for account in self._residency.tenants.ledgers[BATCH].active.values()
            if (request := _due_of(account, now_s)) is not None
        ]
        return [request for _, _, request in sorted(due, key=itemgetter(0, 1))]

    def _save(self) -> None:
        policy = self._residency.policy
        per_step = policy.batch_min_share * policy.step_tokens
        most = max(2 * per_step, self._residency.blocks.block_tokens)
        self._saved_tokens = min(self._saved_tokens + per_step, most)

    def _spend(self, draft: Draft, request: Request) -> None:
        num_tokens = self._affordable(draft, request, request.num_computed_tokens)
        if num_tokens:
            draft.add(request, num_tokens)
            draft.pause_tokens += num_tokens  # on top, or it could stall a paused prompt for good
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


def _due_of(account: Account, now_s: float) -> Request | None:
    for request in account.heads:
        is_worn_out = request.num_preemptions >= MAX_PREEMPTIONS
        if is_worn_out or now_s - request.waiting_since_s >= DUE_AFTER_S:
            return request
    return None
