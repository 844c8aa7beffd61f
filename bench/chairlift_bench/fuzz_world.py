"""The scheduler in a world that watches it: random work on one side, promises on the other.

Acts are methods; `step` computes a step without a model and then holds the scheduler to what it
promises: blocks add up, KV is read where it was written and only by those who may, nobody waits for
ever, nobody yields too often, tenants that wait for the same slots are served alike. A promise that
is broken raises `Broken`. Shared by the hypothesis machine of the tests and by `make fuzz`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from chairlift_bench.fuzz_fairness import FairnessWatch
from chairlift_engine.audit import audit
from chairlift_engine.config import Capacity
from chairlift_engine.request import FinishReason, Request, SamplingParams
from chairlift_engine.residency import MAX_PREEMPTIONS
from chairlift_engine.runner import Sampled, ScheduledChunk
from chairlift_engine.scheduler import Scheduler, StepPlan
from chairlift_protocol.policy import Generation, Policy
from chairlift_protocol.wire import RequestClass

BATCH = RequestClass.BATCH
# Steps that a request may go without a token computed, while its class is served.
MAX_STARVED_STEPS = 4000


class Broken(AssertionError):
    """A promise that does not hold; `kind` says which."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass(slots=True)
class _Seen:
    """What the world knows of a request."""

    request: Request
    answer: list[int] = field(default_factory=list)
    num_known_computed: int = 0
    num_steps_idle: int = 0
    num_preemptions: int = 0
    num_taken_by_policy: int = 0
    prefixes: list[int] = field(default_factory=lambda: [0])  # a digest of all before each block

    def block(self, index: int, size: int) -> tuple[int, ...]:
        return tuple(self.request.token_ids[index * size : (index + 1) * size])

    def prefix(self, index: int, size: int) -> int:
        for known in range(len(self.prefixes), index + 1):
            self.prefixes.append(hash((self.prefixes[-1], self.block(known - 1, size))))
        return self.prefixes[index]


