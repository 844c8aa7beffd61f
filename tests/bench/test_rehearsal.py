"""The lunch rush in virtual time: what the demo claims must hold in its own rehearsal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chairlift_bench import rush_formula
from chairlift_bench.arrivals import read_arrivals, with_lengths_divided
from chairlift_bench.rehearsal import Backlog, Rehearsal, static_policy
from chairlift_bench.rush_load import Candidate, RushLoad, best_static, good_share, rush_load
from chairlift_bench.rush_run import RunKind, settings_of
from chairlift_cli.pool_file import read_pool
from chairlift_operator.spec import InferencePool
from chairlift_operator.step_time import StepCosts
from chairlift_simulation.arrival_traces import Arrival

POOL_FILE = Path(__file__).parents[2] / "examples" / "lunch-rush.yaml"
LAPTOP = StepCosts(60e-3, 1.8e-3, 2e-3, 0.0)
BACKLOG = [Candidate(Arrival(0.0, 45, 128), "")] * 8


@pytest.fixture(scope="module")
def load() -> RushLoad:
    trace = with_lengths_divided(read_arrivals(), 4096)[:400]
    candidates = [Candidate(replace(a, prompt_tokens=max(41, a.prompt_tokens)), "") for a in trace]
    return rush_load(LAPTOP, candidates, BACKLOG, rush_formula.phases())


@pytest.fixture(scope="module")
def pool(load: RushLoad) -> InferencePool:
    return read_pool(POOL_FILE, settings_of(RunKind.TUNED, load.slo, 8))


def test_tuned_beats_fixed_and_static_in_the_rehearsed_rush(
    load: RushLoad, pool: InferencePool
) -> None:
    backlog = load.rehearsed_backlog()
    tuned = Rehearsal(LAPTOP, pool).run(load.arrivals, backlog)
    fixed = Rehearsal(LAPTOP, pool, enforced=False).run(load.arrivals, backlog)
    share = good_share(tuned.interactive, load.slo)
    assert share >= 0.85
    assert share >= 1.3 * good_share(fixed.interactive, load.slo)
    assert any(d.after < d.before for d in tuned.decisions)
    in_rush = [d for d in tuned.decisions if d.at_s > load.phases[0].ends_s]
    assert any(d.after > d.before for d in in_rush)


def test_the_rush_lies_above_what_static_batching_can_do_and_below_the_capacity(
    load: RushLoad, pool: InferencePool
) -> None:
    static = best_static(LAPTOP, pool, load)
    rush = load.requests_per_s(load.phases[1])
    capacity = rush_formula.requests_per_s(LAPTOP, load.slo, load.arrivals)
    assert 1.3 * static.requests_per_s < rush < capacity
    assert static.rehearsed[static.batch_size] >= max(static.rehearsed.values()) - 0.02


def test_a_rehearsal_repeats_and_ends_every_request(load: RushLoad, pool: InferencePool) -> None:
    arrivals, backlog = load.arrivals[:8], Backlog(load.backlog_arrivals, 2, 10.0)
    runs = [Rehearsal(LAPTOP, pool).run(arrivals, backlog) for _ in range(2)]
    assert runs[0] == runs[1]
    assert [o.output_tokens for o in runs[0].interactive] == [a.output_tokens for a in arrivals]
    assert len(runs[0].batch) >= 2 and all(o.error is None for o in runs[0].batch)


def test_one_request_alone_takes_what_the_step_costs_say(pool: InferencePool) -> None:
    (outcome,) = (
        Rehearsal(LAPTOP, pool, enforced=False, noise=0.0).run([Arrival(0.0, 100, 10)]).interactive
    )
    assert outcome.ttft_s == pytest.approx(60e-3 + 100 * 2e-3, rel=0.01)
    assert outcome.gaps_s == pytest.approx([61.8e-3] * 9)


def test_static_batching_pads_to_the_longest_of_the_batch(pool: InferencePool) -> None:
    arrivals = [Arrival(0.0, 50, 4), Arrival(0.0, 100, 20), Arrival(0.0, 10, 4)]
    rehearsal = Rehearsal(LAPTOP, pool, static_policy(pool, 2), enforced=False, noise=0.0)
    outcomes = rehearsal.run(arrivals).interactive
    assert outcomes[0].ttft_s == pytest.approx(60e-3 + 200 * 2e-3, rel=0.01)
    # The third request begins once the second, not the first, has ended.
    assert outcomes[2].ttft_s is not None
    assert outcomes[2].ttft_s > outcomes[1].elapsed_s > 5 * outcomes[0].gaps_s[0]
