from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from chairlift_bench.journal_tail import Change
from chairlift_bench.outcomes import Summary
from chairlift_bench.rush_figures import RunFigures, claims_of, moves_of, num_reversals
from chairlift_bench.rush_run import RunKind

SUMMARY = Summary(
    num_requests=50,
    num_failed=0,
    num_good=45,
    ttft_p50_s=0.5,
    ttft_p95_s=2.0,
    gap_p50_s=0.1,
    gap_p95_s=0.2,
    gap_p99_s=0.3,
    prompt_tokens_per_s=100.0,
    output_tokens_per_s=50.0,
)
TUNED = RunFigures(
    kind=RunKind.TUNED,
    interactive=SUMMARY,
    batch=replace(SUMMARY, prompt_tokens_per_s=20.0, output_tokens_per_s=80.0),
    goodput=0.5,
    num_failed=0,
    num_policy_changes=5,
    num_reversals=2,
    num_up_in_rush=2,
    num_down_in_rush=1,
    elapsed_s=100.0,
)


def figures(kind: RunKind, num_good: int = 45, ttft_p95_s: float = 2.0) -> RunFigures:
    summary = replace(SUMMARY, num_good=num_good, ttft_p95_s=ttft_p95_s)
    return replace(TUNED, kind=kind, interactive=summary)


def round_of(static_good: int = 2, fixed_good: int = 20) -> dict[RunKind, RunFigures]:
    return {
        RunKind.TUNED: TUNED,
        RunKind.STATIC: figures(RunKind.STATIC, static_good, 40.0),
        RunKind.FIXED: figures(RunKind.FIXED, fixed_good),
        RunKind.TUNED_ALONE: replace(
            TUNED, batch=replace(SUMMARY, prompt_tokens_per_s=0.0, output_tokens_per_s=0.0)
        ),
    }


def test_claims_are_medians_of_each_rounds_own_comparison() -> None:
    claims = {c.name: c for c in claims_of([round_of(1), round_of(3), round_of(9, 40)])}
    assert claims["demo_goodput_vs_static"].values == (45, 15, 5)
    assert claims["demo_goodput_vs_static"].line == "claim demo_goodput_vs_static 15"
    assert claims["demo_goodput_vs_fixed"].value == 45 / 20
    assert claims["demo_good_fraction_tuned"].line == "claim demo_good_fraction_tuned 0.90"
    assert claims["demo_p95_ttft_vs_static"].line == "claim demo_p95_ttft_vs_static 0.05"
    assert claims["demo_batch_tokens_vs_interactive_only"].value == pytest.approx(250 / 150)
    assert claims["demo_policy_changes"].line == "claim demo_policy_changes 5"
    assert all(claim.holds for claim in claims.values())


def fails(round_: dict[RunKind, RunFigures]) -> None:
    round_[RunKind.FIXED] = replace(round_[RunKind.FIXED], num_failed=1)


def turns(round_: dict[RunKind, RunFigures]) -> None:
    round_[RunKind.TUNED] = replace(TUNED, num_reversals=5)


def only_rises(round_: dict[RunKind, RunFigures]) -> None:
    round_[RunKind.TUNED] = replace(TUNED, num_down_in_rush=0)


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (fails, "demo_failed_requests"),
        (turns, "demo_policy_reversals"),
        (only_rises, "demo_policy_changes"),
    ],
)
def test_what_does_not_hold_is_said_so(
    spoil: Callable[[dict[RunKind, RunFigures]], None], name: str
) -> None:
    round_ = round_of()
    spoil(round_)
    assert [c.name for c in claims_of([round_]) if not c.holds] == [name]


def test_no_good_static_request_counts_as_one_and_no_backlog_run_makes_no_claim() -> None:
    round_ = round_of(static_good=0)
    del round_[RunKind.TUNED_ALONE]
    claims = {c.name: c.value for c in claims_of([round_])}
    assert claims["demo_goodput_vs_static"] == 45
    assert "demo_batch_tokens_vs_interactive_only" not in claims


def change(field: str, before: float, after: float, enforced: bool = True) -> Change:
    return Change(0.0, field, before, after, enforced, "")


@pytest.mark.parametrize(
    ("changes", "num"),
    [
        ([], 0),
        ([change("step tokens", 256, 64), change("batch size", 16, 24)], 0),
        ([change("step tokens", 256, 64), change("step tokens", 64, 80)], 1),
        ([change("step tokens", 100, 80), change("step tokens", 80, 84)], 0),
        (
            [
                change("batch share", 1, 0.5),
                change("step tokens", 60, 70),
                change("batch share", 0.5, 1),
                change("batch share", 1, 0.5),
            ],
            2,
        ),
    ],
)
def test_a_reversal_is_a_move_of_over_a_tenth_against_the_last_of_its_knob(
    changes: list[Change], num: int
) -> None:
    assert num_reversals(changes) == num


def test_what_was_kept_or_only_recommended_is_no_move() -> None:
    kept, advised = change("step tokens", 256, 256), change("step tokens", 256, 64, enforced=False)
    moved = change("step tokens", 256, 64)
    assert moves_of([kept, advised, moved]) == [moved]
