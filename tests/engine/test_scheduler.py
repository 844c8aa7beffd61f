"""What a step carries, who yields to whom, and that nothing is lost: plans, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chairlift_engine.config import Capacity
from chairlift_engine.prompts import MAX_TIMES_PASSED
from chairlift_engine.request import FinishReason, Request, SamplingParams
from chairlift_engine.scheduler import (
    PolicyOutOfRange,
    Scheduler,
    StalePolicy,
    StepPlan,
    TokenEvent,
)
from chairlift_protocol.policy import Generation, Policy, SloThresholds
from chairlift_protocol.wire import RequestClass

BLOCK = 16
INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH


def capacity(num_blocks: int = 64, batch_size: int = 8, step_tokens: int = 512) -> Capacity:
    return Capacity(batch_size, step_tokens, num_blocks, BLOCK, model_length_tokens=1000)


def policy(
    counter: int = 0, batch_size: int = 8, step_tokens: int = 64, share: float = 1.0
) -> Policy:
    return Policy(
        generation=Generation(0, counter),
        batch_size=batch_size,
        step_tokens=step_tokens,
        chunk_tokens=step_tokens,
        batch_class_share=share,
        slo=SloThresholds(ttft_ms=1000, itl_ms=100),
    )


class Bench:
    """A scheduler with a clock that ticks once a step and tokens that only a request determines."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self.events: list[TokenEvent] = []
        self.plans: list[StepPlan] = []
        self.num_prompts = 0

    def prompt(self, num_tokens: int) -> list[int]:
        """Unlike any other, so that nothing of it is found in the prefix cache."""
        self.num_prompts += 1
        return [10_000 + self.num_prompts] * num_tokens

    def add(
        self,
        name: str,
        num_prompt_tokens: int,
        max_tokens: int = 8,
        request_class: RequestClass = INTERACTIVE,
    ) -> Request:
        self.now_s += 0.001
        request = Request(
            name,
            self.prompt(num_prompt_tokens),
            SamplingParams(max_tokens=max_tokens),
            arrival_s=self.now_s,
            request_class=request_class,
        )
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule(self.now_s)
        sampled = [token_of(c.request) for c in plan.chunks if c.samples]
        self.now_s += 1.0
        self.events += self.scheduler.commit(plan, sampled, self.now_s)
        self.plans.append(plan)
        return plan

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if self.scheduler.residency.num_requests == 0:
                return
            self.step()
        raise AssertionError(f"unfinished after {max_steps} steps: {self.running()}")

    def running(self) -> list[str]:
        return [r.id for r in self.scheduler.residency.running]


def token_of(request: Request) -> int:
    """What a deterministic model would say next: the same after a preemption as before."""
    return 1000 + request.num_prompt_tokens * 100 + request.num_output_tokens


def bench(num_blocks: int = 64, **policy_values: float) -> Bench:
    return Bench(Scheduler(capacity(num_blocks), policy(**policy_values)))  # type: ignore[arg-type]


def sizes(plan: StepPlan) -> list[tuple[str, int]]:
    return [(c.request.id, c.num_tokens) for c in plan.chunks]


# -- the budget ------------------------------------------------------------------------------------


def test_decodes_come_first_and_prompts_share_what_the_budget_leaves() -> None:
    b = bench(step_tokens=64)
    b.add("a", 20)
    b.step()
    b.add("b", 30)
    b.add("c", 200)
    assert sizes(b.step()) == [("a", 1), ("b", 30), ("c", 32)]  # 33 left, 32 on the grid
    assert sizes(b.step()) == [("a", 1), ("b", 1), ("c", 48)]  # 62 left: 32 + 48 ends on the grid


def test_a_prompt_is_cut_on_the_block_grid_whatever_runs_beside_it() -> None:
    b = bench(step_tokens=64)
    b.add("a", 3)
    b.add("long", 150)
    ends = [c.end for _ in range(3) for c in b.step().chunks if c.request.id == "long"]
    assert [end % BLOCK for end in ends[:-1]] == [0] * (len(ends) - 1)
    assert ends[-1] == 150


