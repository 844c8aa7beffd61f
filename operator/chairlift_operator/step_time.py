"""What a step of this engine costs: T = a + b·decodes + c·prefill tokens + d·KV tokens, on line.

Recursive least squares with a random-walk prior (a Kalman filter) on per-tick means. Sums over
steps make the means exact: linearity leaves no bias from mixing long and short steps. Covariance
grows by a random walk instead of forgetting, so an idle hour winds nothing up. Pure: a frozen model
in, one out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from chairlift_operator.linear4 import (
    Matrix,
    Vector,
    add,
    diagonal,
    dot,
    minus_outer,
    plus,
    scale,
    times,
    vector,
)
from chairlift_operator.windows import History

# Regressors are scaled to about one, so that one covariance fits all.
_SCALES: Final[Vector] = (1.0, 64.0, 512.0, 1e5)
_COLD_SPREAD: Final = 1.0  # relative standard deviation of each coefficient
_WARM_SPREAD: Final = 0.3
_CHANGE_SPREAD: Final = 0.5  # added once a change has shown itself three times in a row
_OTHER_HARDWARE: Final = 2.0
_NO_PREDICTION: Final = 1e-6
_DRIFT: Final = 0.01  # random walk per update, relative to each coefficient
_STEP_NOISE: Final = 0.10  # relative spread of one step about the model
_MODEL_NOISE: Final = 0.02  # relative misfit of the linear model itself
_GATE: Final = 9.0  # squared innovation over its variance: beyond three sigma
_MISFIT: Final = 7.4
_TICKS_TO_DISTRUST: Final = 6
_READINGS_TO_BELIEVE: Final = 3
_UPDATES_TO_TEACH: Final = 6
_TRUSTED_SPREAD: Final = 0.25
EXPLORED_FOR_S: Final = 600.0

LEAST_STEP_S: Final = 1e-7  # no engine is faster: a counter that says so is broken
MIN_STEPS: Final = 20
# An engine of 0.2 s a step would take ages for 20: five are enough once they are seconds of work.
MIN_SLOW_STEPS: Final = 5
MIN_SLOW_BUSY_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds: per step, per decoding sequence, per prefill token, per resident KV token."""

    fixed_s: float
    decode_s: float
    prefill_s: float
    kv_s: float

    def step_s(self, num_decodes: float, prefill_tokens: float, kv_tokens: float) -> float:
        return (
            self.fixed_s
            + self.decode_s * num_decodes
            + self.prefill_s * prefill_tokens
            + self.kv_s * kv_tokens
        )


@dataclass(frozen=True, slots=True)
class StepMeans:
    """Means over the steps between two samples."""

    num_steps: float
    step_s: float
    num_decodes: float
    prefill_tokens: float
    kv_tokens: float


