"""The scheduler's promises as the simulated benchmarks measure them, in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chairlift_bench import bench_fairness, bench_longprompt
from chairlift_bench.claims import publish


@pytest.mark.parametrize("spacing_s", bench_longprompt.SPACINGS_S.values(), ids=str)
def test_short_requests_behind_a_30000_token_prompt_start_soon_and_streams_keep_their_pace(
    spacing_s: float,
) -> None:
    effect = bench_longprompt.effect_of(30_000, spacing_s)
    assert effect.behind.long_ttft_s > 2.0  # so that there is something to be held up by
    assert effect.ttft_ratio <= 3
    assert effect.itl_ratio <= 1.5


def test_a_chat_beside_another_tenants_flood_waits_at_most_three_steps_longer() -> None:
    _, beside, extra_steps = bench_fairness.extra_ttft_steps(num_turns=40)
    assert beside.step_s > 0.009  # the engine is full, or there would be nothing to share
    assert extra_steps <= 3


def test_two_backlogged_tenants_share_the_computed_tokens_by_weight() -> None:
    shared = bench_fairness.sharing(duration_s=50.0)
    assert sum(shared.num_tokens.values()) > 100_000
    assert shared.error <= 0.05


def test_a_benchmark_ends_with_its_claims_and_leaves_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = publish("some", {"some_ratio": 1.23456, "some_steps": 3.0}, {"a": [1]}, tmp_path / "new")
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "claim some_ratio 1.235",
        "claim some_steps 3",
    ]
    assert json.loads(path.read_text()) == {
        "claims": {"some_ratio": 1.23456, "some_steps": 3.0},
        "figures": {"a": [1]},
    }