def test_a_begun_stream_never_stalls_when_the_budget_is_lowered_below_the_decodes() -> None:
    b = bench(batch_size=8, step_tokens=64)
    requests = [b.add(f"r{i}", 4, max_tokens=6) for i in range(8)]
    b.step()
    b.scheduler.set_policy(replace(policy(1), step_tokens=16, chunk_tokens=16, batch_size=2))
    plan = b.step()
    assert len(plan.chunks) == len(requests)
    b.run()


def test_a_slot_is_refilled_in_the_step_after_it_empties() -> None:
    b = bench(batch_size=2)
    b.add("short", 4, max_tokens=2)
    b.add("long", 4, max_tokens=20)
    b.add("next", 4)
    b.step()
    b.step()  # short has its second and last token
    assert [name for name, _ in sizes(b.step())] == ["long", "next"]


def test_lowering_the_batch_size_drains_and_raising_it_admits_at_once() -> None:
    b = bench(batch_size=4)
    for i in range(6):
        b.add(f"r{i}", 4, max_tokens=4 + i)
    b.step()
    b.scheduler.set_policy(policy(1, batch_size=1))
    assert len(b.step().chunks) == 4
    b.scheduler.set_policy(policy(2, batch_size=6))
    assert len(b.step().chunks) == 6
    b.run()
    assert all(plan.num_preemptions == 0 for plan in b.plans)


# -- who yields to whom ----------------------------------------------------------------------------


def test_waiting_interactive_work_takes_a_batch_slot_within_one_step() -> None:
    b = bench(batch_size=2)
    b.add("batch-old", 4, max_tokens=30, request_class=BATCH)
    b.step()
    b.add("batch-new", 4, max_tokens=30, request_class=BATCH)
    b.step()
    b.add("chat", 4)
    plan = b.step()
    assert [name for name, _ in sizes(plan)] == ["batch-old", "chat"]
    assert plan.num_preemptions == 1
    b.run()


def test_equals_never_preempt_each_other_for_a_slot() -> None:
    b = bench(batch_size=2)
    for i in range(6):
        b.add(f"r{i}", 4)
    b.run()
    assert sum(plan.num_preemptions for plan in b.plans) == 0


def test_interactive_work_waiting_for_blocks_is_not_overtaken_by_batch_work() -> None:
    b = bench(num_blocks=10)
    b.add("chat", 100, max_tokens=30)
    for _ in range(3):
        b.step()
    b.add("chat-2", 100)
    b.add("batch", 4, request_class=BATCH)
    b.step()
    assert b.running() == ["chat"]
    b.run()


def test_a_share_of_zero_takes_back_everything_within_a_step_and_starts_no_batch_work() -> None:
    b = bench()
    b.add("batch", 4, max_tokens=30, request_class=BATCH)
    b.add("chat", 4, max_tokens=30)
    b.step()
    b.scheduler.set_policy(policy(1, share=0.0))
    assert [name for name, _ in sizes(b.step())] == ["chat"]
    b.scheduler.set_policy(policy(2, share=1.0))
    assert {name for name, _ in sizes(b.step())} == {"chat", "batch"}
    b.run()


def test_batch_work_holds_no_more_than_its_share_of_slots_and_step_tokens() -> None:
    b = bench(batch_size=8, step_tokens=64, share=0.5)
    for i in range(8):
        b.add(f"batch-{i}", 40, max_tokens=30, request_class=BATCH)
    for _ in range(12):
        plan = b.step()
        assert plan.num_prefill_tokens + plan.num_decode_seqs <= 32
    assert len(b.running()) == 4


def test_a_share_smaller_than_a_block_still_serves_batch_work() -> None:
    b = bench(step_tokens=32, share=0.1)
    b.add("batch", 40, request_class=BATCH)
    b.run(max_steps=20)


@pytest.mark.parametrize("request_class", [INTERACTIVE, BATCH])
def test_without_blocks_the_least_computed_yields_and_never_the_oldest(
    request_class: RequestClass,
) -> None:
    b = bench(num_blocks=8)
    oldest = b.add("oldest", 20, max_tokens=70, request_class=request_class)
    b.add("young", 16, max_tokens=70, request_class=request_class)
    b.run()
    assert oldest.num_preemptions == 0
    assert sum(plan.num_preemptions for plan in b.plans) > 0


