"""Which tokens the next step computes: continuous batching under one token budget. Pure.

Each step (Sarathi-Serve, OSDI'24): every running request's next token first, then chunks of the
prompts already begun, then new admissions, until `step_tokens` are planned. So a stream never waits
for somebody else's prompt, and a slot that empties is refilled in the next step. Interactive work
strictly precedes batch work. Knows no torch, no clock and no HTTP; called by `engine.Engine` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from chairlift_engine.config import Capacity
from chairlift_engine.request import FinishReason, Request, TokenLogprobs
from chairlift_engine.residency import BATCH, INTERACTIVE, Residency
from chairlift_engine.runner import Sampled, ScheduledChunk
from chairlift_engine.static_batching import StaticBatching
from chairlift_protocol.policy import Policy
from chairlift_protocol.wire import RequestClass

# A request that does not fit is passed over by later ones, but not for ever: after this many it
# holds back its class until it fits.
MAX_TIMES_PASSED = 32


class StalePolicy(ValueError):
    """A policy whose generation is not newer than the one in force."""


class PolicyOutOfRange(ValueError):
    """A policy that the start-up capacity cannot hold."""


class TokenEvent(NamedTuple):
    """One sampled token. gap_s is None for a request's first token."""

    request: Request
    token_id: int
    gap_s: float | None
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None


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


@dataclass(slots=True)
class _Draft:
    """The step being planned. budget_tokens: what may still be added to it."""

    now_s: float
    budget_tokens: int
    decodes: list[ScheduledChunk] = field(default_factory=list)
    prefills: list[ScheduledChunk] = field(default_factory=list)

    def prefill(self, request: Request, num_tokens: int) -> None:
        self.prefills.append(ScheduledChunk(request, request.num_computed_tokens, num_tokens))
        self.budget_tokens -= num_tokens


