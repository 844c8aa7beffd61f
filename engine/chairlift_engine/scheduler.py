"""Which tokens the next step computes: continuous batching under one token budget. Pure.

Each step (Sarathi-Serve, OSDI'24): every running request's next token first, then chunks of the
prompts already begun, then new admissions, until `step_tokens` are planned. So a stream never waits
for somebody else's prompt, and a slot that empties is refilled in the next step. Interactive work
strictly precedes batch work. Knows no torch, no clock and no HTTP; called by `engine.Engine` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from chairlift_engine.admission import Admission
from chairlift_engine.config import Capacity
from chairlift_engine.draft import Draft
from chairlift_engine.guarantee import BatchGuarantee
from chairlift_engine.pace import PrefillPause
from chairlift_engine.prompts import PromptPass
from chairlift_engine.request import FinishReason, Phase, Request
from chairlift_engine.residency import BATCH, INTERACTIVE, Residency
from chairlift_engine.runner import ScheduledChunk
from chairlift_engine.static_batching import StaticBatching
from chairlift_engine.tenancy import OUTPUT_COST
from chairlift_engine.yielding import grow
from chairlift_protocol.policy import Policy


class StalePolicy(ValueError):
    """A policy whose generation is not newer than the one in force."""


class PolicyOutOfRange(ValueError):
    """A policy that the start-up capacity cannot hold."""


class Refusal(NamedTuple):
    """A tenant has as many requests waiting as its policy allows."""

    tenant: str
    num_waiting: int
    max_waiting: int


class TokenEvent(NamedTuple):
    """One sampled token. gap_s is None for a request's first token."""

    request: Request
    token_id: int
    gap_s: float | None
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes; decodes first.

    kv_tokens: context that its sequences attend to.
    retry_after_s: with nothing to compute, when there will be without any new command.
    """

    chunks: tuple[ScheduledChunk, ...]
    num_decode_seqs: int
    num_prefill_tokens: int
    kv_tokens: int
    num_preemptions: int
    retry_after_s: float | None = None


class Scheduler:
    def __init__(self, capacity: Capacity, policy: Policy) -> None:
        check_range(policy, capacity)
        self.capacity = capacity
        self.residency = Residency(capacity, policy)
        self._admission = Admission(self.residency)
        self._guarantee = BatchGuarantee(self.residency, self._admission)
        self._static = StaticBatching(self.residency)
        self._pause = PrefillPause(capacity.block_tokens)
        self._draft = Draft(self.residency, 0, 0)
        self._longest_tokens = min(capacity.model_length_tokens, capacity.kv_tokens)
        self._scheduled_s = 0.0

    @property
    def policy(self) -> Policy:
        return self.residency.policy

    def add(self, request: Request) -> None:
        """Queue a request that fits `Capacity.longest_prompt_tokens`; its id must be unused."""
        assert 0 < request.num_prompt_tokens <= self.capacity.longest_prompt_tokens
        request.num_final_tokens = min(request.num_final_tokens, self._longest_tokens)
        self.residency.enqueue(request)

    def abort(self, request_id: str) -> Request | None:
        """Forget a request and free what it holds; None when it is unknown or has finished."""
        return self.residency.forget(request_id)

    def set_policy(self, policy: Policy) -> None:
        """Take effect from the next step; lowering drains. The policy in force again is no error.

        Raises StalePolicy or PolicyOutOfRange, and then changes nothing.
        """
        if policy == self.policy:
            return
        if policy.generation <= self.policy.generation:
            raise StalePolicy(
                f"generation {policy.generation.to_json()} is not newer than "
                f"{self.policy.generation.to_json()}, which is in force"
            )
        check_range(policy, self.capacity)
        if policy.scheduling != self.policy.scheduling:
            self._static = StaticBatching(self.residency)
        self.residency.set_policy(policy)

    def schedule(self, now_s: float) -> StepPlan:
        """Plan the next step: preempt, grow, admit. `commit` must follow if it has chunks, or
        `discard` when they could not be computed."""
        residency = self.residency
        residency.step += 1
        self._scheduled_s = now_s
        num_preemptions = residency.num_preemptions
        retry_after_s = None
        if self.policy.batch_class_share == 0:
            for request in residency.running_of(BATCH):
                residency.preempt(request, now_s)
        if self.policy.scheduling == "static":
            decodes, prefills = self._static.plan(now_s)
            retry_after_s = self._static.fill_wait_left_s(now_s)
        else:
            decodes, prefills = self._plan_continuous(now_s)
        return StepPlan(
            chunks=(*decodes, *prefills),
            num_decode_seqs=len(decodes),
            num_prefill_tokens=sum(c.num_tokens for c in prefills),
            kv_tokens=sum([c.start for c in decodes]) + len(decodes) + sum(c.end for c in prefills),
            num_preemptions=residency.num_preemptions - num_preemptions,
            retry_after_s=retry_after_s,
        )

    def commit(
        self, plan: StepPlan, sampled: Sequence[int], now_s: float
    ) -> tuple[TokenEvent, ...]:
        """Take in a computed step: one sampled token per chunk that samples, in order."""
        step_s = now_s - self._scheduled_s
        self._pause.observe(step_s, plan.num_decode_seqs, plan.num_prefill_tokens, now_s)
        self._draft = Draft(self.residency, 0, 0)
        tokens = iter(sampled)
        events: list[TokenEvent] = []
        if self.policy.scheduling == "static":
            self._commit_chunks(plan.chunks, tokens, now_s, events)
        else:
            self._commit_decodes(plan.chunks[: plan.num_decode_seqs], tokens, now_s, events)
            self._commit_chunks(plan.chunks[plan.num_decode_seqs :], tokens, now_s, events)
        finished = [e.request for e in events if e.finish_reason is not None]
        if finished:
            if self.policy.scheduling == "static":
                self._static.keep_rows(finished)
            self.residency.retire(finished)
        return tuple(events)

    def discard(self, plan: StepPlan) -> None:
        """The step was not computed: its tenants get back what it was going to cost them, and its
        requests are as before."""
        if self.policy.scheduling == "continuous":
            tenants = self.residency.tenants
            for chunk in plan.chunks[: plan.num_decode_seqs]:
                tenants.refund(chunk.request, OUTPUT_COST)
            self._draft.refund_all()

    def refusal(self, tenant: str) -> Refusal | None:
        """Why a new request of this tenant is not to be queued, if it is not."""
        known = self.residency.tenants.with_work.get(tenant)
        num_waiting = known.num_waiting if known is not None else 0
        most = self.residency.tenants.policy_of(tenant).waiting
        return None if most is None or num_waiting < most else Refusal(tenant, num_waiting, most)

    def _plan_continuous(self, now_s: float) -> tuple[list[ScheduledChunk], list[ScheduledChunk]]:
        """Decodes and prefills of the next step."""
        residency = self.residency
        stalled = self._grow(now_s)
        self._admission.begin_step(now_s)
        for ledger in residency.tenants.ledgers.values():
            ledger.begin_step()
        num_decodes = len(residency.decoding) - len(stalled)
        budget_tokens = self.policy.step_tokens - num_decodes
        if residency.tenants.ledgers[INTERACTIVE].decoding:
            objective_s = self.policy.slo.itl_ms / 1e3
            budget_tokens = self._pause.limit(budget_tokens, num_decodes, objective_s, now_s)
        draft = self._draft = Draft(residency, budget_tokens, self.policy.chunk_tokens)
        self._plan_prompts(draft, now_s)
        # Last, since admissions may have put decoding batch work back.
        return self._decodes(stalled), draft.chunks()

    def _grow(self, now_s: float) -> set[Request]:
        """Room for every running request's next token; those that wait a step for it."""
        outgrown = sorted(self.residency.outgrown, key=_service_order)
        refused = [r for r in outgrown if not grow(self.residency, r, now_s)]
        return {r for r in refused if r.phase is Phase.DECODE}

    def _decodes(self, stalled: set[Request]) -> list[ScheduledChunk]:
        """Every running request's next token, whatever the budget: a begun stream never stalls."""
        ledgers = self.residency.tenants.ledgers
        for ledger in ledgers.values():
            for account in ledger.decoding:
                account.charge(OUTPUT_COST * account.num_decoding)
        for request in stalled:
            if request.phase is Phase.DECODE:
                self.residency.tenants.refund(request, OUTPUT_COST)
        make = tuple.__new__  # twice as fast as calling the class, once for each stream and step
        return [
            make(ScheduledChunk, (request, request.num_computed_tokens, 1))
            for request in self.residency.decoding
            if request not in stalled
        ]

    def _plan_prompts(self, draft: Draft, now_s: float) -> None:
        residency, admission = self.residency, self._admission
        passed: list[Request] = []
        may_admit = self._guarantee.plan(draft, now_s, passed)
        num_due = len(passed)
        prompts = PromptPass(residency, admission, draft, INTERACTIVE, passed)
        prompts.run(may_admit)
        self._guarantee.num_interactive_starts += prompts.num_started
        draft.budget_tokens = min(draft.budget_tokens, self._batch_tokens_left(draft))
        # What an interactive request waits for is not given to batch work.
        may_admit = may_admit and len(passed) == num_due
        PromptPass(residency, admission, draft, BATCH, passed).run(may_admit)

    def _batch_tokens_left(self, draft: Draft) -> int:
        share_tokens = int(self.policy.batch_class_share * self.policy.step_tokens)
        ledger = self.residency.tenants.ledgers[BATCH]
        num_decodes = sum(account.num_decoding for account in ledger.decoding)
        # At least one block, or a small share of a small budget would start nothing, ever.
        return max(share_tokens, self.capacity.block_tokens) - num_decodes - draft.num_batch_tokens

    def _commit_decodes(
        self,
        chunks: Sequence[ScheduledChunk],
        tokens: Iterator[int],
        now_s: float,
        events: list[TokenEvent],
    ) -> None:
        """As `_commit_chunks`, for one-token chunks of streams: the part that must be fast."""
        block_tokens = self.capacity.block_tokens
        make, append = tuple.__new__, events.append
        for (request, start, _), token_id in zip(chunks, tokens, strict=False):
            request.num_computed_tokens = num_computed = start + 1
            token_ids = request.token_ids
            token_ids.append(token_id)
            last_token_s = request.last_token_s
            request.last_token_s = now_s
            if num_computed % block_tokens == 0:
                self.residency.publish(request)
                self.residency.note_growth(request)
            reason = None
            if token_id in request.sampling.stop_token_ids:
                reason = FinishReason.STOP
            elif len(token_ids) >= request.num_final_tokens:
                reason = FinishReason.LENGTH
            gap_s = None if last_token_s is None else now_s - last_token_s
            append(make(TokenEvent, (request, token_id, gap_s, reason)))

    def _commit_chunks(
        self,
        chunks: Sequence[ScheduledChunk],
        tokens: Iterator[int],
        now_s: float,
        events: list[TokenEvent],
    ) -> None:
        publishes = self.policy.scheduling == "continuous"
        for chunk in chunks:
            request = chunk.request
            samples = chunk.samples  # asked before the token below is appended
            request.num_computed_tokens = chunk.end
            request.num_prefill_chunks += request.phase is Phase.PREFILL
            if publishes:
                self.residency.publish(request)
            if samples:
                events.append(self._append(request, next(tokens), now_s))

    def _append(self, request: Request, token_id: int, now_s: float) -> TokenEvent:
        gap_s = None if request.last_token_s is None else now_s - request.last_token_s
        if request.first_token_s is None:
            request.first_token_s = now_s
        request.last_token_s = now_s
        request.token_ids.append(token_id)
        if request.phase is Phase.PREFILL:
            self.residency.begin_decoding(request)
        else:
            self.residency.note_growth(request)
        reason = None
        if token_id in request.sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif request.num_tokens >= request.num_final_tokens:
            reason = FinishReason.LENGTH
        return TokenEvent(request, token_id, gap_s, reason)


def _service_order(request: Request) -> tuple[bool, int]:
    return request.request_class is BATCH, request.number


def check_range(policy: Policy, capacity: Capacity) -> None:
    """Raise PolicyOutOfRange, naming the field and the capacity, unless the policy fits."""
    for name, value, minimum, maximum in (
        ("batch_size", policy.batch_size, 1, capacity.batch_size),
        ("step_tokens", policy.step_tokens, capacity.block_tokens, capacity.step_tokens),
        ("chunk_tokens", policy.chunk_tokens, capacity.block_tokens, capacity.step_tokens),
    ):
        if value < minimum:
            raise PolicyOutOfRange(
                f"{name}: {value} is below {minimum}, the least this engine can work with"
            )
        if value > maximum:
            raise PolicyOutOfRange(
                f"{name}: {value} is above this engine's capacity of {maximum}; lower it, or "
                f"restart the engine with more"
            )