def test_a_preempted_request_gives_every_token_once_and_in_order() -> None:
    b = bench(num_blocks=8)
    requests = [b.add(name, 20, max_tokens=60) for name in ("a", "b", "c")]
    b.run()
    assert sum(r.num_preemptions for r in requests) > 0
    for request in requests:
        emitted = [e.token_id for e in b.events if e.request is request]
        assert emitted == [1000 + 20 * 100 + i for i in range(60)]


# -- passing over ----------------------------------------------------------------------------------


def test_a_request_that_does_not_fit_is_passed_over() -> None:
    b = bench(num_blocks=12)
    b.add("runs", 64, max_tokens=40)
    b.step()
    b.add("big", 150)
    b.add("small", 4)
    b.step()
    assert "small" in b.running() and "big" not in b.running()
    b.run()


def test_a_request_that_does_not_fit_is_not_passed_over_for_ever() -> None:
    b = bench(num_blocks=12)
    b.add("runs", 16, max_tokens=150)
    b.step()
    big = b.add("big", 150, max_tokens=2)
    for i in range(4 * MAX_TIMES_PASSED):
        b.add(f"small-{i}", 4, max_tokens=2)
    b.run()
    finished = [e.request.id for e in b.events if e.finish_reason]
    assert MAX_TIMES_PASSED <= big.num_times_passed < MAX_TIMES_PASSED + 8
    assert finished.index("big") < finished.index(f"small-{2 * MAX_TIMES_PASSED}")


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "num_prompt_tokens", "num_tokens", "reason"),
    [
        (SamplingParams(max_tokens=3), 4, 3, FinishReason.LENGTH),
        (SamplingParams(max_tokens=9, stop_token_ids=frozenset({1401})), 4, 2, FinishReason.STOP),
        (SamplingParams(max_tokens=5000), 990, 10, FinishReason.LENGTH),  # the model's length
    ],
)
def test_a_request_ends_by_stop_token_by_max_tokens_or_by_the_models_length(
    sampling: SamplingParams, num_prompt_tokens: int, num_tokens: int, reason: FinishReason
) -> None:
    b = bench()
    b.scheduler.add(Request("r", list(range(num_prompt_tokens)), sampling, arrival_s=0.0))
    b.run()
    assert len(b.events) == num_tokens
    assert [e.finish_reason for e in b.events[-2:]] == [None, reason]


def test_an_abort_frees_everything_whether_waiting_prefilling_or_decoding() -> None:
    b = bench(batch_size=2)
    b.add("decoding", 4, max_tokens=30)
    b.add("prefilling", 200)
    b.add("waiting", 4)
    b.step()
    for name in ("decoding", "prefilling", "waiting"):
        assert b.scheduler.abort(name) is not None
        assert b.scheduler.abort(name) is None
    assert b.scheduler.residency.blocks.num_free == 64
    assert b.step().chunks == ()


def test_gaps_and_first_tokens_are_told_apart() -> None:
    b = bench()
    request = b.add("r", 4, max_tokens=3)
    b.run()
    assert [e.gap_s for e in b.events] == [None, 1.0, 1.0]
    assert request.first_token_s is not None and request.first_scheduled_s is not None
    assert request.arrival_s <= request.first_scheduled_s < request.first_token_s


# -- policy ----------------------------------------------------------------------------------------


def test_an_older_policy_is_refused_and_the_same_one_is_not() -> None:
    scheduler = Scheduler(capacity(), policy(5))
    scheduler.set_policy(policy(5))
    for stale in (policy(4), replace(policy(5), batch_size=2)):
        with pytest.raises(StalePolicy, match=r"not newer than \[0, 5\]"):
            scheduler.set_policy(stale)
    scheduler.set_policy(replace(policy(0), generation=Generation(1, 0)))
    assert scheduler.policy.generation == Generation(1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 9}, r"batch_size: 9 is above this engine's capacity of 8"),
        ({"step_tokens": 513}, r"step_tokens: 513 is above this engine's capacity of 512"),
        ({"chunk_tokens": 513}, r"chunk_tokens: 513 is above"),
        ({"step_tokens": 15}, r"step_tokens: 15 is below 16"),
        ({"chunk_tokens": 8}, r"chunk_tokens: 8 is below 16"),
    ],
)
def test_a_policy_outside_capacity_is_refused_by_name_and_changes_nothing(
    change: dict[str, int], message: str
) -> None:
    scheduler = Scheduler(capacity(), policy())
    with pytest.raises(PolicyOutOfRange, match=message):
        scheduler.set_policy(replace(policy(1), **change))  # type: ignore[arg-type]
    assert scheduler.policy == policy()