@dataclass(frozen=True, slots=True)
class Explored:
    """The largest mean decodes and step of tokens that an engine was seen to run, at a time."""

    at_s: float
    num_decodes: float
    step_tokens: float


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """weights: the coefficients in scaled units, None before the first measurement.

    warm: began from another run's coefficients, so one larger jump is allowed.
    num_changes: how often the engine turned out to be another than it was.
    """

    weights: Vector | None = None
    covariance: Matrix | None = None
    num_updates: int = 0
    num_gated_in_row: int = 0
    num_misfits_in_row: int = 0
    num_changes: int = 0
    explored: tuple[Explored, ...] = ()
    warm: bool = False

    @classmethod
    def from_prior(cls, prior: StepCosts) -> StepTimeModel:
        weights = _scaled(prior)
        return cls(weights, _relative(weights, _WARM_SPREAD), warm=True)

    @property
    def costs(self) -> StepCosts | None:
        if self.weights is None:
            return None
        return StepCosts(*(w / unit for w, unit in zip(self.weights, _SCALES, strict=True)))

    def deviation_s(self, num_decodes: float, prefill_tokens: float, kv_tokens: float) -> float:
        """Standard deviation of the prediction; infinite before any measurement."""
        if self.covariance is None:
            return math.inf
        x = _regressors(num_decodes, prefill_tokens, kv_tokens)
        return math.sqrt(max(0.0, dot(x, times(self.covariance, x))))

    def spread(self, num_decodes: float, prefill_tokens: float, kv_tokens: float) -> float:
        """The deviation relative to the prediction."""
        step = num_decodes, prefill_tokens, kv_tokens
        predicted_s = self.costs.step_s(*step) if self.costs is not None else 0.0
        return self.deviation_s(*step) / predicted_s if predicted_s > 0 else math.inf

    def trusted_at(self, num_decodes: float, prefill_tokens: float, kv_tokens: float) -> bool:
        """Enough is known to predict such a step, and recent predictions came true."""
        enough = self.warm or self.num_updates >= 1
        return (
            enough
            and self.num_misfits_in_row < _TICKS_TO_DISTRUST
            and self.spread(num_decodes, prefill_tokens, kv_tokens) < _TRUSTED_SPREAD
        )

    @property
    def is_contradicted(self) -> bool:
        """The last reading was far from what was predicted; soon it is known which was wrong."""
        return 0 < self.num_misfits_in_row < _TICKS_TO_DISTRUST

    @property
    def stands(self) -> bool:
        """Readings taught it, and the last ones came true: others may begin with it."""
        return self.num_updates >= _UPDATES_TO_TEACH and self.num_misfits_in_row == 0

    @property
    def largest_batch(self) -> float:
        return max((e.num_decodes for e in self.explored), default=0.0)

    @property
    def largest_step_tokens(self) -> float:
        return max((e.step_tokens for e in self.explored), default=0.0)


# Cold, only the proportions are assumed; the first measurement gives the size. Prefill is taken as
# dear beside the fixed part, as on CPUs: a GPU then starts with too small a step, never too large.
_COLD_PROPORTIONS: Final = StepCosts(1.0, 1 / 40, 1 / 32, 6e-6)


def means_between(history: History, since_s: float) -> StepMeans | None:
    """Means from the sample at `since_s` to the last, once they hold steps enough to trust."""
    window = History(tuple(p for p in history.points if p.at_s >= since_s))
    steps = window.increase("num_steps")
    busy_s = window.increase("step_seconds")
    decodes = window.increase("step_decode_seqs")
    prefill = window.increase("step_prefill_tokens")
    kv = window.increase("step_kv_tokens")
    if steps is None or busy_s is None or decodes is None or prefill is None or kv is None:
        return None
    slow_but_busy = steps >= MIN_SLOW_STEPS and busy_s >= MIN_SLOW_BUSY_S
    if busy_s < LEAST_STEP_S * steps or not (steps >= MIN_STEPS or slow_but_busy):
        return None
    return StepMeans(steps, busy_s / steps, decodes / steps, prefill / steps, kv / steps)


def learn(model: StepTimeModel, means: StepMeans, step_tokens: int, now_s: float) -> StepTimeModel:
    """One update. `step_tokens` is the budget that was in force during these steps."""
    model = _explore(model, means, step_tokens, now_s)
    x = _regressors(means.num_decodes, means.prefill_tokens, means.kv_tokens)
    if model.weights is None:
        model = _begun(model, x, means.step_s)
    assert model.weights is not None and model.covariance is not None
    error = means.step_s - dot(x, model.weights)
    noise = _noise_variance(means)
    surprise = error**2 / (dot(x, times(model.covariance, x)) + noise)
    misfits = model.num_misfits_in_row + 1 if surprise > _MISFIT else 0
    model = replace(model, num_misfits_in_row=misfits)
    if surprise >= _GATE:
        model = replace(model, num_gated_in_row=model.num_gated_in_row + 1, warm=False)
        if model.num_gated_in_row < _READINGS_TO_BELIEVE:
            return model  # one odd reading is noise; three in a row are the new truth
        model = _reopened(model, x, means.step_s)
    return _corrected(model, x, means.step_s, noise)


def _noise_variance(means: StepMeans) -> float:
    return means.step_s**2 * (_MODEL_NOISE**2 + _STEP_NOISE**2 / means.num_steps)


