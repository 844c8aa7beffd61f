"""Hardware that turns slow under load, and recovers: which knob moves when, and how far.

The pool, the load and the step times are those of the end-to-end ride (`e2e/tests/test_ride.py`),
and so are the promises; the step-time model learns cold.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from chairlift_engine.simulator_profile import Fault, FaultKind, Profile
from chairlift_operator.decisions import Decision
from chairlift_operator.spec_parsing import parse_pool
from chairlift_simulation.conditions import Conditions, PoolResult
from chairlift_simulation.fleet import Hardware
from chairlift_simulation.laws import ChairliftLaw
from chairlift_simulation.pool_run import PoolRun
from chairlift_simulation.replica import VirtualRequest

COSTS = Profile(a_ms=20.0, b_ms=2.0, c_ms=0.3, d_ms=0.0)
FACTOR = 2.5
REQUESTS_PER_S = 3.0
# The chat template's tokens beside 200 characters, which a simulated engine reads as bytes.
PROMPT_TOKENS, OUTPUT_TOKENS = 220, 64
RECOVERS_AFTER_S = 80.0
ENDS_S = 260.0
# A full batch of the first policy and a block of prefill take longer than the objective once slow;
# 13 decodes and a block fill the 0.85 of it that the law aims at.
FITTING_BATCH = 13
POOL = """
apiVersion: chairlift.dev/v1alpha1
kind: InferencePool
metadata: {name: ride}
spec:
  model: {name: tiny, source: cache://tiny, maxLength: 4096}
  runtime: {engine: simulator}
  interactive:
    slo:
      timeToFirstToken: {threshold: 5s}
      interTokenLatency: {threshold: 150ms}
    batchSize: {min: 1, max: 64}
    stepTokens: {min: 32, max: 2048}
  mode: Enforce
"""


def load(seed: int) -> list[VirtualRequest]:
    draw, requests, due_s = random.Random(seed), [], 5.0
    while (due_s := due_s + draw.expovariate(REQUESTS_PER_S)) < ENDS_S:
        requests.append(VirtualRequest(due_s, PROMPT_TOKENS, OUTPUT_TOKENS))
    return requests


def ride(seed: int, slow_s: float) -> PoolResult:
    faults = (
        Fault(FaultKind.SLOW, at_s=slow_s, factor=FACTOR),
        Fault(FaultKind.SLOW, at_s=slow_s + RECOVERS_AFTER_S, factor=1 / FACTOR),
    )
    pool = parse_pool(POOL)
    hardware = Hardware(replace(COSTS, faults=faults), kv_tokens=65536)
    conditions = Conditions(hardware, seed=seed)
    return PoolRun(pool, ChairliftLaw(pool), conditions).run(load(seed), ENDS_S)


def moves(
    result: PoolResult, field: str, since_s: float, is_it: Callable[[float, float], bool]
) -> list[Decision]:
    return [
        d
        for d in result.decisions
        if d.field == field and d.at_s >= since_s and is_it(d.before, d.after)
    ]


def falls(before: float, after: float) -> bool:
    return after < before


def rises(before: float, after: float) -> bool:
    return after > before


def share_late(result: PoolResult, from_s: float, until_s: float) -> float:
    seconds = slice(int(from_s), int(until_s))
    return sum(result.seconds.late_gaps[seconds]) / max(1, sum(result.seconds.gaps[seconds]))


@pytest.mark.parametrize("slow_s", [25.0, 60.0, 120.0])
@pytest.mark.parametrize("seed", range(4))
def test_slow_hardware_lowers_step_tokens_then_batch_size_as_far_as_needed_and_back(
    seed: int, slow_s: float
) -> None:
    result, recovers_s = ride(seed, slow_s), slow_s + RECOVERS_AFTER_S
    step = moves(result, "stepTokens", slow_s, falls)[0]
    batch = moves(result, "batchSize", slow_s, falls)[0]
    assert result.decisions.index(step) < result.decisions.index(batch)
    assert batch.at_s <= slow_s + 45.0
    assert "gaps over" in step.reason or "a step against" in step.reason
    assert "decodes and a block of prefill fill" in batch.reason
    settled = [tick for tick in result.ticks if recovers_s - 30.0 <= tick.at_s <= recovers_s]
    sizes = [replica.batch_size for tick in settled for replica in tick.replicas]
    assert min(sizes) >= 0.6 * FITTING_BATCH and max(sizes) <= 1.2 * FITTING_BATCH
    assert share_late(result, recovers_s - 40.0, recovers_s) <= 0.05
    assert moves(result, "stepTokens", recovers_s, rises)[0].at_s <= recovers_s + 45.0
    assert moves(result, "batchSize", recovers_s, rises)[0].at_s <= recovers_s + 60.0
    assert share_late(result, recovers_s + 20.0, ENDS_S) <= 0.05
