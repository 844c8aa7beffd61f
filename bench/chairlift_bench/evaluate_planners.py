"""Autoscalers that look at latency: NVIDIA Dynamo's planner and llm-d's saturation band.

Count rules as those in `evaluate_scalers`. Where the original reads what these snapshots do not
tell, it is given something at least as good, and the class says what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Final

from chairlift_bench.evaluate_scalers import INTERACTIVE, Brakes, Seen
from chairlift_bench.evaluate_scenarios import KV_TOKENS, lengths_carried_per_s
from chairlift_operator.exposition import EngineSample
from chairlift_operator.replica_law import Lengths
from chairlift_operator.spec import Slo
from chairlift_operator.step_time import StepCosts

DOWN_SENSITIVITY: Final = 0.8  # of the objectives: what one replica fewer may be estimated to need
# llm-d's own: https://llm-d.ai/docs/dev/architecture/autoscaling/slo-aware-keda
BAND_BRAKES: Final = Brakes(up_window_s=30.0, down_window_s=180.0, growth_s=60.0, shrink_s=120.0)
RATES_S: Final = 60.0
SMOOTHED_S: Final = 45.0
MOST_SATURATED: Final = 2.0
Counter = Callable[[EngineSample], float | None]


@dataclass(frozen=True, slots=True)
class Dynamo:
    """A floor from arrivals over what a replica carries, and by load one more or one less above it
    (ai-dynamo/dynamo, docs/design-docs/planner-design.md; aggregated mode, constant predictor).

    costs: its profile and its regression; here the true ones, so that it has nothing to learn.
    interval_s: of arrivals. Its floor follows them at each sync and not once in an interval.
    """

    costs: StepCosts
    slo: Slo
    interval_s: float = 180.0

    def wanted(self, seen: Sequence[Seen]) -> int:
        now, lengths = seen[-1], _lengths(seen)
        if lengths is None:
            return now.supply
        first = next(s for s in seen if s.at_s > now.at_s - self.interval_s)
        rate = (now.num_received - first.num_received) / max(1.0, now.at_s - first.at_s)
        floor = math.ceil(rate / lengths_carried_per_s(self.costs, lengths))
        return max(floor, now.supply + self._by_load(now, lengths))

    def _by_load(self, now: Seen, lengths: Lengths) -> int:
        """One more when all replicas are late, one less when all would be well without one."""
        if now.num_ready < now.supply or not now.serving:
            return 0  # not while replicas start
        samples = list(now.serving.values())
        found = [self._used(sample, lengths, 1.0) for sample in samples]
        if all(ttft > 1 for ttft, _, _ in found) or all(itl > 1 for _, itl, _ in found):
            return 1
        if now.supply == 1:
            return 0
        fewer = now.supply / (now.supply - 1)
        found = [self._used(sample, lengths, fewer) for sample in samples]
        are_well = all(max(ttft, itl) < DOWN_SENSITIVITY and kv < 1 for ttft, itl, kv in found)
        return -1 if are_well else 0

    def _used(
        self, sample: EngineSample, lengths: Lengths, load: float
    ) -> tuple[float, float, float]:
        """How much of its objectives, for first tokens and for gaps, and of its memory a replica
        is estimated to need with so many times its requests, those that wait included."""
        running, waiting = load * (sample.num_running or 0.0), load * (sample.num_waiting or 0.0)
        context, per_decode = lengths.context_tokens, lengths.prompt_tokens / lengths.output_tokens
        decodes = running + waiting
        itl_s = self.costs.step_s(decodes, decodes * per_decode, decodes * context)
        most_s = self.slo.inter_token_latency.threshold_s
        left_s = most_s - self.costs.step_s(running, 0.0, running * context)
        num_steps = (waiting + 1) * lengths.prompt_tokens * self.costs.prefill_s / max(1e-9, left_s)
        ttft_s = num_steps * most_s
        return (
            ttft_s / self.slo.time_to_first_token.threshold_s,
            itl_s / most_s,
            decodes * context / KV_TOKENS,
        )


@dataclass(frozen=True, slots=True)
class Band:
    """llm-d's: in proportion to saturation where that leaves a band, with credit for those that
    start. Saturation: of the 90th percentiles of first token and time per token over their
    objectives the larger, smoothed.

    Here of the replica that is worst off, who has more than a tenth of the requests: for how long
    the first of its queue has waited, and its mean step of a minute.
    """

    slo: Slo
    up: float = 0.55
    down: float = 0.40

    def wanted(self, seen: Sequence[Seen]) -> int:
        now, supply = seen[-1], seen[-1].supply
        recent = [end for end, s in enumerate(seen, start=1) if s.at_s > now.at_s - SMOOTHED_S]
        saturation = fmean(min(MOST_SATURATED, self._raw(seen[:end])) for end in recent)
        if saturation > self.up:
            credit = now.num_ready / supply if 0 < now.num_ready < supply else 1.0
            # A credited ask may be below what there is; a band that is exceeded lets nobody go.
            return supply + max(0, math.ceil(supply * (saturation * credit / self.up - 1)))
        if saturation < self.down:
            return supply - math.floor(supply * (1 - saturation / self.down))
        return supply

    def _raw(self, seen: Sequence[Seen]) -> float:
        now = seen[-1]
        recent = [s for s in seen if s.at_s >= now.at_s - RATES_S]
        worst = 0.0
        for name, sample in now.serving.items():
            steps = _rise(recent, lambda s: s.num_steps, name)
            step_s = _rise(recent, lambda s: s.step_seconds, name) / max(1.0, steps)
            wait_s = sample.of(INTERACTIVE).oldest_waiting_s or 0.0
            worst = max(
                worst,
                wait_s / self.slo.time_to_first_token.threshold_s,
                step_s / self.slo.inter_token_latency.threshold_s,
            )
        return worst


def _lengths(seen: Sequence[Seen]) -> Lengths | None:
    """Of the requests that began, and of those that ended; None while none has."""
    num_begun = _rise(seen, lambda s: s.of(INTERACTIVE).first_tokens)
    num_ended = _rise(seen, lambda s: s.num_finished)
    if not num_begun or not num_ended:
        return None
    return Lengths(
        _rise(seen, lambda s: s.prompt_tokens) / num_begun,
        _rise(seen, lambda s: s.generation_tokens) / num_ended,
    )


def _rise(seen: Sequence[Seen], counter: Counter, only: str = "") -> float:
    """Of a counter from each time seen to the next, of all replicas or of one."""
    return sum(
        max(0.0, after - before)
        for earlier, now in pairwise(seen)
        for name, sample in now.serving.items()
        if only in ("", name)
        and name in earlier.serving
        and (after := counter(sample)) is not None
        and (before := counter(earlier.serving[name])) is not None
    )
