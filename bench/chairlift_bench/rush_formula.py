"""The lunch rush's objectives and load, from what one step costs on this machine. Pure.

docs/decisions/0007 states the formula and why. Every machine gets the same rush relative to its own
speed; all runs of it get the same requests at the same times. Called by `rush_load`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from chairlift_bench.outcomes import Slo, percentile
from chairlift_operator.law import MARGIN
from chairlift_operator.step_time import StepCosts
from chairlift_simulation.arrival_traces import Arrival

# The step that should just meet the gap objective: decodes beside a piece of somebody's prompt.
STEP_DECODES: Final = 16
STEP_PROMPT_TOKENS: Final = 64
# First tokens may take this many times what a long prompt takes alone, in such pieces.
TTFT_PIECES: Final = 2.5
LONG_PROMPT_PERCENT: Final = 95.0
OBJECTIVE_PERCENT: Final = 95.0

CALM_SHARE: Final = 0.2
RUSH_SHARE: Final = 0.55
CALM_S: Final = 20.0
RUSH_S: Final = 26.0
CALM_AGAIN_S: Final = 12.0

STATIC_BATCH_SIZES: Final = (4, 8, 16, 32, 64)


class PhaseName(StrEnum):
    CALM = "calm"
    RUSH = "rush"
    CALM_AGAIN = "calm again"


@dataclass(frozen=True, slots=True)
class Phase:
    """share: of the capacity inside the objectives."""

    name: PhaseName
    starts_s: float
    duration_s: float
    share: float

    @property
    def ends_s(self) -> float:
        return self.starts_s + self.duration_s


def phases(scale: float = 1.0) -> tuple[Phase, ...]:
    """scale: shorter phases, for tests."""
    calm_s, rush_s = scale * CALM_S, scale * RUSH_S
    return (
        Phase(PhaseName.CALM, 0.0, calm_s, CALM_SHARE),
        Phase(PhaseName.RUSH, calm_s, rush_s, RUSH_SHARE),
        Phase(PhaseName.CALM_AGAIN, calm_s + rush_s, scale * CALM_AGAIN_S, CALM_SHARE),
    )


def objectives(costs: StepCosts, prompt_tokens: Iterable[int]) -> Slo:
    """prompt_tokens: of the traffic, for what counts as a long prompt. Rounded up to whole ms."""
    step_s = costs.step_s(STEP_DECODES, STEP_PROMPT_TOKENS, 0.0)
    num_pieces = percentile(prompt_tokens, LONG_PROMPT_PERCENT) / STEP_PROMPT_TOKENS
    return Slo(
        ttft_s=_whole_ms(TTFT_PIECES * num_pieces * step_s),
        gap_s=_whole_ms(step_s / MARGIN),
        gap_percent=OBJECTIVE_PERCENT,
    )


def work_s(costs: StepCosts, arrival: Arrival) -> float:
    """What a request costs beyond the fixed part of the steps that it shares with others."""
    mean_context_tokens = arrival.prompt_tokens + arrival.output_tokens / 2
    return (
        costs.prefill_s * arrival.prompt_tokens
        + (costs.decode_s + costs.kv_s * mean_context_tokens) * arrival.output_tokens
    )


def capacity(costs: StepCosts, slo: Slo) -> float:
    """Seconds of work a second that full steps do while they take MARGIN of the gap objective."""
    return 1 - costs.fixed_s / (MARGIN * slo.gap_s)


def requests_per_s(costs: StepCosts, slo: Slo, arrivals: Sequence[Arrival]) -> float:
    """The same capacity in requests like these."""
    return capacity(costs, slo) * len(arrivals) / sum(work_s(costs, a) for a in arrivals)


def timetable(
    candidates: Sequence[Arrival], costs: StepCosts, slo: Slo, when: Sequence[Phase]
) -> list[tuple[int, float]]:
    """Which candidates arrive, and when: in each phase, as many as make up its share of capacity.

    Taken in order; time is stretched evenly inside a phase, so bursts keep their shape.
    """
    offered: list[tuple[int, float]] = []
    first = 0
    for phase in when:
        wanted_s = phase.share * capacity(costs, slo) * phase.duration_s
        work_before_s = itertools.accumulate(
            (work_s(costs, a) for a in candidates[first:]), initial=0.0
        )
        num_before = bisect_left(list(work_before_s), wanted_s)
        after = first + max(1, num_before)
        if after >= len(candidates):
            raise ValueError(
                f"{len(candidates)} requests of the trace are too few for a machine this fast: "
                "shorten the phases"
            )
        start_s = candidates[first].arrival_s
        stretch = phase.duration_s / (candidates[after].arrival_s - start_s)
        offered += [
            (index, phase.starts_s + (candidates[index].arrival_s - start_s) * stretch)
            for index in range(first, after)
        ]
        first = after
    return offered


def _whole_ms(duration_s: float) -> float:
    return max(1, round(1e3 * duration_s)) / 1e3