def _corrected(model: StepTimeModel, x: Vector, measured_s: float, noise: float) -> StepTimeModel:
    assert model.weights is not None and model.covariance is not None
    px = times(model.covariance, x)
    variance = dot(x, px) + noise
    gain = scale(px, 1 / variance)
    weights = add(model.weights, scale(gain, measured_s - dot(x, model.weights)))
    covariance = minus_outer(model.covariance, gain, px)
    weights = _non_negative(weights, covariance)
    drift = diagonal(vector((_DRIFT * max(w, 1e-3 * measured_s)) ** 2 for w in weights))
    return replace(
        model,
        weights=weights,
        covariance=plus(covariance, drift),
        num_updates=model.num_updates + 1,
        num_gated_in_row=0,
    )


def _begun(model: StepTimeModel, x: Vector, measured_s: float) -> StepTimeModel:
    """Cold proportions in the size that explains one measurement."""
    size = measured_s / dot(x, _scaled(_COLD_PROPORTIONS))
    weights = scale(_scaled(_COLD_PROPORTIONS), size)
    return replace(model, weights=weights, covariance=_relative(weights, _COLD_SPREAD))


def _reopened(model: StepTimeModel, x: Vector, measured_s: float) -> StepTimeModel:
    """Take a change for real. What slows an engine slows all of a step, so its proportions are kept
    and the reading gives their size; what is wrong with that, later readings tell."""
    cold = _begun(model, x, measured_s)
    assert model.weights is not None and cold.weights is not None
    predicted_s = dot(x, model.weights)
    num_changes = model.num_changes + 1
    if predicted_s <= _NO_PREDICTION * measured_s:  # its proportions say nothing of such steps
        return replace(cold, num_changes=num_changes)
    weights = scale(model.weights, measured_s / predicted_s)
    off = max(measured_s / predicted_s, predicted_s / measured_s)
    spread = _COLD_SPREAD if off > _OTHER_HARDWARE else _CHANGE_SPREAD
    # A part that was found to cost nothing may have come to cost something.
    likely = vector(max(known, new) for known, new in zip(weights, cold.weights, strict=True))
    covariance = _relative(likely, spread)
    return replace(model, weights=weights, covariance=covariance, num_changes=num_changes)


def _non_negative(weights: Vector, covariance: Matrix) -> Vector:
    """Condition on zero for each negative coefficient, which moves the others with it."""
    for _ in range(4):
        lowest = min(range(4), key=lambda i: weights[i])
        if weights[lowest] >= 0:
            return weights
        column = covariance[lowest]
        if column[lowest] <= 0:
            break
        weights = add(weights, scale(column, -weights[lowest] / column[lowest]))
    return vector(max(0.0, w) for w in weights)


def _explore(
    model: StepTimeModel, means: StepMeans, step_tokens: int, now_s: float
) -> StepTimeModel:
    # Prefill worth two full budgets cannot have fitted without steps that were full.
    filled = means.num_steps * means.prefill_tokens >= 2 * step_tokens
    mean_tokens = means.num_decodes + means.prefill_tokens
    seen = Explored(now_s, means.num_decodes, step_tokens if filled else mean_tokens)
    kept = [e for e in model.explored if e.at_s > now_s - EXPLORED_FOR_S]
    # What a later, larger reading covers in both respects need not be kept.
    kept = [e for e in kept if e.num_decodes > seen.num_decodes or e.step_tokens > seen.step_tokens]
    return replace(model, explored=(*kept, seen))


def _regressors(num_decodes: float, prefill_tokens: float, kv_tokens: float) -> Vector:
    raw = (1.0, num_decodes, prefill_tokens, kv_tokens)
    return vector(value / unit for value, unit in zip(raw, _SCALES, strict=True))


def _scaled(costs: StepCosts) -> Vector:
    raw = (costs.fixed_s, costs.decode_s, costs.prefill_s, costs.kv_s)
    return vector(value * unit for value, unit in zip(raw, _SCALES, strict=True))


def _relative(weights: Vector, spread: float) -> Matrix:
    return diagonal(vector((spread * w) ** 2 for w in weights))
