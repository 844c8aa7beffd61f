"""A pool, and an engine in virtual time whose counters the planner reads: no threads, no waits."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from chairlift_operator.exposition import EngineSample, SloCount
from chairlift_operator.memory import Memory
from chairlift_operator.plan import Plan, plan
from chairlift_operator.snapshot import EngineCapacity, PolicyReadback, ReplicaSnapshot, Snapshot
from chairlift_operator.spec import (
    BatchSizeBounds,
    InferencePool,
    Interactive,
    Metadata,
    Model,
    Objective,
    PoolSpec,
    Slo,
    StepTokensBounds,
)
from chairlift_operator.step_time import StepCosts
from chairlift_protocol.policy import Generation, Policy, SloThresholds

REFERENCE = StepCosts(8e-3, 0.06e-3, 0.045e-3, 5e-8)


def _pool(
    itl_s: float = 0.05,
    batch: tuple[int, int] = (1, 256),
    step: tuple[int, int] = (64, 2048),
    mode: str = "Enforce",
) -> InferencePool:
    interactive = Interactive(
        slo=Slo(Objective(3.0), Objective(itl_s)),
        batch_size=BatchSizeBounds(*batch),
        step_tokens=StepTokensBounds(*step),
    )
    spec = PoolSpec(Model("m", "cache://m"), interactive=interactive)
    return InferencePool(Metadata("chat"), replace(spec, mode=mode))  # type: ignore[arg-type]


@pytest.fixture
def make_pool() -> Callable[..., InferencePool]:
    return _pool


@dataclass
class Lengths:
    """Prompt and output tokens of the next request; exponential about their means."""

    prompt: float = 800.0
    output: float = 150.0
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def draw(self) -> tuple[int, int]:
        prompt = int(self.rng.expovariate(1 / self.prompt)) + 8
        return min(prompt, 4000), min(int(self.rng.expovariate(1 / self.output)) + 2, 1500)


class VirtualEngine:
    """Sarathi-style steps with T = a + bB + cP + dK and noise. Saturated unless given a rate."""

    def __init__(
        self,
        costs: StepCosts,
        itl_ms: float = 50.0,
        noise: float = 0.04,
        lengths: Lengths | None = None,
        arrivals_per_s: float | None = None,
        kv_tokens: int = 400_000,
        seed: int = 0,
    ) -> None:
        self.costs, self.noise = costs, noise
        self.lengths = lengths or Lengths(rng=random.Random(seed + 1))
        self.arrivals_per_s = arrivals_per_s
        self.capacity = EngineCapacity(256, 8192, kv_tokens, 4096, 16)
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.policy = Policy(Generation(0, 0), 256, 2048, 2048, 1.0, SloThresholds(3000.0, itl_ms))
        self.reset()

    def reset(self) -> None:
        """As after a restart: counters at zero, nothing running."""
        self.steps = self.busy_s = self.decodes = self.prefill = self.kv = 0.0
        self.good = self.bad = self.tokens = self.prompts = self.finished = 0.0
        self.decoding: list[tuple[int, int, int]] = []  # finishing step, context then, order
        self.context = 0  # KV tokens of decoding requests
        self.prefilling: deque[list[int]] = deque()  # [prompt left, prompt, output]
        self.waiting: deque[tuple[int, int]] = deque()
        self.next_arrival_s = self.now_s
        self.step_index = self.order = 0

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def run_until(self, until_s: float) -> None:
        while self.now_s < until_s:
            self._arrive()
            if not self.num_running and not self.waiting:
                self.now_s = min(until_s, max(self.next_arrival_s, self.now_s + 1e-3))
                continue
            self._step()

    def _arrive(self) -> None:
        if self.arrivals_per_s is None:
            while len(self.waiting) < 8:
                self.waiting.append(self.lengths.draw())
            return
        while self.arrivals_per_s > 0 and self.next_arrival_s <= self.now_s:
            self.waiting.append(self.lengths.draw())
            self.next_arrival_s += self.rng.expovariate(self.arrivals_per_s)

    def _step(self) -> None:
        decodes = len(self.decoding)
        budget = max(0, self.policy.step_tokens - decodes)
        prefill = 0
        while budget > 0:
            open_prompt = next((p for p in self.prefilling if p[0] > 0), None)
            if open_prompt is None:
                if self.num_running >= self.policy.batch_size or not self.waiting:
                    break
                prompt, output = self.waiting.popleft()
                open_prompt = [prompt, prompt, output]
                self.prefilling.append(open_prompt)
            chunk = min(budget, open_prompt[0])
            open_prompt[0] -= chunk
            budget -= chunk
            prefill += chunk
        kv = self.context + decodes + prefill
        mean_s = self.costs.step_s(decodes, prefill, kv)
        step_s = mean_s * max(0.2, self.rng.gauss(1, self.noise))
        self.now_s += step_s
        self._commit(step_s, decodes, prefill, kv)

    def _commit(self, step_s: float, decodes: int, prefill: int, kv: float) -> None:
        self.step_index += 1
        self.steps += 1
        self.busy_s += step_s
        self.decodes += decodes
        self.prefill += prefill
        self.kv += kv
        self.tokens += decodes
        self.context += decodes
        if 1e3 * step_s <= self.policy.slo.itl_ms:
            self.good += decodes
        else:
            self.bad += decodes
        while self.decoding and self.decoding[0][0] <= self.step_index:
            self.context -= heapq.heappop(self.decoding)[1]
            self.finished += 1
        while self.prefilling and self.prefilling[0][0] == 0:
            _, prompt, output = self.prefilling.popleft()
            self.order += 1
            self.prompts += prompt
            self.tokens += 1
            self.context += prompt
            end = (self.step_index + output, prompt + output, self.order)
            heapq.heappush(self.decoding, end)

    def sample(self) -> EngineSample:
        counts = SloCount("itl", self.policy.slo.itl_ms, "interactive", self.good, self.bad)
        return EngineSample(
            step_seconds=self.busy_s,
            num_steps=self.steps,
            step_decode_seqs=self.decodes,
            step_prefill_tokens=self.prefill,
            step_kv_tokens=self.kv,
            num_running=float(self.num_running),
            num_waiting=float(len(self.waiting)),
            kv_usage=min(1.0, self.context / self.capacity.kv_tokens),
            prompt_tokens=self.prompts,
            generation_tokens=self.tokens,
            num_preemptions=0.0,
            num_finished=self.finished,
            slo_counts=(counts,),
            policy_generation=self.policy.generation,
        )

    def snapshot(self, name: str = "chat-0") -> ReplicaSnapshot:
        return ReplicaSnapshot(
            name,
            ready=True,
            sample=self.sample(),
            sampled_at_s=self.now_s,
            policy=PolicyReadback(self.policy, self.policy, self.capacity),
        )


@pytest.fixture
def make_engine() -> Callable[..., VirtualEngine]:
    return VirtualEngine


@pytest.fixture
def make_lengths() -> Callable[..., Lengths]:
    return Lengths


@dataclass(frozen=True)
class Ticked:
    """One tick of a closed loop: when, the plan, and gaps good and bad since the tick before."""

    at_s: float
    plan: Plan
    good: float
    bad: float


@pytest.fixture
def close_loop() -> Callable[..., Iterator[Ticked]]:
    return _close_loop


def _close_loop(
    pool: InferencePool,
    engine: VirtualEngine,
    memory: Memory,
    until_s: float,
    tick_s: float = 5.0,
    alter: Callable[[ReplicaSnapshot, float], ReplicaSnapshot] = lambda seen, now_s: seen,
    on_snapshot: Callable[[Snapshot], None] = lambda snapshot: None,
) -> Iterator[Ticked]:
    """Engine and planner in turns; `alter` spoils what the planner sees."""
    good = bad = 0.0
    now_s = engine.now_s
    while now_s < until_s:
        now_s += tick_s
        engine.run_until(now_s)
        seen = alter(engine.snapshot(), engine.now_s)
        snapshot = Snapshot("default/chat", engine.now_s, (seen,))
        on_snapshot(snapshot)
        made = plan(pool, snapshot, memory, engine.now_s)
        memory = made.memory
        for action in made.actions:
            engine.policy = action.policy
        yield Ticked(engine.now_s, made, engine.good - good, engine.bad - bad)
        good, bad = engine.good, engine.bad