class World:
    def __init__(self, capacity: Capacity, policy: Policy) -> None:
        self.scheduler = Scheduler(capacity, policy)
        self.now_s = 0.0
        self.num_steps = 0
        self.counts: Counter[str] = Counter()
        self.fairness = FairnessWatch(capacity)
        self.most_idle_steps = 0
        self._alive: dict[str, _Seen] = {}
        self._kv: dict[int, tuple[str, int, tuple[int, ...]]] = {}  # writer, prefix, tokens
        self._num_added = 0

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        tenant: str = "anonymous",
        request_class: RequestClass = RequestClass.INTERACTIVE,
    ) -> Request:
        self._num_added += 1
        sampling = SamplingParams(max_tokens, stop_token_ids=frozenset({_STOP}))
        request = Request(
            f"r{self._num_added}", prompt, sampling, self.now_s, request_class, tenant
        )
        self.scheduler.add(request)
        self._alive[request.id] = _Seen(request)
        return request

    def abort(self, index: int) -> None:
        """Whichever of those alive."""
        if self._alive:
            name = list(self._alive)[index % len(self._alive)]
            if self.scheduler.abort(name) is None:
                raise Broken("lost", f"{name} is alive and unknown")
            del self._alive[name]
            self.counts["aborted"] += 1

    def set_policy(self, **values: object) -> None:
        policy = self.scheduler.policy
        generation = Generation(0, policy.generation.counter + 1)
        self.scheduler.set_policy(replace(policy, generation=generation, **values))  # type: ignore[arg-type]
        self.fairness.restart()

    def step(
        self, step_s: float | Callable[[StepPlan], float] = 0.05, fails: bool = False
    ) -> StepPlan:
        num_running = len(self.scheduler.residency.running)
        plan = self.scheduler.schedule(self.now_s)
        self.now_s += step_s(plan) if callable(step_s) else step_s
        self.num_steps += 1
        self._check_plan(plan, num_running)
        if fails and plan.chunks:
            self.scheduler.discard(plan)
            self._fail(plan)
        elif plan.chunks:
            self._compute(plan)
        self._check_state(plan)
        return plan

    @property
    def num_alive(self) -> int:
        return len(self._alive)

    def check_drained(self) -> None:
        """At the end: nothing is left of anybody."""
        residency = self.scheduler.residency
        num_lost = residency.blocks.num_blocks - residency.blocks.num_free
        if self._alive or residency.num_requests or num_lost:
            raise Broken("leak", f"{num_lost} blocks, {len(self._alive)} requests")

    def _check_plan(self, plan: StepPlan, num_running_before: int) -> None:
        policy = self.scheduler.policy
        num_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
        if num_tokens > max(policy.step_tokens, plan.num_decode_seqs):
            raise Broken("budget", f"{num_tokens} of {policy.step_tokens} tokens")
        if num_tokens != plan.num_decode_seqs + plan.num_prefill_tokens:
            raise Broken("budget", "the plan's sums are not those of its chunks")
        names = {chunk.request.id for chunk in plan.chunks}
        if len(names) != len(plan.chunks) or not names <= self._alive.keys():
            raise Broken("plan", f"computes {sorted(names)}")
        if len(self.scheduler.residency.running) > max(policy.batch_size, num_running_before):
            raise Broken("slots", f"{len(self.scheduler.residency.running)} run")

    def _fail(self, plan: StepPlan) -> None:
        """As the server does when a forward pass ran out of memory: its requests end."""
        self.counts["failed steps"] += 1
        for chunk in plan.chunks:
            self.scheduler.abort(chunk.request.id)
            del self._alive[chunk.request.id]

    def _compute(self, plan: StepPlan) -> None:
        sampled = []
        for chunk in plan.chunks:
            seen = self._alive[chunk.request.id]
            self._write(chunk, seen)
            if chunk.samples:
                sampled.append(Sampled(_next_token(chunk.request)))
            seen.num_steps_idle = 0
            self.fairness.count(chunk.request, max(chunk.start, seen.num_known_computed), chunk.end)
            seen.num_known_computed = max(seen.num_known_computed, chunk.end)
            self.counts["later chunks"] += chunk.start > 0 and chunk.num_tokens > 1
        self.counts["mixed steps"] += 0 < plan.num_decode_seqs < len(plan.chunks)
        for event in self.scheduler.commit(plan, sampled, self.now_s):
            seen = self._alive[event.request.id]
            seen.answer.append(event.token_id)
            if event.finish_reason is not None:
                self._end(seen, event.finish_reason)

    def _end(self, seen: _Seen, reason: FinishReason) -> None:
        request = seen.request
        prompt = request.token_ids[: request.num_prompt_tokens]
        again = Request("again", prompt, request.sampling, 0.0)
        for token in seen.answer:
            if _next_token(again) != token:
                raise Broken("answer", f"{request}: {seen.answer}")
            again.token_ids.append(token)
        is_whole = len(seen.answer) == request.num_final_tokens - request.num_prompt_tokens
        if not (is_whole or reason is FinishReason.STOP and seen.answer[-1] == _STOP):
            raise Broken("answer", f"{request} ended with {reason} after {len(seen.answer)}")
        del self._alive[request.id]
        self.counts["finished"] += 1

    def _write(self, chunk: ScheduledChunk, seen: _Seen) -> None:
        """Compute KV as a model would: read all before, then write. Blocks remember whose they are
        and which tokens, with all that precede them, they hold."""
        request, size = chunk.request, self.scheduler.capacity.block_tokens
        if len(request.block_ids) * size < chunk.end:
            raise Broken("blocks", f"{chunk} has {len(request.block_ids)} blocks")
        for index in range(-(-chunk.end // size)):
            block, past = request.block_ids[index], seen.prefix(index, size)
            num_read = min(chunk.start - index * size, size)
            if num_read > 0:
                self._check_read(request, block, past, seen.block(index, size)[:num_read])
            if num_read < size:
                written = seen.block(index, size)[: chunk.end - index * size]
                self._kv[block] = request.tenant, past, written

    def _check_read(self, request: Request, block: int, past: int, tokens: tuple[int, ...]) -> None:
        writer, held_past, held = self._kv[block]
        if held_past != past or held[: len(tokens)] != tokens:
            raise Broken("kv", f"{request} reads block {block}, which holds {held}, not {tokens}")
        if writer != request.tenant and not self.scheduler.capacity.share_prefixes:
            raise Broken("isolation", f"{request.tenant} reads what {writer} wrote")

    def _check_state(self, plan: StepPlan) -> None:
        residency = self.scheduler.residency
        try:
            audit(residency)
        except AssertionError as error:
            raise Broken("state", str(error)) from error
        self.counts["preemptions"] += plan.num_preemptions
        for seen in self._alive.values():
            self._check_progress(seen)
        self.fairness.observe(self.scheduler)
        if self.fairness.broken:
            raise Broken("fairness", self.fairness.broken)

    def _check_progress(self, seen: _Seen) -> None:
        request, policy = seen.request, self.scheduler.policy
        is_shut_out = request.request_class is BATCH and policy.batch_class_share == 0
        num_new = request.num_preemptions - seen.num_preemptions
        seen.num_preemptions = request.num_preemptions
        seen.num_taken_by_policy += num_new if is_shut_out else 0
        if seen.num_preemptions - seen.num_taken_by_policy > MAX_PREEMPTIONS:
            raise Broken("preemption", f"{request} yielded {seen.num_preemptions} times")
        seen.num_steps_idle = 0 if is_shut_out else seen.num_steps_idle + 1
        self.most_idle_steps = max(self.most_idle_steps, seen.num_steps_idle)
        if seen.num_steps_idle > MAX_STARVED_STEPS:
            raise Broken("starved", f"{request}, {seen.num_steps_idle} steps")
        if request.num_cached_tokens:
            self.counts["requests with cached tokens"] += request.num_prefill_chunks == 1


_STOP = 7


def _next_token(request: Request) -> int:
    """What a deterministic model would say; now and then a stop, to prompts of small tokens."""
    value = hash((len(request.token_ids), *request.token_ids[-3:], request.token_ids[0])) % 97
    return _STOP if value == 0 and request.token_ids[0] < 1000 else 100 + value
