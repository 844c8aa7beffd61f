"""Three common mistakes, each named in a condition that says what to change. Pure.

A batch size beyond the objective, prompts computed in pieces too large for it, and one tenant on
most of the slots. They concern whoever decides: the spec's bounds, somebody else's policy while
nothing is enforced, static batching. What is not known neither raises a condition nor clears it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from chairlift_operator import law
from chairlift_operator.decisions import BLIND, Condition, Health, ReplicaReport, Strain, Truth
from chairlift_operator.snapshot import Phase
from chairlift_operator.spec import InferencePool, Objective
from chairlift_operator.spec_values import BLOCK_TOKENS, Bounds
from chairlift_operator.step_time import StepCosts
from chairlift_operator.windows import Attainment

BATCH_SIZE: Final = "BatchSizeBeyondObjective"
STEP_TOKENS: Final = "StepTokensBeyondObjective"
SLOTS: Final = "SlotsHeldByOneTenant"
MISTAKES: Final = (BATCH_SIZE, STEP_TOKENS, SLOTS)  # True is the trouble

Judge = Callable[[InferencePool, ReplicaReport], Condition]


def mistakes_of(pool: InferencePool, reports: Sequence[ReplicaReport]) -> tuple[Condition, ...]:
    judges = ((BATCH_SIZE, _batch_size), (STEP_TOKENS, _step_tokens), (SLOTS, _slots))
    return tuple(_of_pool(pool, reports, type, judge) for type, judge in judges)


def _of_pool(
    pool: InferencePool, reports: Sequence[ReplicaReport], type: str, judge: Judge
) -> Condition:
    """One replica is enough to make a mistake; that there is none takes all that work."""
    serving = [r for r in reports if r.phase is Phase.SERVING]
    working = [r for r in serving if r.health is not Health.IDLE]
    if not working:
        word, why = ("Idle", "Nothing runs.") if serving else ("NoReplica", "No replica serves.")
        return Condition(type, Truth.UNKNOWN, word, why)
    found = [
        _unknown(type, "NoMetrics", f"{r.name}: no usable metrics.")
        if r.health in BLIND
        else judge(pool, r)
        for r in working
    ]
    for truth in (Truth.TRUE, Truth.UNKNOWN):
        for condition in found:
            if condition.status is truth:
                return condition
    return found[0]


def _unknown(type: str, reason: str, message: str) -> Condition:
    return Condition(type, Truth.UNKNOWN, reason, message)


def _batch_size(pool: InferencePool, report: ReplicaReport) -> Condition:
    aims = pool.spec.aims(report.request_class)
    objective = aims.slo.inter_token_latency
    known = _known(BATCH_SIZE, report, objective)
    if isinstance(known, Condition):
        return known
    strain, costs, gaps = known
    if strain.num_decodes <= _most_decodes(strain, costs, objective.threshold_s):
        message = f"{report.name}: {strain.num_decodes:.0f} decodes a step fit the objective."
        return Condition(BATCH_SIZE, Truth.FALSE, "Fits", message)
    fitting = math.floor(_most_decodes(strain, costs, law.MARGIN * objective.threshold_s))
    if fitting < 1:
        message = f"{report.name}: no batch size meets the objective; see CapacityLimited."
        return Condition(BATCH_SIZE, Truth.FALSE, "ObjectiveInfeasible", message)
    alone_s = costs.step_s(strain.num_decodes, 0.0, strain.kv_tokens)
    advice = _advice(pool, report, "batchSize", aims.batch_size, fitting)
    message = (
        f"{report.name}: {strain.num_decodes:.0f} requests decode in a step, which takes "
        f"{1e3 * alone_s:.0f} ms without any prompt, against {objective.threshold_ms:g} ms; "
        f"{fitting} would fit: {advice}."
    )
    return Condition(BATCH_SIZE, Truth.TRUE, "TooManyDecodes", message)


def _step_tokens(pool: InferencePool, report: ReplicaReport) -> Condition:
    aims = pool.spec.aims(report.request_class)
    objective = aims.slo.inter_token_latency
    known = _known(STEP_TOKENS, report, objective)
    if isinstance(known, Condition):
        return known
    strain, costs, gaps = known
    room = _room_tokens(strain, costs, objective.threshold_s)
    if room <= 0:
        message = f"{report.name}: decodes alone take too long, whatever prompts take."
        return Condition(STEP_TOKENS, Truth.FALSE, "DecodesAlone", message)
    most = math.inf if strain.step_tokens is None else strain.step_tokens - strain.num_decodes
    # At most so many of the steps can have been longer than the room, by the mean of all.
    if most <= room or strain.prefill_tokens / room < gaps.lower:
        message = f"{report.name}: late gaps are not the prompts' doing."
        return Condition(STEP_TOKENS, Truth.FALSE, "Fits", message)
    fitting_room = _room_tokens(strain, costs, law.MARGIN * objective.threshold_s)
    fitting = math.floor(strain.num_decodes + max(BLOCK_TOKENS, fitting_room))
    advice = _advice(pool, report, "stepTokens", aims.step_tokens, fitting)
    prompt = strain.prompt_tokens
    is_whole = prompt is not None and room < prompt <= most
    pieces = "whole" if math.isinf(most) else f"in pieces of up to {most:.0f} tokens"
    mean = f" of {prompt:.0f} tokens on average" if prompt is not None else ""
    message = (
        f"{report.name}: prompts{mean} are computed {pieces}, but beside "
        f"{strain.num_decodes:.0f} decodes only {room:.0f} tokens fit "
        f"{objective.threshold_ms:g} ms: {advice}."
    )
    reason = "LongPromptsNotChunked" if is_whole else "ChunksTooLarge"
    return Condition(STEP_TOKENS, Truth.TRUE, reason, message)


def _slots(pool: InferencePool, report: ReplicaReport) -> Condition:
    use = report.slot_use
    if use is None:
        message = f"{report.name}: which tenants run and wait is not known."
        return _unknown(SLOTS, "NotTold", message)
    if use.tenant is None:
        message = "No tenant holds most of the slots while others wait."
        return Condition(SLOTS, Truth.FALSE, "Shared", message)
    message = (
        f"{report.name}: tenant {use.tenant[:63]} holds {use.num_held:.0f} of "
        f"{use.num_running:.0f} slots in use while {use.num_others_waiting:.0f} requests of others "
        "wait: limit how many it sends at once, give it a pool of its own, or allow more replicas."
    )
    return Condition(SLOTS, Truth.TRUE, "OneTenant", message)


def _known(
    type: str, report: ReplicaReport, objective: Objective
) -> tuple[Strain, StepCosts, Attainment] | Condition:
    """Of a replica whose gaps are shown to miss their objective; else the condition itself."""
    strain, gaps = report.strain, report.inter_token
    if strain is None or gaps is None or gaps.low_sample:
        return _unknown(type, "TooFewSamples", f"{report.name}: too little was measured.")
    if gaps.lower <= objective.bad_budget:
        message = f"{report.name}: {gaps.good_percent:.1f} % of gaps are within the objective."
        return Condition(type, Truth.FALSE, "GapsInTime", message)
    if strain.costs is None:
        message = f"{report.name}: what its steps cost is not known well enough yet."
        return _unknown(type, "NoModel", message)
    return strain, strain.costs, gaps


def _most_decodes(strain: Strain, costs: StepCosts, within_s: float) -> float:
    context_tokens = strain.kv_tokens / strain.num_decodes if strain.num_decodes else 0.0
    return law.batch_size_for_latency(costs, within_s, context_tokens)


def _room_tokens(strain: Strain, costs: StepCosts, within_s: float) -> float:
    """Prompt tokens that fit a step beside its decodes."""
    left_s = within_s - costs.step_s(strain.num_decodes, 0.0, strain.kv_tokens)
    return left_s / costs.prefill_s if costs.prefill_s > 0 else math.inf


def _advice(
    pool: InferencePool, report: ReplicaReport, knob: str, bounds: Bounds, fitting: int
) -> str:
    if pool.spec.aims(report.request_class).is_static:
        return "set scheduling: Continuous"
    if bounds.min > fitting:
        return f"lower {knob}.min to {fitting} or less"
    if pool.spec.mode == "Recommend":
        return f"set mode: Enforce, or lower {knob}.max to {fitting}"
    return f"it cannot be lowered now: {report.held}" if report.held else "it is being lowered"
