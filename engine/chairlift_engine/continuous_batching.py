"""Continuous batching under one token budget: what a step holds, decided anew before each. Pure.

Each step (Sarathi-Serve, OSDI'24): every running request's next token first, then chunks of prompts
until `step_tokens` are planned. So a stream never waits for somebody else's prompt, and a slot that
empties is refilled in the next step. Interactive work strictly precedes batch work, but for what
`guarantee` gives it. Called by `scheduler.Scheduler` only.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift_engine.admission import Admission
from chairlift_engine.draft import Draft
from chairlift_engine.guarantee import BatchGuarantee
from chairlift_engine.pace import PrefillPause
from chairlift_engine.prompts import PromptPass
from chairlift_engine.request import Phase, Request
from chairlift_engine.residency import BATCH, INTERACTIVE, Residency
from chairlift_engine.runner import ScheduledChunk
from chairlift_engine.tenancy import OUTPUT_COST
from chairlift_engine.yielding import grow
from chairlift_protocol.wire import RequestClass


class ContinuousBatching:
    def __init__(self, residency: Residency) -> None:
        self.admission = Admission(residency)
        self.pause = PrefillPause(residency.blocks.block_tokens)
        self._residency = residency
        self._guarantee = BatchGuarantee(residency, self.admission)
        self._draft = Draft(residency, 0, 0, 0)

    def plan(self, now_s: float) -> tuple[list[ScheduledChunk], list[ScheduledChunk]]:
        """Decodes and prefills of the next step."""
        residency = self._residency
        stalled = self._grow(now_s)
        self.admission.begin_step(now_s)
        for ledger in residency.tenants.ledgers.values():
            ledger.begin_step()
        policy, num_decodes = residency.policy, len(residency.decoding) - len(stalled)
        budget_tokens = pause_tokens = policy.step_tokens - num_decodes
        if residency.tenants.ledgers[INTERACTIVE].decoding:
            objective_s = policy.slo.itl_ms / 1e3
            pause_tokens = self.pause.limit(budget_tokens, num_decodes, objective_s, now_s)
        draft = self._draft = Draft(residency, budget_tokens, pause_tokens, policy.chunk_tokens)
        self._plan_prompts(draft, now_s)
        # Last, since admissions may have put decoding batch work back.
        return self._decodes(stalled), draft.chunks()

    def _grow(self, now_s: float) -> set[Request]:
        """Room for every running request's next token; those that wait a step for it."""
        residency = self._residency
        if len(residency.outgrown) <= residency.blocks.num_free:
            for request in tuple(residency.outgrown):
                residency.grow(request)
            return set()
        outgrown = sorted(residency.outgrown, key=_service_order)
        refused = [r for r in outgrown if not grow(residency, r, now_s)]
        return {r for r in refused if r.phase is Phase.DECODE}

    def _decodes(self, stalled: set[Request]) -> list[ScheduledChunk]:
        """Every running request's next token, whatever the budget: a begun stream never stalls."""
        ledgers = self._residency.tenants.ledgers
        for ledger in ledgers.values():
            for account in ledger.decoding:
                account.charge(OUTPUT_COST * account.num_decoding)
        for request in stalled:
            if request.phase is Phase.DECODE:
                self._residency.tenants.refund(request, OUTPUT_COST)
        make = tuple.__new__  # twice as fast as calling the class, once for each stream and step
        decoding = self._residency.decoding
        return [
            make(ScheduledChunk, (request, request.num_computed_tokens, 1))
            for request in ([r for r in decoding if r not in stalled] if stalled else decoding)
        ]

    def _plan_prompts(self, draft: Draft, now_s: float) -> None:
        residency, admission = self._residency, self.admission
        passed: list[Request] = []
        may_admit = self._guarantee.plan(draft, now_s, passed)
        num_due = len(passed)
        # Most steps of a calm engine hold no prompt: they should cost no pass.
        if self._has_prompts(INTERACTIVE):
            prompts = PromptPass(residency, admission, draft, INTERACTIVE, passed)
            prompts.run(may_admit)
            self._guarantee.num_interactive_starts += prompts.num_started
        if self._has_prompts(BATCH):
            draft.budget_tokens = min(draft.budget_tokens, self._batch_tokens_left(draft))
            # What an interactive request waits for is not given to batch work.
            may_admit = may_admit and len(passed) == num_due
            PromptPass(residency, admission, draft, BATCH, passed).run(may_admit)

    def _has_prompts(self, request_class: RequestClass) -> bool:
        """Whether any wait or have begun."""
        residency = self._residency
        return residency.num_waiting[request_class] > 0 or bool(residency.prefilling[request_class])

    def _batch_tokens_left(self, draft: Draft) -> int:
        residency, policy = self._residency, self._residency.policy
        num_decodes = sum(a.num_decoding for a in residency.tenants.ledgers[BATCH].decoding)
        share_tokens = int(policy.batch_class_share * policy.step_tokens)
        # At least one block, or a small share of a small budget would start nothing, ever.
        most = max(share_tokens, residency.blocks.block_tokens)
        return most - num_decodes - draft.num_batch_tokens

    def discard(self, decodes: Sequence[ScheduledChunk]) -> None:
        """The step planned last, with these decodes, was not computed. Its requests are alive."""
        for chunk in decodes:
            self._residency.tenants.refund(chunk.request, OUTPUT_COST)
        self._draft.refund_all()


def _service_order(request: Request) -> tuple[bool, int]:
    return request.request_class is BATCH, request.number
