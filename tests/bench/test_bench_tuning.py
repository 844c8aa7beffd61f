"""Tuned against fixed settings on the real engine: which runs, which is best, what is claimed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import pytest

from chairlift_bench import bench_tuning
from chairlift_bench.bench_tuning import (
    DEFAULT,
    GRID,
    NUM_ROUNDS,
    TUNED,
    Measured,
    best_of,
    compare,
    fixed_at,
    name_of,
    num_runs,
    ratios,
)
from chairlift_bench.outcomes import Slo, Summary
from chairlift_bench.prompts import REPOSITORY
from chairlift_bench.rush_figures import RunFigures
from chairlift_bench.rush_run import RunKind, settings_of
from chairlift_cli.pool_file import read_pool
from chairlift_operator.memory import Knobs
from chairlift_operator.policy_plan import first_policy

SUMMARY = Summary(20, 0, 10, 0.5, 2.0, 0.1, 0.2, 0.3, 100.0, 50.0)
FIGURES = RunFigures(RunKind.FIXED, SUMMARY, SUMMARY, 0.5, 0, 0, 0, 0, 0, 60.0)


def measured(knobs: Knobs | None, num_good: int, ttft_p95_s: float = 2.0) -> Measured:
    seen = replace(SUMMARY, num_good=num_good, ttft_p95_s=ttft_p95_s)
    return Measured(name_of(knobs), replace(FIGURES, interactive=seen), ())


def grid_of(goods: Iterable[int], ttft_p95_s: float = 2.0) -> list[Measured]:
    return [measured(knobs, good, ttft_p95_s) for knobs, good in zip(GRID, goods, strict=True)]


def test_every_setting_of_the_grid_runs_twice_and_rounds_alternate() -> None:
    names: list[str] = []

    async def measure(knobs: Knobs | None) -> Measured:
        names.append(name_of(knobs))
        return measured(knobs, 10 + (knobs == GRID[2]))

    grid, rounds = asyncio.run(compare(measure))
    best, default = name_of(GRID[2]), name_of(DEFAULT)
    there = [name_of(knobs) for knobs in GRID]
    assert names[: len(grid)] == [*there, *reversed(there)]
    assert names[len(grid) :] == [m.setting for of_round in rounds for m in of_round]
    assert {m[0].setting for m in rounds} == {TUNED, best, default}
    assert all({m.setting for m in of_round} == {TUNED, best, default} for of_round in rounds)
    assert len(names) == num_runs() and len(rounds) == NUM_ROUNDS


def test_the_best_of_the_grid_is_best_over_both_of_its_runs() -> None:
    lucky = grid_of([20, *[10] * (len(GRID) - 1)]) + grid_of([0, 12, *[10] * (len(GRID) - 2)])
    assert best_of(lucky) == GRID[1]
    alike = grid_of([10] * len(GRID))
    alike[3] = measured(GRID[3], 10, ttft_p95_s=1.0)
    assert best_of(alike) == GRID[3]


def test_rounds_are_compared_each_with_its_own() -> None:
    rounds = [
        {TUNED: measured(None, good), "other": measured(DEFAULT, other)}
        for good, other in ((10, 20), (12, 0))
    ]
    assert ratios(rounds, "other") == [0.5, 12.0]


@pytest.mark.parametrize("knobs", bench_tuning.GRID)
def test_a_fixed_setting_is_what_its_engine_starts_with(knobs: Knobs) -> None:
    settings = [*settings_of(RunKind.FIXED, Slo(1.0, 0.1, 95.0), 1), *fixed_at(knobs)]
    pool = read_pool(REPOSITORY / "examples" / "lunch-rush.yaml", settings)
    first = first_policy(pool)
    assert Knobs(first.batch_size, first.step_tokens) == knobs
    assert pool.spec.mode == "Recommend"


def test_the_default_is_in_the_grid_and_no_setting_twice() -> None:
    assert DEFAULT in GRID and len(set(GRID)) == len(GRID)
