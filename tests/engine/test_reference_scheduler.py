"""With one tenant, one class and nothing to share, plans are those of a plain stall-free scheduler.

The reference is written here from the paper (Sarathi-Serve, OSDI'24) in the fewest lines: decodes
first, then begun prompts, then new ones in the order they came, while blocks and tokens last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from chairlift_bench.fuzz_world import World
from chairlift_engine.config import Capacity
from chairlift_engine.scheduler import StepPlan
from chairlift_protocol.policy import Generation, Policy, SloThresholds

BLOCK, LENGTH = 16, 400


@dataclass(eq=False)
class Job:
    number: int
    num_tokens: int
    num_final: int
    computed: int = 0
    num_blocks: int = 0

    @property
    def rest(self) -> int:
        return self.num_tokens - self.computed


class Reference:
    def __init__(self, num_blocks: int, batch_size: int, step_tokens: int) -> None:
        self.free, self.batch_size, self.step_tokens = num_blocks, batch_size, step_tokens
        self.waiting: list[Job] = []
        self.running: list[Job] = []

    def step(self) -> list[tuple[int, int]]:
        """Who computes how many tokens."""
        decodes = [job for job in self.running if job.computed and job.rest == 1]
        for job in decodes:
            self.take(job, job.num_tokens)
        budget = self.step_tokens - len(decodes)
        plan = [(job, 1) for job in decodes]
        jobs = [job for job in self.running if job not in decodes] + self.waiting
        for job in jobs:
            size = self.chunk(job, budget)
            if size <= 0:
                break
            if job in self.waiting and not self.admit(job):
                break
            plan.append((job, size))
            budget -= size
        for job, size in plan:
            job.computed += size
            job.num_tokens += job.rest == 0
            if job.num_tokens == job.num_final:
                self.running.remove(job)
                self.free += job.num_blocks
        return [(job.number, size) for job, size in plan]

    def chunk(self, job: Job, budget: int) -> int:
        size = min(job.rest, budget)
        return size if size == job.rest else size // BLOCK * BLOCK

    def admit(self, job: Job) -> bool:
        wanted = -(-(job.num_tokens + 1) // BLOCK) + len(self.running)
        if len(self.running) == self.batch_size or wanted > self.free:
            return False
        self.waiting.remove(job)
        self.running.append(job)
        self.take(job, job.num_tokens)
        return True

    def take(self, job: Job, num_tokens: int) -> None:
        missing = -(-num_tokens // BLOCK) - job.num_blocks
        job.num_blocks += missing
        self.free -= missing


arrival = st.tuples(st.integers(1, 48), st.integers(1, 30))  # each fits a step


@given(
    st.lists(st.one_of(arrival, st.just(None), st.just(None)), min_size=1, max_size=60),
    st.integers(1, 8),
    st.integers(64, 128),
)
def test_plans_are_those_of_a_plain_stall_free_scheduler(
    events: Sequence[tuple[int, int] | None], batch_size: int, step_tokens: int
) -> None:
    num_blocks = 200  # memory for all: how it is shared out when short is another matter
    capacity = Capacity(8, 128, num_blocks, BLOCK, LENGTH)
    slo = SloThresholds(1000, 1e9)
    policy = Policy(Generation(0, 0), batch_size, step_tokens, step_tokens, 1.0, slo)
    world, reference = World(capacity, policy), Reference(num_blocks, batch_size, step_tokens)
    number = 0
    for event in (*events, *[None] * 400):
        if event is not None:
            number += 1
            prompt, output = event
            # Unlike any other, and without the stop token in its answer.
            world.add([10_000 + number] * prompt, output)
            reference.waiting.append(Job(number, prompt, prompt + output))
        else:
            assert _sizes(world.step()) == sorted(reference.step())
        if event is None and not world.num_alive and not reference.running:
            break
    assert not world.num_alive


def _sizes(plan: StepPlan) -> list[tuple[int, int]]:
    return sorted((int(c.request.id[1:]), c.num_tokens) for c in plan.chunks)
