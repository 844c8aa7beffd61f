from __future__ import annotations

from dataclasses import replace

from chairlift_bench.bench_routing import (
    MEMORIES_TOKENS,
    OURS,
    ROUTERS,
    SEEDS,
    Case,
    Figures,
    carry_out,
    claims_of,
    most_hit_tokens,
)
from chairlift_simulation.replica import VirtualRequest


def test_one_cache_that_forgets_nothing_finds_the_blocks_that_prompts_begin_with_alike() -> None:
    def request(*blocks: int, prompt_tokens: int = 10_000) -> VirtualRequest:
        return VirtualRequest(0.0, prompt_tokens, 1, prefix_blocks=blocks)

    assert most_hit_tokens([request(1, 2)]) == 0
    assert most_hit_tokens([request(1, 2), request(1, 3)]) == 512
    assert most_hit_tokens([request(1, 2), request(3, 2)]) == 0
    # A token is always left to be computed.
    assert most_hit_tokens([request(1, 2), request(1, 2, prompt_tokens=1024)]) == 1023


def test_the_same_seed_gives_every_router_the_same_requests_and_repeats_itself() -> None:
    cases = [Case(router, 1, MEMORIES_TOKENS[0], 0.2) for router in ROUTERS]
    figures = {each.router: carry_out(each) for each in cases}
    assert len({each.num_requests for each in figures.values()}) == 1
    assert all(each.num_unfinished == 0 for each in figures.values())
    assert len({each.ttft_p50_s for each in figures.values()}) > 1
    assert carry_out(cases[0]) == figures[cases[0].router]


def test_claims_compare_runs_of_one_seed_and_tell_the_worst() -> None:
    def figures(router: str, seed: int, p95_s: float, hit_share: float) -> Figures:
        return Figures(Case(router, seed, 1, 1.0), 10, 0, 0.1, p95_s, hit_share, 0)

    runs = [figures(name, seed, 10.0 * seed, 0.5) for name in ROUTERS for seed in SEEDS]
    better = dict(zip(SEEDS, ((4.0, 0.9), (10.0, 0.95), (15.0, 0.7)), strict=True))
    runs = [
        replace(each, ttft_p95_s=better[each.case.seed][0], hit_share=better[each.case.seed][1])
        if each.case.router == OURS
        else each
        for each in runs
    ]
    claims = claims_of(runs)
    assert claims["routing_p95_ttft_vs_random"] == 0.5
    assert claims["routing_p95_ttft_vs_random_worst"] == 0.5
    assert claims["routing_prefix_hit_share"] == 0.9
    assert claims["routing_prefix_hit_share_worst"] == 0.7
