"""A million random scheduler steps, watched: `make fuzz`.

`python -m chairlift_bench.fuzz [--steps N] [--seed S]` plays episodes, each a world of its own with
its capacity, tenants, classes, shared prefixes and habits drawn from its seed, on every core. It
ends with what held as claims; a broken promise is printed with the seed that repeats it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from chairlift_bench.fuzz_world import MAX_STARVED_STEPS, Broken, World
from chairlift_engine.config import Capacity
from chairlift_protocol.policy import Generation, Policy, SloThresholds, TenantPolicy
from chairlift_protocol.wire import RequestClass

EPISODE_STEPS: Final = 2000
MAX_DRAIN_STEPS: Final = 200_000
RESULT: Final = Path("bench/results/fuzz.json")
EXERCISED: Final = (
    "finished", "aborted", "failed steps", "preemptions", "later chunks", "mixed steps",
    "requests with cached tokens",
)  # fmt: skip


@dataclass(slots=True)
class Episode:
    seed: int
    num_steps: int = 0
    num_leaked_blocks: int = 0
    broken_kind: str = ""
    broken: str = ""
    most_idle_steps: int = 0
    widest_gap: float = 0.0
    num_compared: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class Habits:
    """What one episode's clients and operator are like."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.tenants = ["anonymous", "acme", "bolt", "crux", "dune"][: rng.randint(1, 5)]
        self.prefixes = [[rng.randrange(8, 90)] * rng.randint(4, 60) for _ in range(3)]
        self.num_alive = rng.choice((2, 6, 12, 30))
        self.abort = rng.choice((0.0, 0.01, 0.05))
        self.policy = rng.choice((0.0, 0.0, 0.002, 0.02))
        self.failure = rng.choice((0.0, 0.002))
        self.batch = rng.choice((0.0, 0.3, 0.7))
        self.longest_prompt = rng.choice((20, 60, 150))
        self.longest_answer = rng.choice((4, 30, 120))
        self.step_s = rng.choice((0.02, 0.2, 1.0))

    def capacity(self) -> Capacity:
        rng, block_tokens = self.rng, self.rng.choice((4, 16))
        return Capacity(
            batch_size=rng.randint(1, 8),
            step_tokens=rng.randint(block_tokens, 128),
            num_blocks=rng.randint(3, 60),
            block_tokens=block_tokens,
            model_length_tokens=rng.choice((64, 400)),
            share_prefixes=rng.random() < 0.3,
        )

    def values(self, capacity: Capacity) -> dict[str, object]:
        rng = self.rng
        step_tokens = rng.randint(capacity.block_tokens, capacity.step_tokens)
        return {
            "batch_size": rng.randint(1, capacity.batch_size),
            "step_tokens": step_tokens,
            "chunk_tokens": rng.randint(capacity.block_tokens, capacity.step_tokens),
            "batch_class_share": rng.choice((0.0, 0.3, 1.0, 1.0)),
            "batch_min_share": rng.choice((0.05, 0.2)),
            "slo": SloThresholds(1000, rng.choice((30, 300, 3000))),
            "tenants": {name: self.tenant() for name in self.tenants if rng.random() < 0.4},
        }

    def tenant(self) -> TenantPolicy:
        rng = self.rng
        return TenantPolicy(
            weight=rng.choice((0.5, 1.0, 3.0)),
            slots=rng.choice((None, 1, 3)),
            kv_tokens=rng.choice((None, None, 64, 300)),
        )

    def act(self, world: World) -> None:
        """What happens between two steps, and the step."""
        rng = self.rng
        while world.num_alive < self.num_alive and rng.random() < 0.5:
            self.add(world)
        if rng.random() < self.abort:
            world.abort(rng.randrange(1000))
        if rng.random() < self.policy:
            world.set_policy(**self.values(world.scheduler.capacity))
        num_tokens = rng.randrange(64)
        step_s = self.step_s * (0.5 + num_tokens / 64)
        world.step(step_s, fails=rng.random() < self.failure)

    def add(self, world: World) -> None:
        rng = self.rng
        prompt = list(rng.choice(self.prefixes)) if rng.random() < 0.6 else []
        prompt += [rng.randrange(8, 200) for _ in range(rng.randint(1, self.longest_prompt))]
        longest_tokens = world.scheduler.capacity.longest_prompt_tokens
        is_batch = rng.random() < self.batch
        world.add(
            prompt[:longest_tokens],
            rng.randint(1, self.longest_answer),
            rng.choice(self.tenants),
            RequestClass.BATCH if is_batch else RequestClass.INTERACTIVE,
        )


