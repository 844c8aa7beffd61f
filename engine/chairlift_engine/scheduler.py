"""What the next step computes, and what becomes of it: scheduling as the engine sees it. Pure.

`continuous_batching` (or `static_batching`, the baseline) plans; here requests come and go,
policies change, and computed tokens are taken in. Knows no torch, no clock and no HTTP; called by
`engine.Engine` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from chairlift_engine.config import Capacity
from chairlift_engine.continuous_batching import ContinuousBatching
from chairlift_engine.explain import Explanation, explain
from chairlift_engine.live_policy import LivePolicy
from chairlift_engine.memory_limit import MemoryLimit
from chairlift_engine.request import FinishReason, Phase, Request, TokenLogprobs
from chairlift_engine.residency import BATCH, Residency
from chairlift_engine.runner import Sampled, ScheduledChunk
from chairlift_engine.static_batching import StaticBatching
from chairlift_protocol.policy import Policy


class TokenEvent(NamedTuple):
    """One sampled token. gap_s is None for a request's first token."""

    request: Request
    token_id: int
    gap_s: float | None
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None


class StepPlan(NamedTuple):
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
        self.capacity = capacity
        self._live = LivePolicy(capacity, policy)
        self.residency = Residency(capacity, policy)
        self._continuous = ContinuousBatching(self.residency)
        self._static = StaticBatching(self.residency)
        self._longest_tokens = min(capacity.model_length_tokens, capacity.kv_tokens)
        self._scheduled_s = 0.0

    @property
    def desired(self) -> Policy:
        """The policy as it was set."""
        return self._live.desired

    @property
    def policy(self) -> Policy:
        """What is in force: less than desired while there is a limit."""
        return self.residency.policy

    @property
    def limit(self) -> MemoryLimit | None:
        return self._live.limit

    def add(self, request: Request) -> None:
        """Queue a request that fits `Capacity.longest_prompt_tokens`; its id must be unused."""
        assert 0 < request.num_prompt_tokens <= self.capacity.longest_prompt_tokens
        request.num_final_tokens = min(request.num_final_tokens, self._longest_tokens)
        self.residency.enqueue(request)

    def abort(self, request_id: str) -> Request | None:
        """Forget a request and free what it holds; None when it is unknown or has finished."""
        return self.residency.forget(request_id)

    def set_policy(self, policy: Policy) -> None:
        """Take effect from the next step; lowering drains. The desired policy again is no error.

        Raises StalePolicy or PolicyOutOfRange, and then changes nothing.
        """
        self._live.set(policy)
        self._use_policy()

    def set_limit(self, limit: MemoryLimit | None) -> None:
        """Keep the desired policy, but carry out no more than `limit` of it."""
        self._live.limit = limit
        self._use_policy()

    def fail(self, plan: StepPlan) -> tuple[Request, ...]:
        """This step could not be computed: forget its requests and free what they hold."""
        self.discard(plan)
        forgotten = [self.residency.forget(chunk.request.id) for chunk in plan.chunks]
        return tuple(request for request in forgotten if request is not None)

    def _use_policy(self) -> None:
        policy = self._live.effective
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
                residency.preempt(request, now_s, by_policy=True)
        if self.policy.scheduling == "static":
            decodes, prefills = self._static.plan(now_s)
            retry_after_s = self._static.fill_wait_left_s(now_s)
        else:
            decodes, prefills = self._continuous.plan(now_s)
        return StepPlan(
            chunks=(*decodes, *prefills),
            num_decode_seqs=len(decodes),
            num_prefill_tokens=sum(c.num_tokens for c in prefills),
            kv_tokens=sum([c.start for c in decodes]) + len(decodes) + sum(c.end for c in prefills),
            num_preemptions=residency.num_preemptions - num_preemptions,
            retry_after_s=retry_after_s,
        )

    def commit(
        self, plan: StepPlan, sampled: Sequence[Sampled], now_s: float
    ) -> tuple[TokenEvent, ...]:
        """Take in a computed step: one sampled token per chunk that samples, in order."""
        self._continuous.pause.observe(
            now_s - self._scheduled_s, plan.num_decode_seqs, plan.num_prefill_tokens, now_s
        )
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
            self._continuous.discard(plan.chunks[: plan.num_decode_seqs])

    def explain(self) -> list[Explanation]:
        """Of every request where it is and, if it waits, what for."""
        return explain(self.residency, self._continuous.admission)

    def _commit_decodes(
        self,
        chunks: Sequence[ScheduledChunk],
        tokens: Iterator[Sampled],
        now_s: float,
        events: list[TokenEvent],
    ) -> None:
        """As `_commit_chunks`, for one-token chunks of streams: the part that must be fast."""
        block_tokens = self.capacity.block_tokens
        make, append = tuple.__new__, events.append
        for (request, start, _), (token_id, logprobs) in zip(chunks, tokens, strict=False):
            request.num_computed_tokens = num_computed = start + 1
            request.token_ids.append(token_id)
            last_token_s = request.last_token_s
            request.last_token_s = now_s
            if num_computed % block_tokens == 0:
                self.residency.publish(request)
                self.residency.note_growth(request)
            reason, sampling = None, request.sampling
            if (
                token_id in sampling.stop_token_ids
                and num_computed >= request.num_prompt_tokens + sampling.min_tokens
            ):
                reason = FinishReason.STOP
            elif num_computed + 1 >= request.num_final_tokens:
                reason = FinishReason.LENGTH
            gap_s = None if last_token_s is None else now_s - last_token_s
            append(make(TokenEvent, (request, token_id, gap_s, reason, logprobs)))

    def _commit_chunks(
        self,
        chunks: Sequence[ScheduledChunk],
        tokens: Iterator[Sampled],
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

    def _append(self, request: Request, sampled: Sampled, now_s: float) -> TokenEvent:
        token_id = sampled.token_id
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
        if (
            token_id in request.sampling.stop_token_ids
            and request.num_output_tokens > request.sampling.min_tokens
        ):
            reason = FinishReason.STOP
        elif request.num_tokens >= request.num_final_tokens:
            reason = FinishReason.LENGTH
        return TokenEvent(request, token_id, gap_s, reason, sampled.logprobs)
