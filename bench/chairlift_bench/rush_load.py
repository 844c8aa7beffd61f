"""The lunch rush as requests: prompts with their exact lengths, objectives, times, backlog.

Joins trace, prompts and formula for a calibrated machine. The same for every run of a rush. `rush`
and `bench_demo` call it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import aiohttp

from chairlift_bench import rush_formula
from chairlift_bench.load import PlannedRequest
from chairlift_bench.outcomes import Outcome, Slo, percentile
from chairlift_bench.prompts import PromptBook
from chairlift_bench.rehearsal import NO_BACKLOG, Backlog, Rehearsal, static_policy
from chairlift_bench.rush_formula import Phase
from chairlift_operator.spec import InferencePool
from chairlift_operator.step_time import StepCosts
from chairlift_protocol.wire import TOKENIZE_PATH
from chairlift_simulation.arrival_traces import Arrival

BACKLOG_CLIENTS: Final = 12
BACKLOG_ANSWER_TOKENS: Final = 64
NUM_BACKLOG_PROMPTS: Final = 64
# Other prompts than the interactive ones, and others again for calibration.
BACKLOG_FIRST_SEED: Final = 1_000_000
CALIBRATION_FIRST_SEED: Final = 2_000_000
TOKENIZE_AT_ONCE: Final = 4
DRAIN_S: Final = 180.0
# Shares of good requests that differ by less say nothing about which batch size is better.
ALIKE: Final = 0.02


@dataclass(frozen=True, slots=True)
class Candidate:
    """One request of the trace with words; its prompt tokens are exact, template included."""

    arrival: Arrival
    prompt: str

    def planned(self) -> PlannedRequest:
        arrival = self.arrival
        return PlannedRequest(
            arrival.arrival_s, self.prompt, arrival.output_tokens, exact_length=True
        )


@dataclass(frozen=True, slots=True)
class RushLoad:
    """arrivals[i] is what requests[i] is in numbers."""

    phases: tuple[Phase, ...]
    slo: Slo
    arrivals: tuple[Arrival, ...]
    requests: tuple[PlannedRequest, ...]
    backlog: tuple[PlannedRequest, ...]
    backlog_arrivals: tuple[Arrival, ...]

    @property
    def duration_s(self) -> float:
        return self.phases[-1].ends_s

    def rehearsed_backlog(self) -> Backlog:
        return Backlog(self.backlog_arrivals, BACKLOG_CLIENTS, self.duration_s)

    def requests_per_s(self, phase: Phase) -> float:
        num = sum(phase.starts_s <= a.arrival_s < phase.ends_s for a in self.arrivals)
        return num / phase.duration_s


def prompted(
    arrivals: Sequence[Arrival], book: PromptBook, chars_per_token: float, first_seed: int = 0
) -> list[tuple[Arrival, str]]:
    return [
        (arrival, book.prompt(arrival.prompt_tokens, first_seed + number, chars_per_token))
        for number, arrival in enumerate(arrivals)
    ]


async def counted(base_url: str, pairs: Sequence[tuple[Arrival, str]]) -> list[Candidate]:
    """With the prompt tokens that the served model's tokenizer and chat template make of them."""
    few = asyncio.Semaphore(TOKENIZE_AT_ONCE)

    async def count(client: aiohttp.ClientSession, arrival: Arrival, prompt: str) -> Candidate:
        body = {"messages": [{"role": "user", "content": prompt}]}
        async with few, client.post(base_url + TOKENIZE_PATH, json=body) as response:
            num_tokens = int((await response.json())["count"])
        return Candidate(replace(arrival, prompt_tokens=num_tokens), prompt)

    async with aiohttp.ClientSession(raise_for_status=True) as client:
        return await asyncio.gather(*(count(client, *pair) for pair in pairs))


def backlog_prompts(book: PromptBook) -> list[tuple[Arrival, str]]:
    """Short questions, long answers."""
    asked = [Arrival(0.0, 1, BACKLOG_ANSWER_TOKENS)] * NUM_BACKLOG_PROMPTS
    return prompted(asked, book, 1.0, BACKLOG_FIRST_SEED)


def rush_load(
    costs: StepCosts,
    candidates: Sequence[Candidate],
    backlog: Sequence[Candidate],
    phases: tuple[Phase, ...],
) -> RushLoad:
    slo = rush_formula.objectives(costs, (c.arrival.prompt_tokens for c in candidates))
    offered = [
        replace(candidates[index], arrival=replace(candidates[index].arrival, arrival_s=at_s))
        for index, at_s in rush_formula.timetable(
            [c.arrival for c in candidates], costs, slo, phases
        )
    ]
    return RushLoad(
        phases=phases,
        slo=slo,
        arrivals=tuple(c.arrival for c in offered),
        requests=tuple(c.planned() for c in offered),
        backlog=tuple(c.planned() for c in backlog),
        backlog_arrivals=tuple(c.arrival for c in backlog),
    )


@dataclass(frozen=True, slots=True)
class StaticChoice:
    """rehearsed: share of good requests by static batch size, in virtual time.

    without_backlog: what the chosen one would do with no batch work beside it.
    requests_per_s: what static batching finishes at the most, at whatever batch size, while it is
        never short of interactive requests.
    """

    batch_size: int
    rehearsed: dict[int, float]
    without_backlog: float
    requests_per_s: float


def best_static(costs: StepCosts, pool: InferencePool, load: RushLoad) -> StaticChoice:
    """The batch size that serves most requests well; of much alike ones, the shortest p95 TTFT."""
    sizes = [
        n for n in rush_formula.STATIC_BATCH_SIZES if n <= pool.spec.interactive.batch_size.max
    ]
    backlog = load.rehearsed_backlog()
    runs = {size: _rehearse_static(costs, pool, size, load.arrivals, backlog) for size in sizes}
    shares = {size: good_share(outcomes, load.slo) for size, outcomes in runs.items()}
    alike = [size for size in sizes if shares[size] >= max(shares.values()) - ALIKE]
    best = min(alike, key=lambda size: _ttft_p95_s(runs[size]))
    at_once = [replace(a, arrival_s=0.0) for a in load.arrivals]
    saturated = [_rehearse_static(costs, pool, size, at_once, NO_BACKLOG) for size in sizes]
    alone = _rehearse_static(costs, pool, best, load.arrivals, NO_BACKLOG)
    return StaticChoice(
        batch_size=best,
        rehearsed=shares,
        without_backlog=good_share(alone, load.slo),
        requests_per_s=max(len(ran) / max(o.elapsed_s for o in ran) for ran in saturated),
    )


def good_share(outcomes: Sequence[Outcome], slo: Slo) -> float:
    return sum(o.is_good(slo) for o in outcomes) / len(outcomes)


def _rehearse_static(
    costs: StepCosts,
    pool: InferencePool,
    batch_size: int,
    arrivals: Sequence[Arrival],
    backlog: Backlog,
) -> tuple[Outcome, ...]:
    rehearsal = Rehearsal(costs, pool, static_policy(pool, batch_size), enforced=False)
    return rehearsal.run(arrivals, backlog).interactive


def _ttft_p95_s(outcomes: Sequence[Outcome]) -> float:
    return percentile((o.ttft_s for o in outcomes if o.ttft_s is not None), 95)