def play(seed: int) -> Episode:
    rng = random.Random(seed)
    habits, episode = Habits(rng), Episode(seed)
    capacity = habits.capacity()
    policy = Policy(Generation(0, 0), **habits.values(capacity))  # type: ignore[arg-type]
    world = World(capacity, policy)
    try:
        for _ in range(EPISODE_STEPS):
            habits.act(world)
        world.set_policy(batch_class_share=1.0, step_tokens=capacity.step_tokens)
        while world.num_alive:
            world.step(habits.step_s)
            if world.num_steps > MAX_DRAIN_STEPS:
                raise Broken("starved", f"{world.num_alive} requests do not end")
        world.check_drained()
    except Broken as error:
        episode.broken_kind, episode.broken = error.kind, str(error)
    blocks = world.scheduler.residency.blocks
    if not episode.broken:
        episode.num_leaked_blocks = blocks.num_blocks - blocks.num_free
    episode.num_steps = world.num_steps
    episode.most_idle_steps = world.most_idle_steps
    episode.widest_gap = world.fairness.widest
    episode.num_compared = world.fairness.num_compared
    episode.counts = world.counts
    return episode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A million random scheduler steps, watched.")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, help="play this one episode only")
    options = parser.parse_args(argv)
    if options.seed is not None:
        print(play(options.seed))
        return 0
    started_s = time.monotonic()
    episodes = list(_until(options.steps, started_s))
    return _tell(episodes, time.monotonic() - started_s)


def _until(num_steps: int, started_s: float) -> Iterator[Episode]:
    num_done, shown_s = 0, started_s
    seeds = range(1, -(-num_steps // EPISODE_STEPS) + 1)
    with multiprocessing.Pool() as pool:
        for episode in pool.imap_unordered(play, seeds):
            yield episode
            num_done += episode.num_steps
            if episode.broken:
                print(f"seed {episode.seed}: {episode.broken}", flush=True)
            if time.monotonic() - shown_s > 10:
                shown_s = time.monotonic()
                print(f"{num_done:,} steps, {shown_s - started_s:.0f} s", flush=True)


def _tell(episodes: Sequence[Episode], elapsed_s: float) -> int:
    counts: Counter[str] = Counter()
    for episode in episodes:
        counts += episode.counts
    kinds = Counter(episode.broken_kind for episode in episodes if episode.broken)
    claims = {
        "fuzz_steps": sum(episode.num_steps for episode in episodes),
        "fuzz_leaked_blocks": sum(episode.num_leaked_blocks for episode in episodes),
        "fuzz_starved_requests": kinds["starved"],
        "fuzz_vtc_bound_violations": kinds["fairness"],
    }
    seen = {
        "elapsed_s": round(elapsed_s, 1),
        "num_episodes": len(episodes),
        "starved_after_steps": MAX_STARVED_STEPS,
        "most_steps_without_a_token": max(episode.most_idle_steps for episode in episodes),
        "widest_gap_over_vtc_bound": round(max(e.widest_gap for e in episodes), 3),
        "num_gaps_compared": sum(episode.num_compared for episode in episodes),
        "exercised": {name: counts[name] for name in EXERCISED},
        "broken": dict(kinds),
    }
    print(json.dumps(seen, indent=2))
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"claims": claims, **seen}, indent=2))
    for name, value in claims.items():
        print(f"claim {name} {value}")
    return 1 if kinds or not all(counts[name] for name in EXERCISED) else 0


if __name__ == "__main__":
    sys.exit(main())
