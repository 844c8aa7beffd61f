"""Bursts of interactive work with nothing between, and batch work that never ends beside it: what
that costs first tokens, and what it makes of the gaps. One replica, so that no other can help."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

from chairlift_engine.simulator_profile import Profile
from chairlift_operator.policy_plan import first_policy
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import parse_pool
from chairlift_operator.step_time import StepCosts
from chairlift_protocol.policy import Policy
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.conditions import NO_BACKLOG, Backlog, Conditions, PoolResult
from chairlift_simulation.fleet import Hardware
from chairlift_simulation.laws import ChairliftLaw, Law, NoLaw
from chairlift_simulation.pool_run import PoolRun
from chairlift_simulation.records import of_class
from chairlift_simulation.replica import VirtualRequest
from chairlift_simulation.summary import percentile

GAP_S, BURST_S = 60.0, 30.0
NUM_BURSTS = 3
UNTIL_S = NUM_BURSTS * (GAP_S + BURST_S)
BURST_PER_S = 30.0  # some three quarters of what the replica carries
STEP_S = 0.05  # the objective of gaps: no step is planned to last longer
PROFILE = Profile()
BACKLOG = Backlog([VirtualRequest(0, 400, 100)], num_clients=128, until_s=UNTIL_S)


def _pool() -> InferencePool:
    slo = {"timeToFirstToken": {"threshold": "1s"}, "interTokenLatency": {"threshold": "50ms"}}
    spec: dict[str, Any] = {
        "model": {"name": "tiny", "source": "cache://tiny", "maxLength": 8192},
        "runtime": {"engine": "simulator"},
        "interactive": {"slo": slo, "replicas": {"min": 1, "max": 1}},
        "batch": {"borrowing": {"maxShare": 80}},
    }
    header = {"apiVersion": "chairlift.dev/v1alpha1", "kind": "InferencePool"}
    return parse_pool({**header, "metadata": {"name": "tiny"}, "spec": spec})


POOL = _pool()
COSTS = StepCosts(*(ms / 1e3 for ms in (PROFILE.a_ms, PROFILE.b_ms, PROFILE.c_ms, PROFILE.d_ms)))


def _wide_open(request_class: RequestClass) -> Policy:
    return replace(first_policy(POOL, request_class), batch_size=128, step_tokens=700)


def _bursts() -> list[VirtualRequest]:
    """A gap, then a burst, and so on."""
    draw, requests = random.Random(1), list[VirtualRequest]()
    for number in range(NUM_BURSTS):
        ends_s = (number + 1) * (GAP_S + BURST_S)
        due_s = ends_s - BURST_S
        while (due_s := due_s + draw.expovariate(BURST_PER_S)) < ends_s:
            prompt, output = draw.randint(200, 600), draw.randint(20, 60)
            requests.append(VirtualRequest(due_s, prompt, output))
    return requests


def _run(law: Law, requests: list[VirtualRequest], backlog: Backlog, **more: Any) -> PoolResult:
    conditions = Conditions(Hardware(PROFILE, kv_tokens=65536), seed=1, **more)
    return PoolRun(POOL, law, conditions).run(requests, UNTIL_S, backlog)


@cache
def _beside() -> PoolResult:
    return _run(ChairliftLaw(POOL, COSTS), _bursts(), BACKLOG)


def _ttft_p95_s(result: PoolResult) -> float:
    own = of_class(result.journeys, RequestClass.INTERACTIVE)
    assert len(own) > 2000 and all(journey.error is None for journey in own)
    return percentile(sorted(j.ttft_s for j in own if j.ttft_s is not None), 95)


def _tokens_in_gaps(result: PoolResult) -> list[int]:
    """By gap, but for the first: there the law has yet to see how much there is to do."""
    begins_s = [int(number * (GAP_S + BURST_S)) for number in range(1, NUM_BURSTS)]
    return [sum(result.seconds.tokens[at_s : at_s + int(GAP_S)]) for at_s in begins_s]


def test_first_tokens_of_bursts_come_as_soon_as_without_batch_work() -> None:
    alone = _run(ChairliftLaw(POOL, COSTS), _bursts(), NO_BACKLOG)
    assert _ttft_p95_s(_beside()) <= 1.10 * _ttft_p95_s(alone)


def test_against_a_pool_wide_open_from_the_start_they_wait_less_than_two_steps_more() -> None:
    """For the rest of the step that they come into, and for their own, which carry batch work
    too. A pool without batch work begins its bursts with the small batch size of its gaps."""
    alone = _run(NoLaw(), _bursts(), NO_BACKLOG, first_policy=_wide_open)
    assert _ttft_p95_s(_beside()) <= _ttft_p95_s(alone) + 1.7 * STEP_S


def test_batch_work_fills_the_gaps_between_bursts() -> None:
    """Against a backlog that has the pool for itself."""
    whole = _tokens_in_gaps(_run(ChairliftLaw(POOL, COSTS), [], BACKLOG))
    filled = _tokens_in_gaps(_beside())
    shares = [own / all_of_it for own, all_of_it in zip(filled, whole, strict=True)]
    assert min(shares) >= 0.8, shares
