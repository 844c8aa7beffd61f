"""The rush is the same on every machine, relative to its speed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chairlift_bench import rush_formula
from chairlift_bench.arrivals import read_arrivals, with_lengths_divided
from chairlift_bench.outcomes import Slo
from chairlift_operator.law import MARGIN
from chairlift_operator.step_time import StepCosts
from chairlift_simulation.arrival_traces import Arrival

MACHINES = {
    "slow laptop": StepCosts(110e-3, 4e-3, 4e-3, 0.0),
    "laptop": StepCosts(60e-3, 1.3e-3, 2.7e-3, 0.0),
    "server": StepCosts(19e-3, 0.75e-3, 0.75e-3, 0.0),
}
TRACE = with_lengths_divided(read_arrivals(), 4096)
PROMPT_TOKENS = [a.prompt_tokens for a in TRACE]


@pytest.fixture(params=MACHINES)
def costs(request: pytest.FixtureRequest) -> StepCosts:
    return MACHINES[request.param]


def slo_of(costs: StepCosts) -> Slo:
    return rush_formula.objectives(costs, PROMPT_TOKENS)


def test_the_gap_objective_leaves_the_margin_above_sixteen_decodes_and_a_piece_of_prompt(
    costs: StepCosts,
) -> None:
    slo = slo_of(costs)
    assert MARGIN * slo.gap_s == pytest.approx(costs.step_s(16, 64, 0.0), abs=1e-3)
    assert slo.ttft_s == pytest.approx(2.5 * 511 / 64 * costs.step_s(16, 64, 0.0), rel=0.02)


def test_a_step_of_the_fixed_run_misses_the_gap_objective_and_a_stream_alone_meets_it(
    costs: StepCosts,
) -> None:
    slo = slo_of(costs)
    assert costs.step_s(16, 256 - 16, 0.0) > slo.gap_s > costs.step_s(1, 0, 0.0)


def test_each_phase_offers_its_share_of_the_capacity_as_work(costs: StepCosts) -> None:
    slo, when = slo_of(costs), rush_formula.phases()
    offered = rush_formula.timetable(TRACE, costs, slo, when)
    capacity = rush_formula.capacity(costs, slo)
    for phase in when:
        inside = [i for i, at_s in offered if phase.starts_s <= at_s < phase.ends_s]
        work_s = sum(rush_formula.work_s(costs, TRACE[i]) for i in inside)
        largest_s = max(rush_formula.work_s(costs, TRACE[i]) for i in inside)
        wanted_s = phase.share * capacity * phase.duration_s
        assert wanted_s <= work_s < wanted_s + largest_s
    assert [i for i, _ in offered] == list(range(len(offered)))
    times_s = [at_s for _, at_s in offered]
    assert times_s == sorted(times_s) and times_s[0] == 0 and times_s[-1] < when[-1].ends_s


def test_faster_hardware_of_the_same_shape_gets_proportionally_more(costs: StepCosts) -> None:
    twice = StepCosts(costs.fixed_s / 2, costs.decode_s / 2, costs.prefill_s / 2, 0.0)
    rates = [rush_formula.requests_per_s(c, slo_of(c), TRACE[:500]) for c in (costs, twice)]
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.01)


def test_a_trace_that_is_too_short_says_so() -> None:
    costs = MACHINES["server"]
    with pytest.raises(ValueError, match="too few for a machine this fast: shorten the phases"):
        rush_formula.timetable(TRACE[:20], costs, slo_of(costs), rush_formula.phases())


def test_work_counts_context_where_it_costs() -> None:
    costs = StepCosts(1e-2, 1e-3, 1e-3, 1e-6)
    arrival = Arrival(0.0, 100, 50)
    assert rush_formula.work_s(costs, arrival) == pytest.approx(0.1 + 50 * (1e-3 + 125e-6))
    free = replace(costs, kv_s=0.0)
    assert rush_formula.work_s(free, arrival) == pytest.approx(0.15)
