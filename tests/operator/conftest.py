"""A pool, and an engine in virtual time whose counters the planner reads: no threads, no waits."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from chairlift_operator.decisions import SetPolicy
from chairlift_operator.exposition import ClassSample, EngineSample, SloCount
from chairlift_operator.memory import Memory
from chairlift_operator.plan import Plan, plan
from chairlift_operator.snapshot import EngineCapacity, PolicyReadback, ReplicaSnapshot, Snapshot
from chairlift_operator.spec import (
    Batch,
    BatchSizeBounds,
    InferencePool,
    Interactive,
    Metadata,
    Objective,
    PoolSpec,
    ReplicaBounds,
    Slo,
    StepTokensBounds,
)
from chairlift_operator.spec_runtime import Model
from chairlift_operator.step_time import StepCosts
from chairlift_protocol.policy import Generation, Policy, SloThresholds
from chairlift_protocol.wire import RequestClass

REFERENCE = StepCosts(8e-3, 0.06e-3, 0.045e-3, 5e-8)


def _pool(
    itl_s: float = 0.05,
    batch: tuple[int, int] = (1, 256),
    step: tuple[int, int] = (64, 2048),
    mode: str = "Enforce",
    scheduling: str = "Continuous",
    batch_work: Batch | None = None,
    replicas: tuple[int, int] = (1, 1),
    **spec_values: Any,
) -> InferencePool:
    interactive = Interactive(
        slo=Slo(Objective(3.0), Objective(itl_s)),
        batch_size=BatchSizeBounds(*batch),
        step_tokens=StepTokensBounds(*step),
        scheduling=scheduling,  # type: ignore[arg-type]
        replicas=ReplicaBounds(*replicas),
    )
    spec = PoolSpec(Model("m", "cache://m"), interactive=interactive, batch=batch_work)
    spec = replace(spec, **spec_values)
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


@dataclass
class Item:
    """A request in the virtual engine. end_step: when its last token comes, once it decodes."""

    prompt: int
    output: int
    arrival_s: float
    is_batch: bool
    left: int = 0
    end_step: int = 0


class VirtualEngine:
    """Sarathi-style steps with T = a + bB + cP + dK and noise. Saturated unless given a rate.

    With `batch_backlog` there is batch-class work without end, which takes what its share allows
    and yields slots to interactive requests.
    """

    def __init__(
        self,
        costs: StepCosts,
        itl_ms: float = 50.0,
        noise: float = 0.04,
        lengths: Lengths | None = None,
        arrivals_per_s: float | None = None,
        kv_tokens: int = 400_000,
        seed: int = 0,
        batch_backlog: bool = False,
    ) -> None:
        self.costs, self.noise = costs, noise
        self.lengths = lengths or Lengths(rng=random.Random(seed + 1))
        self.arrivals_per_s, self.batch_backlog = arrivals_per_s, batch_backlog
        self.capacity = EngineCapacity(256, 8192, kv_tokens, 4096, 16)
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.policy = Policy(Generation(0, 0), 256, 2048, 2048, 1.0, SloThresholds(3000.0, itl_ms))
        self.reset()

    def reset(self) -> None:
        """As after a restart: counters at zero, nothing running."""
        self.steps = self.busy_s = self.decodes = self.prefill = self.kv = 0.0
        self.good = self.bad = self.tokens = self.prompts = self.finished = 0.0
        self.first_good = self.first_bad = self.batch_tokens = self.preemptions = 0.0
        self.decoding: list[tuple[int, int, Item]] = []  # finishing step, order
        self.num_batch = 0  # of all that run
        self.num_batch_decoding = 0
        self.context = 0  # KV tokens of decoding requests
        self.prefilling: deque[Item] = deque()
        self.waiting: deque[Item] = deque()
        self.batch_waiting: deque[Item] = deque()
        self.next_arrival_s = self.now_s
        self.step_index = self.order = 0

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def run_until(self, until_s: float) -> None:
        while self.now_s < until_s:
            self._arrive()
            if self.policy.batch_class_share == 0:
                while self.num_batch:
                    self._preempt()
            lends = self.policy.batch_class_share > 0
            if not self.num_running and not self.waiting and not (lends and self.batch_waiting):
                self.now_s = min(until_s, max(self.next_arrival_s, self.now_s + 1e-3))
                continue
            self._step()

    def _arrive(self) -> None:
        while self.batch_backlog and len(self.batch_waiting) < 8:
            self.batch_waiting.append(Item(*self.lengths.draw(), self.now_s, True))
        if self.arrivals_per_s is None:
            while len(self.waiting) < 8:
                self.waiting.append(Item(*self.lengths.draw(), self.now_s, False))
            return
        while self.arrivals_per_s > 0 and self.next_arrival_s <= self.now_s:
            self.waiting.append(Item(*self.lengths.draw(), self.next_arrival_s, False))
            self.next_arrival_s += self.rng.expovariate(self.arrivals_per_s)

    def _step(self) -> None:
        decodes = len(self.decoding)
        budget = max(0, self.policy.step_tokens - decodes)
        prefill = self._prefill(self.waiting, budget, is_batch=False)
        if not self.waiting:
            share = self.policy.batch_class_share
            share_tokens = max(16, int(share * self.policy.step_tokens)) - self.num_batch_decoding
            budget = min(budget - prefill, share_tokens)
            prefill += self._prefill(self.batch_waiting, budget, is_batch=True)
        decodes = len(self.decoding)  # an interactive request may have taken a batch one's slot
        kv = self.context + decodes + prefill
        mean_s = self.costs.step_s(decodes, prefill, kv)
        step_s = mean_s * max(0.2, self.rng.gauss(1, self.noise))
        self.now_s += step_s
        self._commit(step_s, decodes, prefill, kv)

    def _prefill(self, waiting: deque[Item], budget: int, is_batch: bool) -> int:
        prefill = 0
        while budget > 0:
            begun = (p for p in self.prefilling if p.left > 0 and p.is_batch is is_batch)
            item = next(begun, None)
            if item is None:
                if not waiting or not self._has_slot(is_batch):
                    break
                item = waiting.popleft()
                item.left = item.prompt
                self.prefilling.append(item)
                self.num_batch += is_batch
            chunk = min(budget, item.left)
            item.left -= chunk
            budget -= chunk
            prefill += chunk
        return prefill

    def _has_slot(self, is_batch: bool) -> bool:
        share = self.policy.batch_class_share
        if is_batch and self.num_batch >= int(share * self.policy.batch_size):
            return False
        if self.num_running >= self.policy.batch_size and self.num_batch and not is_batch:
            self._preempt()
        return self.num_running < self.policy.batch_size

    def _preempt(self) -> None:
        """The batch item with the least work done goes back to waiting."""
        self.num_batch -= 1
        self.preemptions += 1
        begun = [item for item in self.prefilling if item.is_batch]
        if begun:
            self.prefilling.remove(begun[-1])
            self.batch_waiting.appendleft(begun[-1])
            return
        latest = max((entry for entry in self.decoding if entry[2].is_batch), key=lambda e: e[1])
        self.decoding.remove(latest)
        heapq.heapify(self.decoding)
        item = latest[2]
        self.num_batch_decoding -= 1
        self.context -= item.prompt + item.output - (item.end_step - self.step_index)
        self.batch_waiting.appendleft(item)

    def _commit(self, step_s: float, decodes: int, prefill: int, kv: float) -> None:
        self.step_index += 1
        self.steps += 1
        self.busy_s += step_s
        self.decodes += decodes
        self.prefill += prefill
        self.kv += kv
        self.tokens += decodes
        self.context += decodes
        self.batch_tokens += self.num_batch_decoding
        gaps = decodes - self.num_batch_decoding
        if 1e3 * step_s <= self.policy.slo.itl_ms:
            self.good += gaps
        else:
            self.bad += gaps
        while self.decoding and self.decoding[0][0] <= self.step_index:
            item = heapq.heappop(self.decoding)[2]
            self.context -= item.prompt + item.output
            self.num_batch -= item.is_batch
            self.num_batch_decoding -= item.is_batch
            self.finished += 1
        for item in [p for p in self.prefilling if p.left == 0]:
            self.prefilling.remove(item)
            self._first_token(item)

    def _first_token(self, item: Item) -> None:
        self.order += 1
        self.prompts += item.prompt
        self.tokens += 1
        self.context += item.prompt
        item.end_step = self.step_index + item.output
        heapq.heappush(self.decoding, (item.end_step, self.order, item))
        self.num_batch_decoding += item.is_batch
        if not item.is_batch:
            met = 1e3 * (self.now_s - item.arrival_s) <= self.policy.slo.ttft_ms
            self.first_good += met
            self.first_bad += not met

    def sample(self) -> EngineSample:
        slo = self.policy.slo
        return EngineSample(
            step_seconds=self.busy_s,
            num_steps=self.steps,
            step_decode_seqs=self.decodes,
            step_prefill_tokens=self.prefill,
            step_kv_tokens=self.kv,
            num_running=float(self.num_running),
            num_waiting=float(len(self.waiting) + len(self.batch_waiting)),
            kv_usage=min(1.0, self.context / self.capacity.kv_tokens),
            prompt_tokens=self.prompts,
            generation_tokens=self.tokens,
            num_preemptions=0.0,
            num_finished=self.finished,
            classes=(
                ClassSample(
                    RequestClass.INTERACTIVE,
                    num_running=float(self.num_running - self.num_batch),
                    num_waiting=float(len(self.waiting)),
                ),
                ClassSample(
                    RequestClass.BATCH,
                    num_running=float(self.num_batch),
                    num_waiting=float(len(self.batch_waiting)),
                ),
            ),
            slo_counts=(
                SloCount("itl", slo.itl_ms, "interactive", self.good, self.bad),
                SloCount("ttft", slo.ttft_ms, "interactive", self.first_good, self.first_bad),
            ),
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
            assert isinstance(action, SetPolicy)
            engine.policy = action.policy
        yield Ticked(engine.now_s, made, engine.good - good, engine.bad - bad)
        good, bad = engine.good, engine.bad
