"""How long a step takes by what it carries, and how much prefill fits an objective. Pure.

`fixed + per decode + per prefill token`, by recursive least squares over the engine's own steps
with gradual forgetting: the operator's model in small, fast enough to pause a prompt in the step
that would miss the objective. Times are arguments.
"""

from __future__ import annotations

from typing import Final

Vector = tuple[float, float, float]

FORGETTING: Final = 0.98
MIN_STEPS: Final = 16
MAX_PAUSED_STEPS: Final = 8
# Prior standard deviations, in seconds: of what is new, most is ascribed to the fixed part.
_PRIOR: Final = (1.0, 1e-2, 1e-3)


class StepPace:
    def __init__(self) -> None:
        self._num_steps = 0
        self._costs: Vector = (0.0, 0.0, 0.0)
        self._spread = [[s * s if i == j else 0.0 for j, s in enumerate(_PRIOR)] for i in range(3)]

    def observe(self, step_s: float, num_decodes: int, num_prefill_tokens: int) -> None:
        carried = (1.0, float(num_decodes), float(num_prefill_tokens))
        spread = self._spread
        seen = [sum(row[j] * carried[j] for j in range(3)) for row in spread]
        scale = FORGETTING + sum(carried[i] * seen[i] for i in range(3))
        error_s = step_s - sum(c * x for c, x in zip(self._costs, carried, strict=True))
        a, b, c = (cost + seen[i] / scale * error_s for i, cost in enumerate(self._costs))
        self._costs = a, b, c
        for i in range(3):
            for j in range(3):
                spread[i][j] = (spread[i][j] - seen[i] * seen[j] / scale) / FORGETTING
        self._num_steps += 1
        self._bound_spread()

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

    def _bound_spread(self) -> None:
        """What is not excited is forgotten without end, unless it is held at the prior."""
        for i, prior in enumerate(_PRIOR):
            if self._spread[i][i] > prior * prior:
                shrink = prior / self._spread[i][i] ** 0.5
                for j in range(3):
                    self._spread[i][j] *= shrink
                    self._spread[j][i] *= shrink


class PrefillPause:
    """Shrinks a step's prefill where the streams beside it would miss their objective, and only
    where that helps. A prompt advances all the same, by a block every `MAX_PAUSED_STEPS`."""

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
        left_s = objective_s - (now_s - self._last_step_ended_s)
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
