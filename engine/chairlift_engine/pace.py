"""How long a step takes by what it carries, and how much prefill fits an objective. Pure.

`fixed + per decode + per prefill token`, by recursive least squares over the engine's own steps
with gradual forgetting: the operator's model in small, fast enough to pause a prompt in the step
that would miss the objective. Times are arguments.
"""

from __future__ import annotations

from typing import Final

Vector = tuple[float, float, float]
Triangle = tuple[float, float, float, float, float, float]  # row by row, from the diagonal on

FORGETTING: Final = 0.99
NOISE: Final = 0.05  # of a step's time, relative
MIN_STEPS: Final = 16
MIN_STEP_S: Final = 1e-6  # no clock is finer, and nothing computes in less
HEADROOM: Final = 0.95  # a step predicted at the objective misses it every other time
MAX_PAUSED_STEPS: Final = 8
# Prior standard deviations, in seconds: of what is new, most is ascribed to the fixed part.
_PRIOR: Final = (1.0, 1e-2, 1e-3)
_UNKNOWN: Final[Triangle] = (_PRIOR[0] ** 2, 0.0, 0.0, _PRIOR[1] ** 2, 0.0, _PRIOR[2] ** 2)


class StepPace:
    def __init__(self) -> None:
        self._num_steps = 0
        self._costs: Vector = (0.0, 0.0, 0.0)
        self._spread = _UNKNOWN

    def observe(self, step_s: float, num_decodes: int, num_prefill_tokens: int) -> None:
        """Weighed by what is relative: noise grows with the step."""
        if step_s < MIN_STEP_S:
            return
        x, y, z = 1 / step_s, num_decodes / step_s, num_prefill_tokens / step_s
        a, b, c = self._costs
        xx, xy, xz, yy, yz, zz = self._spread
        u, v, w = xx * x + xy * y + xz * z, xy * x + yy * y + yz * z, xz * x + yz * y + zz * z
        scale = FORGETTING * NOISE * NOISE + x * u + y * v + z * w
        gain = (1.0 - (a * x + b * y + c * z)) / scale
        self._costs = a + u * gain, b + v * gain, c + w * gain
        # One triangle of a symmetric matrix: kept twice, its halves drift apart, by 1 % a step.
        self._spread = _bounded(
            (xx - u * u / scale) / FORGETTING, (xy - u * v / scale) / FORGETTING,
            (xz - u * w / scale) / FORGETTING, (yy - v * v / scale) / FORGETTING,
            (yz - v * w / scale) / FORGETTING, (zz - w * w / scale) / FORGETTING,
        )  # fmt: skip
        self._num_steps += 1

    def step_s(self, num_decodes: int, num_prefill_tokens: int) -> float:
        fixed_s, decode_s, prefill_s = self._costs
        return fixed_s + decode_s * num_decodes + prefill_s * num_prefill_tokens

    def prefill_tokens_within(self, left_s: float, num_decodes: int) -> int | None:
        """Most prefill tokens of a step that ends in time; None when prefill makes no difference:
        too little is known, or the decodes alone miss it."""
        base_s, prefill_s = self.step_s(num_decodes, 0), self._costs[2]
        if self._num_steps < MIN_STEPS or prefill_s <= 0 or base_s > left_s:
            return None
        return int((left_s - base_s) / prefill_s)


def _bounded(xx: float, xy: float, xz: float, yy: float, yz: float, zz: float) -> Triangle:
    """What is not excited is forgotten without end, unless it is held at the prior; what rounding
    has made impossible is begun anew."""
    if xx <= 0 or yy <= 0 or zz <= 0 or xy * xy > xx * yy or xz * xz > xx * zz or yz * yz > yy * zz:
        return _UNKNOWN
    most_x, most_y, most_z = _UNKNOWN[0], _UNKNOWN[3], _UNKNOWN[5]
    by_x = 1.0 if xx <= most_x else (most_x / xx) ** 0.5
    by_y = 1.0 if yy <= most_y else (most_y / yy) ** 0.5
    by_z = 1.0 if zz <= most_z else (most_z / zz) ** 0.5
    return (
        xx * by_x * by_x, xy * by_x * by_y, xz * by_x * by_z,
        yy * by_y * by_y, yz * by_y * by_z, zz * by_z * by_z,
    )  # fmt: skip


class PrefillPause:
    """Shrinks a long prompt's chunk where the streams beside it would miss their objective, and
    only where that helps. It advances all the same, by a block every `MAX_PAUSED_STEPS`."""

    def __init__(self, block_tokens: int) -> None:
        self._pace = StepPace()
        self._block_tokens = block_tokens
        self._num_paused_steps = 0
        self._last_step_ended_s = 0.0

    def observe(
        self, step_s: float, num_decodes: int, num_prefill_tokens: int, now_s: float
    ) -> None:
        self._pace.observe(step_s, num_decodes, num_prefill_tokens)
        self._last_step_ended_s = now_s

    def limit(self, budget_tokens: int, num_decodes: int, objective_s: float, now_s: float) -> int:
        """Of the prefill tokens that the budget would allow beside these decodes."""
        left_s = HEADROOM * objective_s - (now_s - self._last_step_ended_s)
        within = self._pace.prefill_tokens_within(left_s, num_decodes)
        if within is None or within >= budget_tokens:
            self._num_paused_steps = 0
            return budget_tokens
        if within >= self._block_tokens:
            self._num_paused_steps = 0
            return within
        self._num_paused_steps += 1
        if self._num_paused_steps < MAX_PAUSED_STEPS:
            return within
        self._num_paused_steps = 0
        return min(self._block_tokens, budget_tokens)
