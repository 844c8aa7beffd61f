"""Brakes of an HPA, and the count rules that look at latency."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from chairlift_bench.evaluate_planners import BAND_BRAKES, Band, Dynamo
from chairlift_bench.evaluate_scalers import Brakes, Scaled, Seen
from chairlift_bench.evaluate_scenarios import all_scenarios, build, costs_of, lengths_carried_per_s
from chairlift_engine.simulator_profile import Profile
from chairlift_operator.decisions import SetReplicas
from chairlift_operator.exposition import ClassSample, EngineSample, GatewayClassSample
from chairlift_operator.replica_law import Lengths
from chairlift_operator.snapshot import GatewaySnapshot, Phase, ReplicaSnapshot, Snapshot
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.laws import NoLaw

COSTS = costs_of(Profile())
SLO = build(all_scenarios(0.5)["S2@0.8"], "reference", 1).pool.spec.interactive.slo
LENGTHS = Lengths(1000.0, 200.0)
CARRIED_PER_S = lengths_carried_per_s(COSTS, LENGTHS)


def minutes(
    supply: int,
    ready: int,
    *,
    rate: float = 1.0,
    running: float = 1.0,
    queue: float = 0.0,
    step_s: float = 0.01,
    wait_s: float = 0.0,
) -> list[Seen]:
    """Five of them, the same all the time. rate: of requests, in what one replica carries."""

    def sample(at_s: float) -> EngineSample:
        num = at_s * rate * CARRIED_PER_S / ready
        return EngineSample(
            step_seconds=20 * at_s * step_s, num_steps=20 * at_s,
            num_running=running, num_waiting=queue, num_finished=num,
            prompt_tokens=num * LENGTHS.prompt_tokens,
            generation_tokens=num * LENGTHS.output_tokens,
            classes=(ClassSample(
                RequestClass.INTERACTIVE, first_tokens=num, oldest_waiting_s=wait_s),),
        )  # fmt: skip

    return [
        Seen(at_s, {f"interactive-{i}": sample(at_s) for i in range(ready)}, supply,
             num_received=at_s * rate * CARRIED_PER_S)
        for at_s in range(0, 301, 15)
    ]  # fmt: skip


@pytest.mark.parametrize("rate, floor", [(0.9, 1), (1.1, 2), (3.5, 4)])
def test_dynamos_floor_is_arrivals_over_what_a_replica_carries(rate: float, floor: int) -> None:
    assert Dynamo(COSTS, SLO).wanted(minutes(1, 1, rate=rate)) == floor


def test_dynamos_floor_follows_the_arrivals_of_its_own_interval_only() -> None:
    calm, rush = minutes(1, 1, rate=0.5), minutes(1, 1, rate=4.0)
    risen = [*calm[:-5], *(
        Seen(s.at_s, s.serving, s.supply,
             num_received=calm[-5].num_received + s.num_received - rush[-5].num_received)
        for s in rush[-5:]
    )]  # fmt: skip
    short, long = (Dynamo(COSTS, SLO, interval_s).wanted(risen) for interval_s in (60, 300))
    assert short == 4 > long > 1


def test_dynamo_adds_one_when_all_are_late_and_takes_one_when_the_rest_has_enough() -> None:
    rule = Dynamo(COSTS, SLO)
    assert rule.wanted(minutes(2, 2, running=20.0)) == 1
    assert rule.wanted(minutes(2, 2, running=60.0)) == 2  # the other would be too full
    assert rule.wanted(minutes(2, 2, running=60.0, queue=60.0)) == 3
    assert rule.wanted(minutes(3, 2, running=60.0, queue=60.0)) == 3  # one still starts
    assert rule.wanted(minutes(2, 2, rate=1.5, running=5.0)) == 2  # not below its floor


def test_dynamo_holds_while_it_knows_no_lengths() -> None:
    assert Dynamo(COSTS, SLO).wanted(minutes(3, 3)[:1]) == 3


@pytest.mark.parametrize(
    "supply, ready, step_ms, wait_s, wanted",
    [
        (4, 4, 24.0, 0.0, 4),  # 0.48: in the band
        (4, 4, 34.0, 0.0, 5),  # 0.68: a quarter too much
        (4, 4, 10.0, 1.5, 6),  # first tokens at 0.75
        (4, 4, 10.0, 40.0, 15),  # no more than twice the objective counts
        (4, 2, 34.0, 0.0, 4),  # two that start cover it
        (4, 3, 50.0, 0.0, 6),
        (4, 4, 10.0, 0.0, 2),  # 0.20: half of them would do
    ],
)
def test_the_band_keeps_saturation_between_its_bounds(
    supply: int, ready: int, step_ms: float, wait_s: float, wanted: int
) -> None:
    seen = minutes(supply, ready, step_s=step_ms / 1e3, wait_s=wait_s)
    assert Band(SLO).wanted(seen) == wanted


def test_saturation_is_the_mean_of_three_readings() -> None:
    calm, late = minutes(2, 2), minutes(2, 2, wait_s=2.4)
    assert Band(SLO).wanted([*calm[:-1], late[-1]]) == 2  # (1.2 + 2 * 0.2) / 3 = 0.53
    assert Band(SLO).wanted([*calm[:-2], *late[-2:]]) == 4


def braked(brakes: Brakes, supplies: list[int], asked: list[int]) -> int:
    times_s = [15.0 * i for i in range(len(asked))]
    seen = [Seen(at_s, {}, supply) for at_s, supply in zip(times_s, supplies, strict=True)]
    return brakes.count(seen, list(zip(times_s, asked, strict=True)))


def test_an_hpa_shrinks_to_the_most_of_its_window_and_at_most_doubles() -> None:
    assert braked(Brakes(), [4, 4, 4], [4, 3, 2]) == 4
    assert braked(Brakes(), [4] * 30, [4] + [2] * 29) == 2
    assert braked(Brakes(), [1], [9]) == 5
    assert braked(Brakes(), [5], [30]) == 10


def test_the_bands_hpa_waits_before_it_grows_and_lets_one_go_at_a_time() -> None:
    assert braked(BAND_BRAKES, [1, 1, 1], [1, 3, 3]) == 1
    assert braked(BAND_BRAKES, [1, 1, 1], [2, 4, 3]) == 2
    assert braked(BAND_BRAKES, [4] * 30, [1] * 30) == 3
    assert braked(BAND_BRAKES, [4] * 27 + [3] * 3, [1] * 30) == 3
    assert braked(BAND_BRAKES, [1, 1, 5], [5, 5, 9]) == 5  # it grew by four a moment ago


def test_a_count_rule_is_asked_at_each_sync_and_told_of_five_minutes() -> None:
    asked: list[Sequence[Seen]] = []

    class Rule:
        def wanted(self, seen: Sequence[Seen]) -> int:
            asked.append(seen)
            return 3

    pool = build(all_scenarios(0.5)["S4"], "reference", 1).pool
    law = Scaled(pool, NoLaw(), Rule(), brakes=None)
    state = law.start()
    ready = ReplicaSnapshot("interactive-0", True, sample=EngineSample(num_waiting=7.0))
    starting = ReplicaSnapshot("interactive-1", False, phase=Phase.STARTING)
    for at_s in range(0, 400, 5):
        classes = (GatewayClassSample(RequestClass.INTERACTIVE, float(at_s), 2.0),)
        snapshot = Snapshot("pool", at_s, (ready, starting), GatewaySnapshot(classes))
        ruled, state = law.rule(snapshot, state)
        assert [a.count for a in ruled.actions if isinstance(a, SetReplicas)] == (
            [] if at_s % 15 else [3]
        )
    assert [s.at_s for s in asked[-1]] == list(range(105, 391, 15))
    now = asked[-1][-1]
    assert (now.supply, now.num_ready, now.num_held, now.num_received) == (2, 1, 2.0, 390.0)
    assert now.serving["interactive-0"].num_waiting == 7.0
