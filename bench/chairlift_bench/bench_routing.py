"""What the gateway's routing is worth beside random and least-connections: `make bench-routing`.

A recorded conversation load on four simulated replicas in virtual time: the gateway's real routing,
the engine's own loop, scheduler and prefix cache, fixed knobs. Arrivals are paired: every router
gets the same requests at the same times, from a place of the trace that the seed picks. Prefix
hits are compared with those of one replica that forgets nothing; a last, small memory shows what
eviction leaves of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from random import Random
from typing import Final

from chairlift_bench.claims import publish
from chairlift_bench.evaluate_laws import Fixed, PerReplica
from chairlift_bench.outcomes import percentile
from chairlift_bench.routers import LeastConnections, RandomRouter, WithoutAffinity
from chairlift_engine.simulator_profile import Profile
from chairlift_gateway.routing import Router
from chairlift_operator.memory import Knobs
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import parse_pool
from chairlift_simulation.arrival_traces import (
    PREFIX_BLOCK_TOKENS,
    Stretch,
    at_rates,
    read_trace,
    rotated,
)
from chairlift_simulation.conditions import Conditions
from chairlift_simulation.fleet import Hardware
from chairlift_simulation.offered import offered
from chairlift_simulation.pool_run import PoolRun
from chairlift_simulation.replica import VirtualRequest

TRACE: Final = "mooncake-conversation"
NUM_REPLICAS: Final = 4
REQUESTS_PER_S: Final = 3.4  # as recorded
MINUTES: Final = 10
SEEDS: Final = (1, 2, 3)
KNOBS: Final = Knobs(256, 2048)
BLOCK_TOKENS: Final = 64
# Nothing is evicted in the first; the second holds some 40 prompts.
MEMORIES_TOKENS: Final = (8_000_000, 500_000)
OURS: Final = "ours"
ROUTERS: Final[dict[str, Callable[[int], Router]]] = {
    "random": lambda seed: RandomRouter(random=Random(seed)),
    "least connections": lambda seed: LeastConnections(),
    "predicted wait alone": lambda seed: WithoutAffinity(),
    OURS: lambda seed: Router(),
}
_POOL: Final = f"""
apiVersion: chairlift.dev/v1alpha1
kind: InferencePool
metadata: {{name: routed}}
spec:
  model: {{name: simulated, source: cache://simulated, maxLength: 131072}}
  runtime: {{engine: simulator}}
  capacity: {{replicas: {NUM_REPLICAS}}}
  interactive:
    slo:
      timeToFirstToken: {{threshold: 2s, objective: 95}}
      interTokenLatency: {{threshold: 100ms, objective: 95}}
    replicas: {{min: {NUM_REPLICAS}, max: {NUM_REPLICAS}}}
    batchSize: {{min: 1, max: {KNOBS.batch_size}}}
    stepTokens: {{min: 64, max: {KNOBS.step_tokens}}}
  mode: Enforce
"""


@dataclass(frozen=True, slots=True)
class Case:
    router: str
    seed: int
    memory_tokens: int
    minutes: float


@dataclass(frozen=True, slots=True)
class Figures:
    """hit_share: prefix hits, of those of one replica that forgets nothing."""

    case: Case
    num_requests: int
    num_unfinished: int
    ttft_p50_s: float
    ttft_p95_s: float
    hit_share: float
    num_preemptions: int


def carry_out(case: Case) -> Figures:
    pool = parse_pool(_POOL)
    requests = _requests(pool, case)
    conditions = Conditions(
        Hardware(Profile.parse("reference"), case.memory_tokens, BLOCK_TOKENS),
        seed=case.seed,
        router=lambda: ROUTERS[case.router](case.seed),
    )
    law = PerReplica(pool, Fixed(KNOBS))
    result = PoolRun(pool, law, conditions).run(requests, case.minutes * 60)
    ttfts_s = [j.ttft_s for j in result.journeys if j.ttft_s is not None]
    return Figures(
        case,
        len(requests),
        sum(j.error is not None for j in result.journeys),
        percentile(ttfts_s, 50),
        percentile(ttfts_s, 95),
        result.prefix_hit_tokens / most_hit_tokens(requests),
        result.num_preemptions,
    )


def _requests(pool: InferencePool, case: Case) -> tuple[VirtualRequest, ...]:
    """Equal for every memory: what fits the smallest."""
    load = [Stretch(case.minutes * 60, REQUESTS_PER_S)]
    arrivals = at_rates(rotated(read_trace(TRACE), case.seed), load)
    return offered(arrivals, pool, min(MEMORIES_TOKENS)).requests


def most_hit_tokens(requests: Sequence[VirtualRequest]) -> int:
    """Of one replica that serves all and forgets nothing, one request after the other."""
    seen: set[int] = set()
    num_tokens = 0
    for request in requests:
        num_blocks = 0
        for block in request.prefix_blocks:
            if block not in seen:
                break
            num_blocks += 1
        num_tokens += min(num_blocks * PREFIX_BLOCK_TOKENS, request.prompt_tokens - 1)
        seen.update(request.prefix_blocks)
    return num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    args = parser.parse_args()
    ample, small = MEMORIES_TOKENS
    cases = [
        *(Case(name, seed, ample, args.minutes) for seed in args.seeds for name in ROUTERS),
        *(Case(name, args.seeds[0], small, args.minutes) for name in ROUTERS),
    ]
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        figures = []
        for each in processes.map(carry_out, cases):
            figures.append(each)
            print(
                f"{each.case.router}, seed {each.case.seed}, KV {each.case.memory_tokens:,} "
                f"tokens: TTFT p50 {each.ttft_p50_s:.2f}, p95 {each.ttft_p95_s:.2f} s, prefix "
                f"hits {each.hit_share:.3f} of what one cache would find, "
                f"{each.num_unfinished} of {each.num_requests} unfinished"
            )
    judged = [each for each in figures if each.case.memory_tokens == ample]
    publish("bench_routing", claims_of(judged), {"runs": [asdict(each) for each in figures]})


def claims_of(figures: Sequence[Figures]) -> dict[str, float]:
    """Medians over seeds, each compared within its own; and the worst."""
    by_router = {
        name: {each.case.seed: each for each in figures if each.case.router == name}
        for name in ROUTERS
    }
    ours = by_router[OURS]

    def ratios(other: str) -> list[float]:
        return [each.ttft_p95_s / by_router[other][seed].ttft_p95_s for seed, each in ours.items()]

    shares = [each.hit_share for each in ours.values()]
    return {
        "routing_p95_ttft_vs_random": statistics.median(ratios("random")),
        "routing_p95_ttft_vs_random_worst": max(ratios("random")),
        "routing_p95_ttft_vs_least_connections": statistics.median(ratios("least connections")),
        "routing_p95_ttft_vs_least_connections_worst": max(ratios("least connections")),
        "routing_prefix_hit_share": statistics.median(shares),
        "routing_prefix_hit_share_worst": min(shares),
    }


if __name__ == "__main__":
    main()