# -- anything at all -------------------------------------------------------------------------------

arrivals = st.tuples(
    st.just("add"),
    st.integers(1, 120),
    st.integers(1, 40),
    st.sampled_from([INTERACTIVE, BATCH]),
)
aborts = st.tuples(st.just("abort"), st.integers(0, 30))
policies = st.tuples(
    st.just("policy"),
    st.integers(1, 8),
    st.integers(16, 128),
    st.sampled_from([0.0, 0.3, 1.0]),
)
steps = st.tuples(st.just("step"), st.integers(1, 6))


@example([("add", 105, 40, INTERACTIVE)], 9)  # ends at the last block
@given(
    st.lists(st.one_of(arrivals, arrivals, aborts, policies, steps, steps), max_size=60),
    st.integers(9, 40),
)
def test_whatever_happens_no_block_is_lost_and_every_request_ends(
    operations: Sequence[tuple[object, ...]], num_blocks: int
) -> None:
    b = bench(num_blocks=num_blocks)
    added: list[Request] = []
    aborted: set[str] = set()
    counter = 0
    for operation in operations:
        match operation:
            case ("add", int(prompt), int(output), RequestClass() as request_class):
                added.append(b.add(f"r{len(added)}", prompt, output, request_class))
            case ("abort", int(index)):
                if b.scheduler.abort(f"r{index}") is not None:
                    aborted.add(f"r{index}")
            case ("policy", int(size), int(step_tokens), float(share)):
                counter += 1
                b.scheduler.set_policy(policy(counter, size, step_tokens, share))
            case ("step", int(count)):
                for _ in range(count):
                    _check_step(b)
    b.scheduler.set_policy(policy(counter + 1, step_tokens=64))
    b.run(max_steps=20_000)
    _check_blocks(b)
    assert b.scheduler.residency.blocks.num_free == num_blocks
    for request in added:
        if request.id not in aborted:
            tokens = [e.token_id for e in b.events if e.request is request]
            first = 1000 + request.num_prompt_tokens * 100
            room = num_blocks * BLOCK - request.num_prompt_tokens  # all of the KV memory
            num_tokens = min(request.sampling.max_tokens, room)
            assert tokens == list(range(first, first + num_tokens))


def _check_step(b: Bench) -> None:
    size_before = len(b.running())
    plan = b.step()
    in_force = b.scheduler.policy
    num_tokens = plan.num_decode_seqs + plan.num_prefill_tokens
    assert num_tokens <= max(in_force.step_tokens, plan.num_decode_seqs)
    assert len({c.request.id for c in plan.chunks}) == len(plan.chunks)
    assert len(plan.chunks) <= max(in_force.batch_size, size_before)
    _check_blocks(b)


def _check_blocks(b: Bench) -> None:
    """Walk the free list and every holder: each block is in exactly one place."""
    residency = b.scheduler.residency
    held = [block for r in residency.running for block in r.block_ids]
    assert sorted([*held, *residency.blocks.free_list()]) == list(
        range(1, residency.blocks.num_blocks + 1)
    )
    for request in residency.running:
        assert len(request.block_ids) * BLOCK >= request.num_computed_tokens


def test_a_queued_request_holds_no_blocks() -> None:
    b = bench(batch_size=1)
    b.add("a", 4)
    waiting = b.add("b", 4)
    b.step()
    assert waiting.block_ids == [] and b.scheduler.residency.waiting[INTERACTIVE] == [waiting]


def test_the_gauges_follow_every_change() -> None:
    b = bench(batch_size=1)
    b.add("a", 4)
    b.add("b", 40, request_class=BATCH)
    b.step()
    gauges = b.scheduler.residency.gauges()
    assert gauges.num_running == {INTERACTIVE: 1, BATCH: 0}
    assert gauges.num_waiting == {INTERACTIVE: 0, BATCH: 1}
    assert gauges.waiting_prefill_tokens == 40
    assert gauges.oldest_arrival_s == {INTERACTIVE: None, BATCH: pytest.approx(0.002)}
