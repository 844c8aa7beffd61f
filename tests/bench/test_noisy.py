"""The figures of `bench_noisy`: what counts is how many steps later, not how many seconds."""

from __future__ import annotations

import pytest

from chairlift_bench.bench_noisy import KINDS, Phase, by_round, claims_of, is_busy
from chairlift_operator.exposition import EngineSample


def _rounds(*ttft_s: tuple[float, float, float]) -> list[Phase]:
    return [
        Phase(kind, (0.1, value), step_s=0.05, num_failed=0)
        for values in ttft_s
        for kind, value in zip(KINDS, values, strict=True)
    ]


def test_lateness_is_counted_in_steps_of_the_busy_engine() -> None:
    claims = claims_of(_rounds((0.2, 0.3, 0.25)))
    assert claims["noisy_extra_ttft_steps"] == pytest.approx((0.3 - 0.2) / 0.05)
    assert claims["noisy_vs_many_tenants"] == pytest.approx(0.3 / 0.25)
    assert claims["noisy_failed_requests"] == 0


def test_rounds_tell_the_spread() -> None:
    first, second = by_round(_rounds((0.2, 0.3, 0.3), (0.2, 0.6, 0.3)))
    assert (first["noisy_vs_many_tenants"], second["noisy_vs_many_tenants"]) == (1.0, 2.0)


def test_a_failed_request_is_counted_whoever_sent_it() -> None:
    phases = [Phase(kind, (0.1,), 0.05, num_failed=2) for kind in KINDS]
    assert claims_of(phases)["noisy_failed_requests"] == 6


@pytest.mark.parametrize(
    ("num_running", "num_waiting", "busy"),
    [(16, 14, True), (14, 16, True), (10, 20, False), (16, 3, False), (None, 20, False)],
)
def test_turns_begin_once_slots_are_full_and_the_rest_waits(
    num_running: float | None, num_waiting: float | None, busy: bool
) -> None:
    assert is_busy(EngineSample(num_running=num_running, num_waiting=num_waiting)) is busy
