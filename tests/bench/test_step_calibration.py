from __future__ import annotations

import random

import pytest

from chairlift_bench.step_calibration import CalibrationFailed, Window, fitted


def window(steps: float, decodes: float, prompts: float, noise: float = 1.0) -> Window:
    step_s = noise * (60e-3 * steps + 2e-3 * decodes + 3e-3 * prompts)
    return Window(step_s, steps, decodes, prompts)


def test_costs_come_out_of_sums_over_steps_in_spite_of_noise() -> None:
    draw = random.Random(1)
    windows = [
        window(n, n * draw.choice((1, 4, 8, 16)), draw.choice((0, 0, 300)), draw.gauss(1, 0.05))
        for n in range(3, 60)
    ]
    costs, misfit = fitted(windows)
    assert costs.fixed_s == pytest.approx(60e-3, rel=0.05)
    assert costs.decode_s == pytest.approx(2e-3, rel=0.1)
    assert costs.prefill_s == pytest.approx(3e-3, rel=0.1)
    assert 0.01 < misfit < 0.06


def test_a_decode_that_seems_to_cost_less_than_nothing_costs_nothing() -> None:
    windows = [Window(60e-3 * n - 1e-4 * d + 3e-3 * p, n, d, p) for n, d, p in SHAPES]
    costs, _ = fitted(windows)
    assert costs.decode_s == 0
    assert costs.fixed_s == pytest.approx(60e-3, rel=0.05)


SHAPES = [(10, 10, 0), (10, 40, 0), (8, 64, 100), (5, 10, 400), (6, 90, 0), (4, 4, 200)]


@pytest.mark.parametrize(
    ("windows", "reason"),
    [
        ([window(5, 5, 0)] * 3, "only 3 readings"),
        ([Window(1.0 / (p + 1), 1, 1, p) for p in range(9)], "do not grow"),
    ],
)
def test_what_cannot_be_fitted_is_said(windows: list[Window], reason: str) -> None:
    with pytest.raises(CalibrationFailed, match=reason):
        fitted(windows)
