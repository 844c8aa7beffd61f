"""Prompts that begin alike share the KV of their beginning, within what may be shared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chairlift_bench.fuzz_world import World
from chairlift_engine.config import Capacity
from chairlift_engine.request import Obstacle, Request
from chairlift_protocol.policy import Generation, Policy, SloThresholds
from chairlift_protocol.wire import RequestClass

BLOCK = 16


def world(num_blocks: int = 64, share: bool = False, **values: object) -> World:
    capacity = Capacity(8, 512, num_blocks, BLOCK, 1000, share_prefixes=share)
    given = {"batch_size": 8, "step_tokens": 512, "chunk_tokens": 512, **values}
    policy = Policy(Generation(0, 0), batch_class_share=1.0, slo=SloThresholds(1000, 1000), **given)  # type: ignore[arg-type]
    return World(capacity, policy)


def run(w: World) -> None:
    while w.num_alive:
        w.step()
    w.check_drained()


def prompt(num_tokens: int, kind: int = 1) -> list[int]:
    return [kind * 1000 + index % 500 for index in range(num_tokens)]


@pytest.mark.parametrize(
    ("num_tokens", "num_cached"),
    [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (64, 48), (65, 64)],
)
def test_at_least_the_last_token_of_a_prompt_is_computed(num_tokens: int, num_cached: int) -> None:
    w = world()
    w.add(prompt(num_tokens), 3)
    run(w)
    again = w.add(prompt(num_tokens), 3)
    plan = w.step()
    assert again.num_cached_tokens == num_cached
    assert plan.num_prefill_tokens == num_tokens - num_cached
    run(w)


def test_an_answer_can_be_found_as_the_beginning_of_the_next_prompt() -> None:
    w = world()
    first = w.add(prompt(20), 30)
    run(w)
    chat = w.add([*first.token_ids, 5, 6, 7], 4)
    w.step()
    assert chat.num_cached_tokens == (first.num_tokens - 1) // BLOCK * BLOCK > 20
    run(w)


def test_a_prompt_that_is_scored_is_computed_as_a_whole() -> None:
    w = world()
    first = w.add(prompt(60), 3)
    run(w)
    scored = Request("r", prompt(60), replace(first.sampling, num_prompt_logprobs=0), w.now_s)
    find = w.scheduler.residency.find_prefix
    assert find(scored) == []
    scored.token_ids.append(5)  # from now on its prompt has been scored
    assert len(find(scored)) * BLOCK == 48


def test_only_computed_blocks_are_found() -> None:
    w = world(step_tokens=32, chunk_tokens=32)
    first = w.add(prompt(200), 2)
    for num_computed in (32, 64, 96):
        w.step()
        beside = Request("beside", [*prompt(150), 9], first.sampling, w.now_s)
        assert len(w.scheduler.residency.find_prefix(beside)) * BLOCK == num_computed
    run(w)


def test_one_tenant_cannot_find_anothers_prompt_unless_the_pool_shares() -> None:
    for share, num_cached in ((False, 0), (True, 48)):
        w = world(share=share)
        w.add(prompt(60), 3, tenant="acme")
        run(w)
        other = w.add(prompt(60), 3, tenant="bolt")
        same = w.add([*prompt(48), 1, 2, 3], 3, tenant="acme")
        run(w)
        assert (other.num_cached_tokens, same.num_cached_tokens) == (num_cached, 48)


def test_requests_that_share_an_uncached_prefix_wait_for_the_one_that_computes_it() -> None:
    w = world(step_tokens=128, chunk_tokens=64)
    requests = [w.add([*prompt(96), 100 + i], 2) for i in range(4)]
    plan = w.step()
    assert [chunk.request for chunk in plan.chunks] == requests[:1]
    reasons = [known.obstacle for known in w.scheduler.explain()[1:]]
    assert reasons == [Obstacle.PREFIX] * 3
    run(w)
    assert [r.num_cached_tokens for r in requests[1:]] == [96] * 3
    assert all(r.num_times_passed == 0 for r in requests)


def test_choices_of_one_prompt_share_its_blocks() -> None:
    w = world()
    choices = [w.add(prompt(70), 20) for _ in range(4)]
    w.step()
    w.step()
    shared = {tuple(r.block_ids[:4]) for r in choices}
    assert len(shared) == 1 and w.scheduler.residency.blocks.num_used == 4 + 4
    run(w)


def test_an_interactive_request_does_not_wait_for_batch_work_to_compute_its_prefix() -> None:
    w = world(step_tokens=32, chunk_tokens=32)
    w.add(prompt(200), 2, request_class=RequestClass.BATCH)
    w.step()
    chat = w.add(prompt(201), 2)
    w.step()
    assert chat.num_computed_tokens > 32
    run(w)


def test_a_preempted_request_finds_what_it_had_computed() -> None:
    w = world(num_blocks=12, batch_size=1)
    batch = w.add(prompt(90), 10, request_class=RequestClass.BATCH)
    w.step()
    w.add(prompt(20, kind=2), 2)
    w.step()
    assert batch.num_preemptions == 1
    chunks: list[int] = []
    while w.num_alive:
        chunks += [c.num_tokens for c in w.step().chunks if c.request is batch]
    assert chunks[0] <= BLOCK  # not 91 again
    assert batch.num_cached_tokens == 0  # of the first start


def test_memory_that_only_caches_is_free_memory() -> None:
    w = world(num_blocks=20)
    for kind in range(1, 8):
        w.add(prompt(100, kind), 2)
        run(w)
    gauges = w.scheduler.residency.gauges()
    assert gauges.num_free_blocks == 20 and gauges.num_cached_blocks >= 18
    big = w.add(prompt(300, kind=9), 2)
    w.step()
    assert big.num_computed_tokens == 300
    run(w)


def test_cached_blocks_of_a_request_that_does_not_fit_are_not_lost() -> None:
    w = world(num_blocks=20)
    w.add(prompt(100), 2)
    run(w)
    w.add(prompt(160, kind=2), 60)
    w.step()
    waiting = w.add([*prompt(96), *prompt(120, kind=3)], 2)
    w.step()
    assert not waiting.block_ids and waiting.obstacle is Obstacle.BLOCKS
    run(w)
    assert waiting.num_cached_tokens in (0, 96)


def test_hits_are_counted_in_tokens_of_requests_started_for_the_first_time() -> None:
    w = world()
    for _ in range(2):
        w.add(prompt(40), 2)
        run(w)
    gauges = w.scheduler.residency.gauges()
    assert (gauges.prefix_query_tokens, gauges.prefix_hit_tokens) == (80, 32)


def test_static_batching_does_not_use_the_cache() -> None:
    w = world(scheduling="static")
    requests: list[Request] = []
    for _ in range(2):
        requests.append(w.add(prompt(60), 2))
        w.now_s += 1.0
        run(w)
    assert [r.num_cached_tokens for r in requests] == [0, 0]
    assert w.scheduler.residency.blocks.num_cached == 0
