"""Classes are strict, and yet batch work has its guaranteed part; who yields, and how often."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift_bench.fuzz_world import World
from chairlift_engine.config import Capacity
from chairlift_engine.guarantee import DUE_AFTER_S
from chairlift_engine.request import Obstacle, Phase, Request
from chairlift_engine.residency import MAX_PREEMPTIONS
from chairlift_protocol.policy import Generation, Policy, SloThresholds, TenantPolicy
from chairlift_protocol.wire import RequestClass

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
BLOCK = 16
_numbers = count()


def world(num_blocks: int = 200, batch_size: int = 4, step_tokens: int = 256, **v: object) -> World:
    capacity = Capacity(40, 512, num_blocks, BLOCK, 1000)
    given = {"batch_size": batch_size, "step_tokens": step_tokens, "chunk_tokens": step_tokens, **v}
    given.setdefault("batch_class_share", 1.0)
    policy = Policy(Generation(0, 0), slo=SloThresholds(1000, 1000), **given)  # type: ignore[arg-type]
    return World(capacity, policy)


def add(
    w: World, cls: RequestClass = INTERACTIVE, num_prompt: int = 20, output: int = 10
) -> Request:
    return w.add([1000 + next(_numbers)] * num_prompt, output, "anonymous", cls)


def running(w: World) -> set[Request]:
    return {*w.scheduler.residency.running}


def saturate(w: World, num_steps: int, step_s: float = 0.5, output: int = 10) -> None:
    """More interactive work waits than there are slots, all the time."""
    for _ in range(num_steps):
        while w.scheduler.residency.num_waiting[INTERACTIVE] < w.scheduler.policy.batch_size:
            add(w, output=output)
        w.step(step_s)


# -- interactive first -----------------------------------------------------------------------------


def test_interactive_requests_take_batch_slots_within_one_step_if_only_the_batch_size_binds() -> (
    None
):
    w = world()
    batch = [add(w, BATCH, output=100) for _ in range(4)]
    for _ in range(3):
        w.step()
    chats = [add(w) for _ in range(3)]
    plan = w.step()
    assert plan.num_preemptions == 3
    assert {c.request for c in plan.chunks} == {
        batch[0],
        *chats,
    }  # never the oldest while others can


def test_equals_never_preempt_each_other_for_a_slot_whoever_their_tenants_are() -> None:
    w = world()
    for index in range(20):
        w.add([1000 + index] * 20, 20, f"tenant-{index % 3}", BATCH if index % 2 else INTERACTIVE)
        if index == 10:
            w.step()
    before = {r for r in running(w) if r.request_class is INTERACTIVE}
    w.step()
    assert before <= running(w)


def test_a_batch_request_that_ends_in_this_step_is_not_put_back() -> None:
    w = world(batch_size=1)
    batch = add(w, BATCH, output=2)
    w.step()
    chat = add(w)
    w.step()
    assert batch.phase is Phase.ENDED and batch.num_preemptions == 0
    assert chat in {c.request for c in w.step().chunks}


def test_putting_back_a_request_in_the_middle_of_its_prompt_is_harmless() -> None:
    w = world(batch_size=1, step_tokens=32)
    batch = add(w, BATCH, num_prompt=200)
    w.step()
    assert 0 < batch.num_computed_tokens < 200
    chat = add(w)
    w.step()
    assert running(w) == {chat} and batch.num_computed_tokens == 0
    while w.num_alive:
        w.step()


# -- the guarantee ---------------------------------------------------------------------------------


def test_batch_work_that_waited_long_enough_takes_a_guaranteed_seat_and_keeps_it() -> None:
    w = world()
    saturate(w, 20)
    batch = [add(w, BATCH, num_prompt=100, output=30) for _ in range(3)]
    saturate(w, int(DUE_AFTER_S / 0.5) + 30)
    assert running(w) & {*batch} == {batch[0]} and batch[0].holds_seat
    saturate(w, 600)
    assert [r.phase for r in batch] == [Phase.ENDED] * 3
    assert [r.num_preemptions for r in batch] == [0] * 3


def test_guaranteed_seats_go_round_the_tenants_and_not_to_the_one_that_queued_most() -> None:
    w = world(tenants={"acme": TenantPolicy(slots=4)})
    for index in range(50):
        w.add([5000 + index] * 20, 20, "acme", BATCH)
    late = w.add([6000] * 20, 20, "bolt", BATCH)
    saturate(w, int(DUE_AFTER_S / 0.5) + 120)
    assert late.phase is Phase.ENDED


def test_a_share_of_zero_guarantees_nothing() -> None:
    w = world(batch_class_share=0.0)
    batch = add(w, BATCH)
    for _ in range(300):
        w.step(1.0)
    assert not batch.block_ids
    w.set_policy(batch_class_share=0.5)
    w.step()
    assert batch.block_ids


@pytest.mark.parametrize(("batch_size", "num_seats"), [(1, 1), (19, 1), (20, 1), (40, 2)])
def test_no_more_than_the_guaranteed_seats_are_taken_from_interactive_work(
    batch_size: int, num_seats: int
) -> None:
    w = world(num_blocks=900, batch_size=batch_size, step_tokens=512)
    for _ in range(6):
        add(w, BATCH, output=400)
    saturate(w, int(DUE_AFTER_S) + 100, step_s=1.0)
    num_batch = w.scheduler.residency.num_running[BATCH]
    assert num_batch <= num_seats and (batch_size == 1 or num_batch == num_seats)


def test_with_one_slot_due_batch_work_has_its_turn_after_nineteen_interactive_requests() -> None:
    w = world(batch_size=1)
    batch = [add(w, BATCH, output=3) for _ in range(3)]
    order: list[RequestClass] = []
    seen: set[Request] = set()
    for _ in range(1500):
        saturate(w, 1, step_s=10.0, output=3)
        order += [r.request_class for r in running(w) - seen]
        seen |= running(w)
        if all(r.phase is Phase.ENDED for r in batch):
            break
    turns = [index for index, cls in enumerate(order) if cls is BATCH]
    assert len(turns) == 3 and {b - a for a, b in zip(turns, turns[1:], strict=False)} == {20}


def test_a_begun_batch_prompt_gets_its_share_of_tokens_beside_saturated_prefill() -> None:
    w = world(step_tokens=64, batch_min_share=0.1)
    saturate(w, 5)
    batch = add(w, BATCH, num_prompt=320)
    saturate(w, int(DUE_AFTER_S / 0.5) + 20, output=1)
    assert batch.holds_seat
    before, steps = batch.num_computed_tokens, 20
    saturate(w, steps, output=1)
    got = batch.num_computed_tokens - before
    assert got == pytest.approx(0.1 * 64 * steps, abs=BLOCK)


# -- bounded preemption ----------------------------------------------------------------------------


def test_after_yielding_four_times_batch_work_starts_for_good() -> None:
    w = world(batch_size=2)
    batch = add(w, BATCH, output=200)
    while batch.num_preemptions < MAX_PREEMPTIONS:
        for _ in range(6):
            w.step()
        for _ in range(2):
            add(w, output=2)
        w.step()
    chats = [add(w, output=5) for _ in range(30)]
    while not batch.block_ids:
        w.step()
    assert batch.is_protected and batch.holds_seat
    assert any(r.phase is Phase.WAITING for r in chats)
    assert len(batch.block_ids) * BLOCK >= batch.num_final_tokens - 1
    while w.num_alive:
        w.step()
    assert batch.num_preemptions == MAX_PREEMPTIONS


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(1, 100)), min_size=2, max_size=12),
    st.integers(13, 30),
)
def test_nobody_yields_more_than_four_times_however_short_memory_is(
    work: list[tuple[int, int]], num_blocks: int
) -> None:
    w = world(num_blocks=num_blocks, batch_size=8)
    requests = [add(w, BATCH if i % 3 else INTERACTIVE, *size) for i, size in enumerate(work)]
    while w.num_alive:
        w.step()
    w.check_drained()
    assert max(r.num_preemptions for r in requests) <= MAX_PREEMPTIONS
    oldest = min((r for r in requests if r.request_class is INTERACTIVE), key=lambda r: r.number)
    assert oldest.num_preemptions == 0


def test_without_blocks_the_tenant_served_most_yields_and_of_its_requests_the_least_computed() -> (
    None
):
    w = world(num_blocks=32, batch_size=8)
    kinds = (("bolt", 30), ("acme", 90), ("acme", 60), ("bolt", 20))
    requests = [w.add([i + 1000] * size, 200, who) for i, (who, size) in enumerate(kinds)]
    while not any(r.num_preemptions for r in requests):
        w.step()
    assert [r.num_preemptions for r in requests] == [0, 0, 1, 0]


def test_two_that_wait_for_a_block_of_each_other_do_not_wait_for_ever() -> None:
    w = world(num_blocks=7, batch_size=2)
    add(w, num_prompt=47, output=40)
    last = add(w, num_prompt=47, output=3)  # needs a block for its very last step
    while w.num_alive:
        w.step()
    assert w.num_steps < 100 and last.num_preemptions == 1


def test_what_an_interactive_request_waits_for_is_not_given_to_batch_work() -> None:
    w = world(num_blocks=12)
    add(w, num_prompt=100, output=60)
    w.step()
    big, batch = add(w, num_prompt=120), add(w, BATCH, num_prompt=4)
    w.step()
    assert big.obstacle is Obstacle.BLOCKS and not batch.block_ids
