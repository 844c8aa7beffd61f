"""The baseline: batches that fill, run padded to the end of their longest, and only then refill."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift_engine.config import Capacity
from chairlift_engine.request import FinishReason, Request, SamplingParams
from chairlift_engine.runner import Sampled
from chairlift_engine.scheduler import Scheduler, StepPlan, TokenEvent
from chairlift_engine.static_batching import FILL_WAIT_S
from chairlift_protocol.policy import Generation, Policy, SloThresholds
from chairlift_protocol.wire import RequestClass

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
STATIC = Policy(Generation(0, 0), 4, 64, 64, 1.0, SloThresholds(ttft_ms=1000, itl_ms=100), "static")


class Rig:
    """A scheduler whose steps take 10 ms, and tokens that only a request determines."""

    def __init__(self, num_blocks: int = 64, policy: Policy = STATIC) -> None:
        capacity = Capacity(8, 512, num_blocks, 16, model_length_tokens=1000)
        self.scheduler = Scheduler(capacity, policy)
        self.now_s = 0.0
        self.events: list[TokenEvent] = []

    def add(
        self, name: str, prompt: int, output: int = 4, request_class: RequestClass = INTERACTIVE
    ) -> Request:
        sampling = SamplingParams(max_tokens=output)
        request = Request(name, list(range(prompt)), sampling, self.now_s, request_class)
        self.now_s += 1e-6
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule(self.now_s)
        for chunk in plan.chunks:
            assert (
                chunk.request.block_ids
                and chunk.start == chunk.request.num_computed_tokens
                or (chunk.request.id == "padding")
            )
        sampled = [Sampled(1000 + c.request.num_output_tokens) for c in plan.chunks if c.samples]
        self.now_s += 0.01
        self.events += self.scheduler.commit(plan, sampled, self.now_s)
        return plan

    def set(self, counter: int, **values: object) -> None:
        policy = replace(self.scheduler.policy, generation=Generation(0, counter))
        self.scheduler.set_policy(replace(policy, **values))

    def finished(self) -> list[str]:
        return [e.request.id for e in self.events if e.finish_reason is not None]

    def run_to_end(self, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            if self.scheduler.residency.num_requests == 0:
                return
            self.step()
        raise AssertionError(f"unfinished: {self.scheduler.residency.running}")

    def assert_nothing_is_held(self) -> None:
        blocks = self.scheduler.residency.blocks
        assert blocks.free_list() == frozenset(range(1, blocks.num_blocks + 1))
        assert not self.scheduler.residency.running


def test_a_full_batch_starts_at_once() -> None:
    rig = Rig()
    for i in range(5):
        rig.add(f"r{i}", 10)
    rig.step()
    assert [r.id for r in rig.scheduler.residency.running] == ["r0", "r1", "r2", "r3"]


def test_a_short_batch_waits_for_company_and_then_starts_short() -> None:
    rig = Rig()
    request = rig.add("alone", 10)
    plan = rig.step()
    assert not plan.chunks
    assert plan.retry_after_s == pytest.approx(FILL_WAIT_S, abs=1e-3)
    rig.now_s = request.arrival_s + FILL_WAIT_S
    assert rig.step().num_prefill_tokens == 10


def test_prefill_is_padded_to_the_longest_prompt_whatever_the_step_tokens() -> None:
    rig = Rig()
    for name, prompt in (("a", 10), ("b", 100), ("c", 40), ("d", 1)):
        rig.add(name, prompt)
    plan = rig.step()
    assert plan.num_prefill_tokens == 4 * 100
    assert {e.request.id for e in rig.events} == {"a", "b", "c", "d"}


def test_rows_that_ended_are_computed_on_and_answered_at_once() -> None:
    rig = Rig()
    for i, output in enumerate((1, 2, 3, 9)):
        rig.add(f"r{i}", 10, output)
    assert rig.step().num_decode_seqs == 0
    assert rig.finished() == ["r0"]
    counts = [rig.step().num_decode_seqs for _ in range(8)]
    assert counts == [4] * 8
    assert rig.finished() == ["r0", "r1", "r2", "r3"]
    rig.assert_nothing_is_held()


def test_the_batch_refills_only_when_its_longest_member_has_ended() -> None:
    rig = Rig()
    for i, output in enumerate((2, 2, 2, 6)):
        rig.add(f"r{i}", 10, output)
    for i in range(4):
        rig.add(f"next{i}", 10, 2)
    waiting = []
    for _ in range(6):
        rig.step()
        waiting.append(len(rig.scheduler.residency.waiting[INTERACTIVE]))
    assert waiting == [4] * 6
    plan = rig.step()
    assert plan.num_decode_seqs == 0
    assert plan.num_prefill_tokens == 40


def test_an_abort_frees_its_blocks_and_the_rest_goes_on() -> None:
    rig = Rig()
    requests = [rig.add(f"r{i}", 10, 5) for i in range(5)]
    rig.step()
    held = rig.scheduler.residency.blocks.num_used
    assert rig.scheduler.abort("r3") is requests[3]
    assert rig.scheduler.residency.blocks.num_used == held - 1
    assert rig.scheduler.abort("r4") is requests[4]
    rig.run_to_end()
    assert rig.finished() == ["r0", "r1", "r2"]
    rig.assert_nothing_is_held()


def test_batch_work_leaves_when_its_share_is_taken() -> None:
    rig = Rig()
    rig.add("batch", 10, 50, BATCH)
    for i in range(3):
        rig.add(f"r{i}", 10, 50)
    rig.step()
    assert len(rig.scheduler.residency.running_of(BATCH)) == 1
    rig.set(1, batch_class_share=0.0)
    rig.step()
    assert not rig.scheduler.residency.running_of(BATCH)


@settings(max_examples=60, deadline=None)
@given(
    work=st.lists(
        st.tuples(st.integers(1, 90), st.integers(1, 12), st.sampled_from([INTERACTIVE, BATCH])),
        min_size=1,
        max_size=14,
    ),
    switches=st.lists(st.integers(1, 12), max_size=6),
    aborted=st.sets(st.integers(0, 13), max_size=3),
    num_blocks=st.integers(10, 40),
)
def test_switching_live_loses_no_token_and_no_block(
    work: list[tuple[int, int, RequestClass]],
    switches: list[int],
    aborted: set[int],
    num_blocks: int,
) -> None:
    rig = Rig(num_blocks)
    for i, (prompt, output, request_class) in enumerate(work):
        rig.add(f"r{i}", prompt, output, request_class)
    for counter, steps in enumerate(switches, start=1):
        mode = "continuous" if rig.scheduler.policy.scheduling == "static" else "static"
        for _ in range(steps):
            rig.step()
        rig.set(counter, scheduling=mode)
    ended = set(rig.finished())
    left = {f"r{i}" for i in aborted if i < len(work)} - ended
    for name in left:
        rig.scheduler.abort(name)
    rig.run_to_end()
    for i, (_, output, _) in enumerate(work):
        if f"r{i}" in left:
            continue
        events = [e for e in rig.events if e.request.id == f"r{i}"]
        assert [e.token_id for e in events] == [1000 + k for k in range(output)]
        assert [e.finish_reason for e in events if e.finish_reason] == [FinishReason.LENGTH]
    rig.assert_nothing_is_held()


def test_a_member_that_yields_its_blocks_is_not_computed_in_that_step() -> None:
    rig = Rig(num_blocks=7)
    requests = [rig.add(f"r{i}", prompt, output=60) for i, prompt in enumerate((30, 14, 28))]
    rig.run_to_end()
    assert sum(r.num_preemptions for r in requests) > 0
    for request in requests:
        tokens = [e.token_id for e in rig.events if e.request is request]
        assert tokens == list(range(1000, 1060))