class Scheduler:
    def __init__(self, capacity: Capacity, policy: Policy) -> None:
        check_range(policy, capacity)
        self.capacity = capacity
        self.residency = Residency(capacity, policy)
        self._static = StaticBatching(self.residency)
        self._longest_tokens = min(capacity.model_length_tokens, capacity.kv_tokens)

    @property
    def policy(self) -> Policy:
        return self.residency.policy

    def add(self, request: Request) -> None:
        """Queue a request that fits `Capacity.longest_prompt_tokens`; its id must be unused."""
        assert 0 < request.num_prompt_tokens <= self.capacity.longest_prompt_tokens
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
        self.residency.policy = policy

    def schedule(self, now_s: float) -> StepPlan:
        """Plan the next step: preempt, grow, admit. `commit` must follow if it has chunks."""
        num_preemptions = self.residency.num_preemptions
        retry_after_s = None
        if self.policy.batch_class_share == 0:
            for request in self.residency.running_of(BATCH):
                self.residency.preempt(request)
        if self.policy.scheduling == "static":
            decodes, prefills = self._static.plan(now_s)
            retry_after_s = self._static.fill_wait_left_s(now_s)
        else:
            decodes, prefills = self._plan_continuous(now_s)
        return StepPlan(
            chunks=(*decodes, *prefills),
            num_decode_seqs=len(decodes),
            num_prefill_tokens=sum(c.num_tokens for c in prefills),
            kv_tokens=sum(c.end for c in decodes) + sum(c.end for c in prefills),
            num_preemptions=self.residency.num_preemptions - num_preemptions,
            retry_after_s=retry_after_s,
        )

    def commit(
        self, plan: StepPlan, sampled: Sequence[Sampled], now_s: float
    ) -> tuple[TokenEvent, ...]:
        """Take in a computed step: one sampled token per chunk that samples, in order."""
        events: list[TokenEvent] = []
        tokens = iter(sampled)
        for chunk in plan.chunks:
            samples = chunk.samples  # asked before the token below is appended
            chunk.request.num_computed_tokens = chunk.end
            if samples:
                events.append(self._append(chunk.request, next(tokens), now_s))
        finished = [e.request for e in events if e.finish_reason is not None]
        if finished:
            if self.policy.scheduling == "static":
                self._static.keep_rows(finished)
            self.residency.retire(finished)
        return tuple(events)

    def _plan_continuous(self, now_s: float) -> tuple[list[ScheduledChunk], list[ScheduledChunk]]:
        """Decodes and prefills of the next step."""
        draft = _Draft(now_s, self.policy.step_tokens)
        self._plan_decodes(draft)
        self._plan_begun_prefills(draft, INTERACTIVE)
        all_started = self._admit(draft, INTERACTIVE)
        draft.budget_tokens = min(draft.budget_tokens, self._batch_tokens_left(draft))
        self._plan_begun_prefills(draft, BATCH)
        if all_started:  # what an interactive request waits for is not given to batch work
            self._admit(draft, BATCH)
        decodes = [c for c in draft.decodes if _still_holds(c)]
        prefills = [c for c in draft.prefills if _still_holds(c)]
        return decodes, prefills

    def _plan_decodes(self, draft: _Draft) -> None:
        """Every running request's next token, whatever the budget: a begun stream never stalls."""
        for request in tuple(self.residency.running):
            if request.is_decoding and self.residency.grow(request):
                draft.decodes.append(ScheduledChunk(request, request.num_computed_tokens, 1))
                draft.budget_tokens -= 1

    def _batch_tokens_left(self, draft: _Draft) -> int:
        share_tokens = int(self.policy.batch_class_share * self.policy.step_tokens)
        num_decodes = sum(1 for c in draft.decodes if c.request.request_class is BATCH)
        # At least one block, or a small share of a small budget would start nothing, ever.
        return max(share_tokens, self.capacity.block_tokens) - num_decodes

    def _plan_begun_prefills(self, draft: _Draft, request_class: RequestClass) -> None:
        for request in self.residency.running_of(request_class):
            if not request.is_decoding:
                num_tokens = self._chunk_tokens(request, draft.budget_tokens)
                if num_tokens > 0:
                    draft.prefill(request, num_tokens)

    def _admit(self, draft: _Draft, request_class: RequestClass) -> bool:
        """Start waiting requests of one class while slots, blocks and budget last.

        Passes over what does not fit; False says that such a request was left waiting.
        """
        passed: list[Request] = []
        for request in tuple(self.residency.waiting[request_class]):
            num_tokens = self._chunk_tokens(request, draft.budget_tokens)
            if num_tokens <= 0 or not self.residency.may_start(request_class):
                break
            if self.residency.make_room(request):
                self.residency.start(request, draft.now_s)
                draft.prefill(request, num_tokens)
                for other in passed:
                    other.num_times_passed += 1
            else:
                passed.append(request)
                if request.num_times_passed >= MAX_TIMES_PASSED:
                    break
        return not passed

    def _chunk_tokens(self, request: Request, budget_tokens: int) -> int:
        """Prefill tokens to compute now, at most the budget; 0 or less when it is too small.

        All but a prompt's last chunk end on the block grid, so that a prompt is cut alike whatever
        runs beside it.
        """
        remaining = request.num_uncomputed_tokens
        num_tokens = min(remaining, self.policy.chunk_tokens, budget_tokens)
        if num_tokens < remaining:
            start, block_tokens = request.num_computed_tokens, self.capacity.block_tokens
            num_tokens = (start + num_tokens) // block_tokens * block_tokens - start
        return num_tokens

    def _append(self, request: Request, sampled: Sampled, now_s: float) -> TokenEvent:
        token_id = sampled.token_id
        gap_s = None if request.last_token_s is None else now_s - request.last_token_s
        if request.first_token_s is None:
            request.first_token_s = now_s
        request.last_token_s = now_s
        request.token_ids.append(token_id)
        reason = None
        if (
            token_id in request.sampling.stop_token_ids
            and request.num_output_tokens > request.sampling.min_tokens
        ):
            reason = FinishReason.STOP
        elif (
            request.num_output_tokens >= request.sampling.max_tokens
            or request.num_tokens >= self._longest_tokens
        ):
            reason = FinishReason.LENGTH
        return TokenEvent(request, token_id, gap_s, reason, sampled.logprobs)


def _still_holds(chunk: ScheduledChunk) -> bool:
    """False when the request was preempted after this chunk had been planned."""
    request = chunk.request
    return bool(request.block_ids) and chunk.start == request.num_computed_tokens


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
