"""The evaluation's own arithmetic, its faults and its baselines."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_bench.evaluate import time_left_s
from chairlift_bench.evaluate_claims import (
    HPA_QUEUE,
    Mean,
    claims_of,
    hours_at,
    hours_ratio,
    intervals_of,
    normalised,
)
from chairlift_bench.evaluate_faults import DURATION_S, Distortion, FaultKind
from chairlift_bench.evaluate_figures import Figures, reversals, settle_s
from chairlift_bench.evaluate_laws import Aimd, Fixed, PerReplica
from chairlift_bench.evaluate_report import write_report
from chairlift_bench.evaluate_runs import (
    OURS,
    SIZES,
    Run,
    best_settings,
    carry_out,
    law_of,
    runs_of,
    tuning_runs,
)
from chairlift_bench.evaluate_scalers import HpaKv, HpaQueue, Seen, Wva
from chairlift_bench.evaluate_scenarios import (
    PROFILES,
    all_scenarios,
    build,
    carried_per_s,
    costs_of,
)
from chairlift_engine.simulator_profile import Profile
from chairlift_operator.exposition import EngineSample
from chairlift_operator.memory import Knobs
from chairlift_operator.snapshot import GatewaySnapshot, ReplicaSnapshot, Snapshot
from chairlift_simulation.arrival_traces import Arrival

SOME = [Arrival(float(i), 1000, 200) for i in range(10)]
BLANK = Figures(
    num_requests=100, ttft_share=1, itl_share=1, good_share=1, goodput_per_s=1, tokens_per_s=100,
    late_gap_share=0, ttft_p95_s=1, replica_hours=1, batch_size_reversals_per_h=0,
    step_tokens_reversals_per_h=0, replica_reversals=0, num_turns=0, actions_per_h=0,
    preemptions_per_1k=0, num_unsafe=0, batch_tokens_per_s=0, batch_share_kept=1, settle={},
)  # fmt: skip


@pytest.mark.parametrize(
    "values, expected",
    [
        ([], 0),
        ([100, 100, 100], 0),
        ([100, 150, 200], 0),
        ([100, 150, 100], 1),
        ([100, 105, 100, 95], 0),
        ([100, 150, 148, 100, 160], 2),
    ],
)
def test_a_reversal_is_a_real_move_against_the_one_before(
    values: list[float], expected: int
) -> None:
    assert reversals(values) == expected


def test_settling_is_the_first_half_minute_at_nine_tenths_of_the_wanted_throughput() -> None:
    settle = {"50.000": 3.0, "80.000": 20.0, "95.000": 60.0}
    assert [settle_s(settle, wanted) for wanted in (40, 88, 100, 105)] == [3, 20, 60, 60]
    assert settle_s(settle, 110) == math.inf


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 9)), min_size=1, max_size=6))
def test_hours_for_an_attainment_lie_between_settings_that_were_tried(
    points: list[tuple[float, float]],
) -> None:
    most = max(share for share, _ in points)
    hours = hours_at(points, 0.9 * most)
    assert min(h for _, h in points) <= hours <= max(h for _, h in points)
    assert hours_at(points, most + 0.01) == math.inf


def test_hours_are_interpolated_between_neighbours() -> None:
    assert hours_at([(0.9, 2.0), (1.0, 4.0)], 0.95) == pytest.approx(3.0)


def test_hours_of_several_scenarios_are_those_of_one_setting_for_all_of_them() -> None:
    """A setting that is lucky in one is not compared without what it costs in the other."""
    shares_and_hours = {
        ("S4", OURS): (1.0, 2.0),
        ("S5", OURS): (0.9, 2.0),
        ("S4", "hpa queue 1"): (0.9, 6.0),
        ("S5", "hpa queue 1"): (1.0, 1.0),
        ("S4", "hpa queue 5"): (1.0, 3.0),
    }
    runs = {
        Run(scenario, "reference", law, 1): replace(BLANK, good_share=share, replica_hours=hours)
        for (scenario, law), (share, hours) in shares_and_hours.items()
    }
    assert hours_ratio(runs, ["S4"], HPA_QUEUE) == pytest.approx((2.0 / 3.0, 0.95))
    ratio, share = hours_ratio(runs, ["S4", "S5"], HPA_QUEUE)
    assert (ratio, share) == pytest.approx((4.0 / 7.0, 0.95))
    assert claims_of(runs)["replica_hours_vs_hpa_queue"] == ratio


def test_goodput_is_compared_with_the_best_fixed_setting_of_the_same_seed() -> None:
    runs = {
        Run("S2@1", "reference", law, seed): replace(BLANK, goodput_per_s=goodput)
        for seed, goodputs in ((1, (9, 10, 5)), (2, (4, 2, 8)))
        for law, goodput in zip((OURS, "static 1/64", "static 2/64"), goodputs, strict=True)
    }
    table = normalised(runs)["S2@1", "reference"]
    assert table[OURS] == pytest.approx((0.9 + 0.5) / 2)
    assert claims_of(runs)["goodput_vs_oracle"] == table[OURS]
    assert claims_of(runs)["goodput_vs_best_single_setting"] == pytest.approx(0.7 / 0.75)


def test_baselines_are_tuned_on_a_seed_that_no_other_run_has() -> None:
    runs = tuning_runs()
    best = [run for run in runs if run.law in ("pang 256", "hpa kv 0.4", "wva 2")]
    figures = {
        run: replace(BLANK, goodput_per_s=1 + (run in best), good_share=0.9 + 0.05 * (run in best))
        for run in runs
    }
    assert {run.law for run in best} <= set(best_settings(figures))
    wasteful = replace(BLANK, good_share=1.0, replica_hours=2.0)  # more than is wanted, dearly
    figures[next(run for run in runs if run.law == "wva 10")] = wasteful
    assert "wva 2" in best_settings(figures)
    seeds = {r.seed for size in SIZES.values() for r in runs_of(size, best_settings({}))}
    assert not seeds & {run.seed for run in runs}


def test_a_mean_without_spread_has_no_interval_and_one_with_it_has() -> None:
    assert Mean.of([2.0, 2.0]) == Mean(2.0, 2.0, 2.0)
    spread = Mean.of([1.0, 2.0, 6.0])
    assert spread.low < spread.mean == 3.0 < spread.high


def goodputs(by_seed: dict[int, tuple[float, float]]) -> dict[Run, Figures]:
    """Of our law and of the best fixed setting."""
    return {
        Run("S2@1", "reference", law, seed): replace(BLANK, goodput_per_s=goodput)
        for seed, both in by_seed.items()
        for law, goodput in zip((OURS, "static 1/64"), both, strict=True)
    }


def test_intervals_of_claims_pair_laws_by_seed() -> None:
    alike = intervals_of(goodputs({1: (1, 2), 2: (10, 20), 3: (100, 200)}))
    assert alike["goodput_vs_oracle"] == (0.5, 0.5)
    apart = intervals_of(goodputs({1: (1, 2), 2: (2, 2), 3: (3, 2)}))
    assert apart["goodput_vs_oracle"] == (0.5, 1.5)
    many = intervals_of(goodputs({seed: (seed, 10) for seed in range(1, 21)}))
    low, high = many["goodput_vs_oracle"]
    assert 0.7 < low < 0.9 < 1.2 < high < 1.4
    assert not {"settle_cold_s", "unsafe_actions"} & set(many)  # unknown; not of seeds


def test_one_seed_has_no_interval_and_what_has_one_stays_beside_others() -> None:
    assert intervals_of(goodputs({1: (1, 2)})) == {}
    hours = {OURS: 1.0, "hpa queue 5": 2.0}
    once = {
        Run("S12", "reference", law, 1): replace(BLANK, replica_hours=h) for law, h in hours.items()
    }
    found = intervals_of({**once, **goodputs({1: (1, 2), 2: (2, 2), 3: (3, 2)})})
    assert found["replica_hours_vs_hpa_queue"] == (0.5, 0.5)
    assert found["goodput_vs_oracle"] == (0.5, 1.5)


def test_the_page_tells_an_interval_or_that_there_was_one_seed(tmp_path: Path) -> None:
    for by_seed, cell in (
        ({1: (1.0, 2.0)}, "| `goodput_vs_oracle` | 0.5 | one seed |"),
        ({1: (1.0, 2.0), 2: (2.0, 2.0)}, "| `goodput_vs_oracle` | 0.75 | 0.5 to 1 |"),
    ):
        runs = goodputs(by_seed)
        path = write_report(tmp_path, SIZES["quick"], runs, claims_of(runs), intervals_of(runs))
        assert cell in path.read_text(encoding="utf-8")


def test_the_time_left_is_weighed_by_what_runs_cost() -> None:
    long, short = (Run(name, "reference", OURS, 1) for name in ("S12", "S3"))
    runs = [long, *(replace(short, seed=seed) for seed in range(11))]
    assert time_left_s(50.0, [long], runs) == pytest.approx(50.0 * 11 * short.cost_s / long.cost_s)
    assert time_left_s(50.0, [long], runs) < 50.0  # eleven short ones are no eleven long ones
    assert time_left_s(120.0, runs, runs) == 0.0
    assert all(r.cost_s > 0 for size in SIZES.values() for r in runs_of(size, best_settings({})))


@pytest.mark.parametrize("profile", PROFILES)
def test_what_a_replica_carries_follows_its_hardware(profile: str) -> None:
    own = carried_per_s(costs_of(Profile.parse(profile)), SOME)
    reference = carried_per_s(costs_of(Profile()), SOME)
    assert (own > reference, own < reference) == (profile == "fast", profile == "slow")


def test_every_law_of_every_size_can_be_made() -> None:
    setup = build(all_scenarios(0.5)["S2@0.8"], "reference", 1)
    baselines = best_settings({})
    runs = [run for size in SIZES.values() for run in runs_of(size, baselines)]
    for law in {run.law for run in (*runs, *tuning_runs())}:
        assert law_of(law, setup).start is not None


@pytest.mark.parametrize("name", ["S3", "S5", "S6", "S7", "S8-nan", "S9", "S10", "S11", "S12"])
def test_a_scenario_offers_its_load_in_order_and_in_its_time(name: str) -> None:
    made = build(all_scenarios(0.5)[name], "slow", 2)
    dues_s = [r.due_s for r in made.requests]
    assert dues_s == sorted(dues_s) and 0 <= dues_s[0] and dues_s[-1] <= made.until_s


def test_a_run_repeats_and_survives_being_written_down() -> None:
    run = Run("S2@0.8", "slow", OURS, 3)
    figures = carry_out(run, 0.5)
    assert figures == carry_out(run, 0.5)
    assert Figures.from_json(json.loads(json.dumps(figures.to_json()))) == figures
    late = replace(figures, ttft_p95_s=math.inf)
    assert Figures.from_json(late.to_json()) == late


def seen(at_s: float, num_steps: float = 100.0) -> Snapshot:
    sample = EngineSample(
        step_seconds=1.0, num_steps=num_steps, step_decode_seqs=1.0, step_prefill_tokens=1.0,
        step_kv_tokens=1.0, num_running=2.0, num_waiting=4.0, prompt_tokens=1.0,
        generation_tokens=1.0, num_preemptions=0.0, num_finished=1.0,
    )  # fmt: skip
    replicas = tuple(
        ReplicaSnapshot(f"interactive-{i}", True, sample=sample, sampled_at_s=at_s)
        for i in range(2)
    )
    return Snapshot("pool", at_s, replicas, GatewaySnapshot((), at_s))


@pytest.mark.parametrize("kind", list(FaultKind))
def test_a_fault_begins_ends_and_hides_what_it_says(kind: FaultKind) -> None:
    distort = Distortion(kind, from_s=50.0)
    shown = {at_s: distort(seen(float(at_s), 100.0 + at_s)) for at_s in range(0, 500, 5)}
    ends_s = 50 + DURATION_S[kind]
    assert shown[45] == seen(45.0, 145.0)
    if kind is not FaultKind.RESET:
        assert shown[int(ends_s)] == seen(ends_s, 100.0 + ends_s)
    first, second = shown[60 if kind is not FaultKind.RESET else 50].replicas
    match kind:
        case FaultKind.NAN:
            assert first.sample is not None and first.sample.missing
        case FaultKind.STALE:
            assert (first.sampled_at_s, second.sampled_at_s) == (50.0, 50.0)
        case FaultKind.DELAY:
            assert first.sampled_at_s == 30.0
        case FaultKind.HALF_MISSING:
            assert first.sample is None and second.sample is not None
        case FaultKind.DOWN:
            assert first.sample is None and second.sample is None
            assert shown[60].gateway.failure is not None
        case FaultKind.RESET:
            assert first.sample is not None and first.sample.num_steps == 0.0


def waiting(*queues: float, supply: int = 2, kv: float = 0.1) -> list[Seen]:
    """Of one moment."""
    samples = [EngineSample(num_waiting=queue, kv_usage=kv) for queue in queues]
    return [Seen(0.0, {f"interactive-{i}": s for i, s in enumerate(samples)}, supply)]


def test_autoscalers_follow_their_formulas() -> None:
    assert HpaQueue(5).wanted(waiting(10, 10)) == 4
    assert HpaQueue(5).wanted(waiting(5, 5.4)) == 2
    assert HpaQueue(5).wanted(waiting(0, 0)) == 0
    assert HpaKv(0.8).wanted(waiting(0, 0, kv=0.95)) == 3
    assert Wva().wanted(waiting(9, 9)) == 3
    assert Wva().wanted(waiting(0, 0)) == 1
    assert Wva().wanted(waiting(0)) == 2


def test_a_fixed_law_says_it_once_and_aimd_cuts_when_too_much_is_late() -> None:
    setup = build(all_scenarios(0.5)["S2@0.8"], "reference", 1)
    fixed = PerReplica(setup.pool, Fixed(Knobs(300, 100)))
    ruled, _ = fixed.rule(seen(5.0), fixed.start())
    assert ruled.actions == ()  # nothing is known of the engine's policy
    assert fixed._bounded(Knobs(300, 100)) == Knobs(256, 256)
    aimd = law_of("aimd 4/32/0.9", setup)
    assert isinstance(aimd, PerReplica) and isinstance(aimd.rule_of, Aimd)
