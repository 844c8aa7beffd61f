"""One class's part of a step's prefill: which prompts get how much of the budget. Pure.

The tenant served least goes first; of its prompts those already begun, then those that can start.
What cannot start is passed over. A long prompt, which fills more than a step, is given half of it
while a much shorter one is behind it, so that short ones are not held up; all long ones together
get no more than that, and what nobody else took goes round again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from chairlift_engine.admission import Admission
from chairlift_engine.draft import Draft
from chairlift_engine.request import Obstacle, Phase, Request
from chairlift_engine.residency import Residency
from chairlift_engine.tenancy import Account
from chairlift_protocol.wire import RequestClass

# A request that does not fit is passed over by later ones, but not for ever: after this many it
# holds back its class until it fits.
MAX_TIMES_PASSED = 32
# Waiting requests that one step looks at in vain. Bounds the time that planning takes.
MAX_LOOKED_AT = 64
# Requests of one tenant that wait for a prefix in the making, and are looked at in one step.
MAX_SHARING = 16


class PromptPass:
    """Used once. passed: requests passed over earlier in this step; this pass adds to them."""

    def __init__(
        self,
        residency: Residency,
        admission: Admission,
        draft: Draft,
        request_class: RequestClass,
        passed: list[Request],
    ) -> None:
        self._residency = residency
        self._admission = admission
        self._draft = draft
        self._class = request_class
        self._ledger = residency.tenants.ledgers[request_class]
        self._passed = passed
        self._block_tokens = residency.blocks.block_tokens
        self._begun = list(self._begun_by_account())
        heapq.heapify(self._begun)
        self._cut: list[Request] = []
        self._num_looked_at = 0
        self._num_sharing: Counter[Account] = Counter()
        self.num_started = 0
        self.is_held_back = False  # by a request that was passed over too often

    def run(self, may_admit: bool) -> None:
        draft = self._draft
        while draft.budget_tokens > 0:
            waiting = self._next_account() if may_admit else None
            begun = self._begun[0] if self._begun else None
            if begun is not None and (waiting is None or begun[0] <= waiting.served):
                is_done = self._continue(begun)
            elif waiting is not None:
                is_done = self._try(waiting)
            else:
                break
            if is_done:
                break
        self._go_round_again(may_admit)

    def _begun_by_account(self) -> Iterator[tuple[float, int, Account, list[Request]]]:
        requests: dict[Account, list[Request]] = {}
        for request in reversed(self._residency.prefilling[self._class]):
            if self._draft.num_planned(request) < request.num_uncomputed_tokens:
                account = self._residency.tenants.account_of(request)
                requests.setdefault(account, []).append(request)
        for account, own in requests.items():
            yield account.served, account.number, account, own

    def _next_account(self) -> Account | None:
        """With a request that may have a slot, as far as it is known."""
        admission, ledger = self._admission, self._ledger
        if self.is_held_back or self._num_looked_at >= MAX_LOOKED_AT:
            return None
        while (account := ledger.least_served()) is not None:
            if not admission.has_slot(self._class):
                return None
            if admission.tenant_has_slot(account, self._class):
                ledger.lift_capped(account.served)
                return account
            ledger.pass_by(account)
        return None

    def _continue(self, begun: tuple[float, int, Account, list[Request]]) -> bool:
        """More of a begun prompt. True when what is left of the budget is of no use to anybody."""
        _, number, account, requests = begun
        request = requests.pop()
        num_computed = request.num_computed_tokens + self._draft.num_planned(request)
        num_tokens = self._share_of(request, num_computed)
        if num_tokens:
            self._plan(request, num_tokens)
        if requests:
            heapq.heapreplace(self._begun, (account.served, number, account, requests))
        else:
            heapq.heappop(self._begun)
        return not num_tokens and self._draft.budget_tokens < self._block_tokens

    def _try(self, account: Account) -> bool:
        """Start the account's next request. True as above."""
        request = account.waiting[account.next_waiting]
        found = self._residency.find_prefix(request)
        if self._admission.shares_with(request, len(found)) is not None:
            self._skip(account, request, Obstacle.PREFIX)
            return False
        num_tokens = self._share_of(request, len(found) * self._block_tokens)
        if not num_tokens:
            self._ledger.move_on(account)
            self._num_looked_at += 1
            return self._draft.budget_tokens < self._block_tokens
        obstacle = self._start(request, found, num_tokens)
        if obstacle is not None:
            self._skip(account, request, obstacle)
            if self._cut and self._cut[-1] is request:
                self._cut.pop()
        return False

    def _skip(self, account: Account, request: Request, obstacle: Obstacle) -> None:
        request.obstacle = obstacle
        request.looked_at_in_step = self._residency.step
        # What is a tenant's own affair must not use up what the step may look at of others.
        if obstacle is Obstacle.TENANT_KV:
            self._ledger.pass_by(account)
        elif self._shares_too_often(account, obstacle):
            self._ledger.move_on(account, len(account.waiting))
        else:
            self._ledger.move_on(account)
            self._num_looked_at += obstacle is not Obstacle.PREFIX

    def _shares_too_often(self, account: Account, obstacle: Obstacle) -> bool:
        """A crowd behind one prefix is not looked at one by one."""
        self._num_sharing[account] += obstacle is Obstacle.PREFIX
        return self._num_sharing[account] > MAX_SHARING

    def _start(self, request: Request, found: list[int], num_tokens: int) -> Obstacle | None:
        obstacle = self._admission.start(request, found)
        if obstacle is None:
            self.num_started += 1
            self._plan(request, num_tokens)
            for other in self._passed:
                other.num_times_passed += 1
        elif obstacle is Obstacle.SLOTS:
            self._num_looked_at = MAX_LOOKED_AT  # for nobody else either
        elif obstacle is Obstacle.BLOCKS and request not in self._passed:
            self._passed.append(request)
            self.is_held_back |= request.num_times_passed >= MAX_TIMES_PASSED
        return obstacle

    def _share_of(self, request: Request, num_computed: int) -> int:
        """Tokens of the budget for its next chunk; 0 may also leave it for the second round."""
        num_tokens = self._chunk_of(request, num_computed)
        if not (num_tokens and self._is_long(request, num_computed)):
            return num_tokens
        if not self._residency.has_shorter_prompt(request):
            return num_tokens
        self._cut.append(request)
        if len(self._cut) > 1:
            return 0
        half = max(self._draft.budget_tokens // 2, self._block_tokens)
        return min(num_tokens, self._draft.chunk_of(request, num_computed, half))

    def _chunk_of(self, request: Request, num_computed: int) -> int:
        """Tokens for its next chunk if it may have all that is left."""
        draft = self._draft
        budget_tokens = draft.budget_tokens
        if self._is_long(request, num_computed):
            budget_tokens = min(budget_tokens, draft.pause_tokens)
        return draft.chunk_of(request, num_computed, budget_tokens)

    def _is_long(self, request: Request, num_computed: int) -> bool:
        """To its end, though its last chunk is short."""
        num_found = request.num_cached_tokens if request.phase is Phase.PREFILL else num_computed
        return request.num_tokens - num_found > self._draft.full_tokens

    def _go_round_again(self, may_admit: bool) -> None:
        draft = self._draft
        for request in self._cut:
            if request.phase is Phase.PREFILL:
                num_computed = request.num_computed_tokens + draft.num_planned(request)
                num_tokens = self._chunk_of(request, num_computed)
                if num_tokens:
                    self._plan(request, num_tokens)
            elif min(draft.budget_tokens, draft.pause_tokens) < self._block_tokens:
                continue  # a long prompt does not begin with less than a block
            elif may_admit and not self.is_held_back:
                self._start_late(request)

    def _start_late(self, request: Request) -> None:
        account = self._residency.tenants.account_of(request)
        admission = self._admission
        if not admission.has_slot(self._class):
            return
        if not admission.tenant_has_slot(account, self._class):
            return
        found = self._residency.find_prefix(request)
        if admission.shares_with(request, len(found)) is None:
            num_tokens = self._chunk_of(request, len(found) * self._block_tokens)
            if num_tokens:
                self._start(request, found, num_tokens)

    def _plan(self, request: Request, num_tokens: int) -> None:
        start = request.num_computed_tokens + self._draft.num_planned(request)
        self._draft.add(request, num_tokens)
        self._admission.note_computing(request, start, start + num_tokens)
