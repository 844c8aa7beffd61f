"""The evaluation's scenarios: a pool, its load and what goes wrong, by name, hardware and seed.

Rates are multiples of what one replica carries within the objectives by the true costs of its
hardware, so that a scenario means the same on fast and slow hardware. The load of a seed is the
same for every law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from chairlift_bench.evaluate_faults import DURATION_S, Distortion, FaultKind
from chairlift_engine.simulator_profile import Fault, Profile
from chairlift_engine.simulator_profile import FaultKind as EngineFault
from chairlift_operator import law
from chairlift_operator.replica_law import Lengths
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import parse_pool, with_overrides
from chairlift_operator.step_time import StepCosts
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.arrival_traces import (
    Arrival,
    Stretch,
    at_rates,
    read_trace,
    rotated,
)
from chairlift_simulation.conditions import NO_BACKLOG, Backlog, Conditions
from chairlift_simulation.fleet import Hardware
from chairlift_simulation.offered import offered
from chairlift_simulation.replica import VirtualRequest

PROFILES: Final = ("reference", "fast", "slow")
KV_TOKENS: Final = 262_144
NUM_BATCH_CLIENTS: Final = 40
_POOL: Final = """
apiVersion: chairlift.dev/v1alpha1
kind: InferencePool
metadata: {name: evaluated}
spec:
  model: {name: simulated, source: cache://simulated, maxLength: 131072}
  runtime: {engine: simulator}
  interactive:
    slo:
      timeToFirstToken: {threshold: 2s, objective: 95}
      interTokenLatency: {threshold: 50ms, objective: 95}
    replicas: {min: 1, max: 1}
    batchSize: {min: 1, max: 256}
    stepTokens: {min: 64, max: 4096}
  mode: Enforce
"""


@dataclass(frozen=True, slots=True)
class Setup:
    """One run but for its law. judged_from_s: what comes before is start-up and not judged; how
    soon a cold pool settles is S1's question.

    num_turns: how often the load's direction turns, which replicas have to follow.
    fault: what is wrong with metrics in between.
    """

    pool: InferencePool
    requests: tuple[VirtualRequest, ...]
    until_s: float
    conditions: Conditions
    costs: StepCosts
    backlog: Backlog = NO_BACKLOG
    judged_from_s: float = 0.0
    num_turns: int = 0
    fault: Distortion | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """loads: rates in what one replica carries, one after the other."""

    name: str
    title: str
    loads: tuple[Stretch, ...]
    trace: str = "azure-conv"
    max_replicas: int = 1
    warm_up_s: float = 60.0
    change: Callable[[Setup, Scenario], Setup] = lambda setup, scenario: setup
    judged_from_s: float = 0.0


def build(scenario: Scenario, profile: str, seed: int) -> Setup:
    hardware = Profile.parse(profile)
    pool = with_overrides(parse_pool(_POOL), [f"interactive.replicas.max={scenario.max_replicas}"])
    costs = costs_of(hardware)
    arrivals = rotated(_trace(scenario.trace), seed)
    unit = carried_per_s(costs, _used(arrivals, costs, scenario.loads))
    load = at_rates(
        arrivals, [Stretch(s.duration_s, unit * s.requests_per_s) for s in scenario.loads]
    )
    setup = Setup(
        pool,
        offered(load, pool, KV_TOKENS).requests,
        sum(s.duration_s for s in scenario.loads),
        Conditions(Hardware(hardware, KV_TOKENS), warm_up_s=scenario.warm_up_s, seed=seed),
        costs,
        judged_from_s=scenario.judged_from_s,
        num_turns=_num_turns([s.requests_per_s for s in scenario.loads]),
    )
    return scenario.change(setup, scenario)


def costs_of(profile: Profile) -> StepCosts:
    return StepCosts(profile.a_ms / 1e3, profile.b_ms / 1e3, profile.c_ms / 1e3, profile.d_ms / 1e3)


def carried_per_s(costs: StepCosts, arrivals: Sequence[Arrival]) -> float:
    """Requests a second of one replica in the objectives, every prompt token computed."""
    lengths = Lengths(
        sum(a.prompt_tokens for a in arrivals) / len(arrivals),
        sum(a.output_tokens for a in arrivals) / len(arrivals),
    )
    return lengths_carried_per_s(costs, lengths)


def lengths_carried_per_s(costs: StepCosts, lengths: Lengths) -> float:
    """In balance each decode comes with so many prompt tokens as it takes to replace its request:
    as many decodes as steps of the target's length hold, or memory.
    """
    context, per_decode = lengths.context_tokens, lengths.prompt_tokens / lengths.output_tokens
    slo = parse_pool(_POOL).spec.interactive.slo
    target_s = law.MARGIN * slo.inter_token_latency.threshold_s
    decode_s = costs.decode_s + costs.prefill_s * per_decode + costs.kv_s * context
    num_decodes = min(
        256.0,
        (target_s - costs.fixed_s) / decode_s,
        law.batch_size_for_memory(KV_TOKENS, context, context, preempting=False),
    )
    return num_decodes / (lengths.output_tokens * (costs.fixed_s + num_decodes * decode_s))


def _used(
    arrivals: Sequence[Arrival], costs: StepCosts, loads: Sequence[Stretch]
) -> Sequence[Arrival]:
    """About those that the load will consist of: lengths drift in the course of a trace."""
    num_units = sum(s.duration_s * s.requests_per_s for s in loads)
    return arrivals[: max(500, round(num_units * carried_per_s(costs, arrivals)))]


@lru_cache(maxsize=4)
def _trace(name: str) -> tuple[Arrival, ...]:
    return tuple(read_trace(name))


def _num_turns(rates: Sequence[float]) -> int:
    rises = [b > a for a, b in zip(rates, rates[1:], strict=False) if a != b]
    return sum(a != b for a, b in zip(rises, rises[1:], strict=False))


def _with_fault(kind: FaultKind | None) -> Callable[[Setup, Scenario], Setup]:
    """In a pool of two replicas, from the middle on."""

    def change(setup: Setup, scenario: Scenario) -> Setup:
        conditions = replace(setup.conditions, first_replicas=2)
        if kind is None:
            return replace(setup, conditions=conditions)
        fault = Distortion(kind, from_s=120.0)
        return replace(setup, conditions=replace(conditions, distort=fault), fault=fault)

    return change


def _length_shift(setup: Setup, scenario: Scenario) -> Setup:
    """From the middle of what is judged on, prompts and answers of another service, at the rate
    that it allows."""
    shift_s = (setup.judged_from_s + setup.until_s) / 2
    rate = scenario.loads[-1].requests_per_s * carried_per_s(
        setup.costs, _trace("mooncake-conversation")
    )
    later = at_rates(
        rotated(_trace("mooncake-conversation"), setup.conditions.seed),
        [Stretch(setup.until_s - shift_s, rate)],
    )
    later = [replace(a, arrival_s=a.arrival_s + shift_s) for a in later]
    first = tuple(r for r in setup.requests if r.due_s < shift_s)
    return replace(setup, requests=first + offered(later, setup.pool, KV_TOKENS).requests)


def _slower(name: str, factor: float, at_s: float) -> Callable[[Setup, Scenario], Setup]:
    """One replica, or each that there is at the start, becomes slower."""

    def change(setup: Setup, scenario: Scenario) -> Setup:
        hardware = setup.conditions.hardware
        fault = Fault(EngineFault.SLOW, at_s=at_s, factor=factor)
        slow = replace(hardware.profile, faults=(fault,))
        hardware = replace(hardware, odd_ones={name: slow})
        first = scenario.max_replicas
        return replace(
            setup, conditions=replace(setup.conditions, hardware=hardware, first_replicas=first)
        )

    return change


def _restart(at_s: float) -> Callable[[Setup, Scenario], Setup]:
    return lambda setup, scenario: replace(
        setup, conditions=replace(setup.conditions, restarts_s=(at_s,))
    )


def _batch_beside(setup: Setup, scenario: Scenario) -> Setup:
    """A backlog that never ends, on what interactive work leaves."""
    pool = with_overrides(setup.pool, ["batch.borrowing.maxShare=80"])
    trace = at_rates(rotated(_trace("azure-conv"), 7), [Stretch(600.0, 5.0)])
    requests = offered(trace, pool, KV_TOKENS, RequestClass.BATCH).requests
    backlog = Backlog(requests, NUM_BATCH_CLIENTS, from_s=30.0, until_s=setup.until_s)
    return replace(setup, pool=pool, backlog=backlog)


def _noisy_tenant(setup: Setup, scenario: Scenario) -> Setup:
    """In the middle third, of every 11 requests 10 are one tenant's; the rest have their pace."""
    third_s = setup.until_s / 3
    flood = at_rates(
        rotated(_trace("azure-conv"), setup.conditions.seed + 17),
        [Stretch(third_s, 10 * 0.3 * carried_per_s(setup.costs, _trace("azure-conv")))],
    )
    flood = [replace(a, arrival_s=a.arrival_s + third_s) for a in flood]
    noisy = offered(flood, setup.pool, KV_TOKENS, tenant="noisy").requests
    requests = sorted((*setup.requests, *noisy), key=lambda r: r.due_s)
    return replace(setup, requests=tuple(requests))


def _day() -> tuple[Stretch, ...]:
    """24 hours in 24 minutes: a night, a morning's rise, a day with a dip at noon, an evening."""
    hours = (
        *(0.6, 0.5, 0.4, 0.4, 0.4, 0.5, 0.8, 1.4, 2.0, 2.6, 2.8, 2.6),
        *(2.2, 2.5, 2.8, 2.9, 2.7, 2.4, 2.0, 1.6, 1.3, 1.0, 0.8, 0.6),
    )
    return tuple(Stretch(60.0, rate) for rate in hours)


def _steady(rate: float, duration_s: float) -> tuple[Stretch, ...]:
    return (Stretch(duration_s, rate),)


def all_scenarios(minutes: float) -> dict[str, Scenario]:
    """By name. minutes: how long the steady ones last."""
    steady_s = 60 * minutes
    calm = Stretch(180.0, 0.5)
    listed = [
        Scenario("S1", "saturated, from a cold start", _steady(1.3, 160.0), judged_from_s=60.0),
        *(
            Scenario(f"S2@{rate:g}", f"steady at {rate:g} of what a replica carries",
                     (Stretch(90.0, 0.5), Stretch(steady_s, rate)), judged_from_s=90.0)
            for rate in (0.5, 0.8, 1.0, 1.2)
        ),
        Scenario("S3", "code completion: bursts and silence", _steady(0.4, steady_s), "azure-code"),
        Scenario("S4", "a step to four times the load and back",
                 (Stretch(150.0, 0.5), Stretch(270.0, 2.0), Stretch(480.0, 0.5)),
                 max_replicas=8),
        Scenario("S5", "a minute of six times the load",
                 (Stretch(240.0, 0.6), Stretch(60.0, 3.6), Stretch(300.0, 0.6)), max_replicas=8),
        Scenario("S6", "other prompts from the middle on",
                 (Stretch(90.0, 0.35), Stretch(steady_s, 0.7)), judged_from_s=90.0,
                 change=_length_shift),
        Scenario("S7", "one replica of three becomes a quarter slower",
                 (Stretch(90.0, 1.0), Stretch(steady_s, 2.0)), judged_from_s=90.0,
                 max_replicas=3, change=_slower("interactive-0", 1.25, 90.0 + steady_s / 2)),
        *(
            Scenario(f"S8-{kind or 'none'}", f"metrics fail: {kind or 'not at all'}",
                     _steady(1.4, 480.0), max_replicas=4, change=_with_fault(kind))
            for kind in (None, *FaultKind)
        ),
        Scenario("S9", "the controller restarts in a spike",
                 (Stretch(180.0, 0.6), Stretch(120.0, 2.4), Stretch(180.0, 0.6)),
                 max_replicas=6, change=_restart(210.0)),
        Scenario("S10-alone", "interactive work alone", (calm, Stretch(180.0, 0.8), calm)),
        Scenario("S10", "a batch backlog beside it", (calm, Stretch(180.0, 0.8), calm),
                 change=_batch_beside),
        Scenario("S11", "one tenant sends ten times the others", _steady(0.3, steady_s),
                 change=_noisy_tenant),
        Scenario("S12", "a day in 24 minutes", _day(), max_replicas=8),
    ]  # fmt: skip
    return {scenario.name: scenario for scenario in listed}


assert max(DURATION_S.values()) < 360.0  # faults of S8 end before its load does
