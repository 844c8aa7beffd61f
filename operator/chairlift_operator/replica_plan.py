"""One replica's part of a plan: first sight, drift, bounds, outage, tuning; in that order. Pure.

Whatever is decided becomes at most one policy, newer than any the engine was seen to hold. Called
by `plan` for each replica; knows the pool's spec and this replica's memory, and no other replica
but by the policy that a newcomer may start from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from chairlift_operator.decisions import Decision, Health, ReplicaReport, SetPolicy
from chairlift_operator.memory import Knobs, ReplicaMemory
from chairlift_operator.policy_changes import (
    alike,
    bounded,
    changes,
    clamped,
    next_generation,
)
from chairlift_operator.readings import Readings, read, take_in
from chairlift_operator.reports import report_of
from chairlift_operator.snapshot import PolicyReadback, ReplicaSnapshot
from chairlift_operator.spec import InferencePool
from chairlift_operator.tuning import Move, TuningInput, tune
from chairlift_protocol.policy import Generation, Policy, SloThresholds

# Cautious: on unknown hardware a step of this size is slow at worst, never a freeze.
FIRST_KNOBS: Final = Knobs(batch_size=16, step_tokens=256)
# Batch-class work may use all that interactive work leaves, as long as a pool is all there is.
BATCH_SHARE: Final = 1.0
OUTAGE_S: Final = 60.0
OUTAGE_CUT: Final = 0.8
UNVERIFIED_TICKS: Final = 2


@dataclass(frozen=True, slots=True)
class Situation:
    """What is the same for every replica this tick.

    start_knobs: what a newcomer starts from. may_grow: False while the pool is only partly seen.
    """

    pool: InferencePool
    term: int
    now_s: float
    start_knobs: Knobs
    may_grow: bool = True

    @property
    def enforces(self) -> bool:
        return self.pool.spec.mode == "Enforce"


def first_policy(pool: InferencePool) -> Policy:
    """What a new engine starts with, so that its first steps are cautious too.

    Its generation is older than any that is pushed.
    """
    interactive = pool.spec.interactive
    step_tokens = interactive.step_tokens.clamp(FIRST_KNOBS.step_tokens)
    return Policy(
        generation=Generation(0, 0),
        batch_size=interactive.batch_size.clamp(FIRST_KNOBS.batch_size),
        step_tokens=step_tokens,
        chunk_tokens=step_tokens,
        batch_class_share=BATCH_SHARE,
        slo=thresholds_of(pool),
    )


def thresholds_of(pool: InferencePool) -> SloThresholds:
    slo = pool.spec.interactive.slo
    return SloThresholds(
        ttft_ms=slo.time_to_first_token.threshold_ms,
        itl_ms=slo.inter_token_latency.threshold_ms,
    )


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    memory: ReplicaMemory
    report: ReplicaReport
    decisions: tuple[Decision, ...] = ()
    action: SetPolicy | None = None


@dataclass(frozen=True, slots=True)
class _Ruling:
    """What one rule of the order settled: new knobs with reasons, or why nothing may move."""

    memory: ReplicaMemory
    knobs: Knobs | None = None
    moves: tuple[Move, ...] = ()
    held: str | None = None
    infeasible: bool = False


def plan_replica(here: Situation, memory: ReplicaMemory, seen: ReplicaSnapshot) -> ReplicaPlan:
    memory = take_in(memory, seen, here.now_s)
    readings = read(memory, seen, here.pool.spec.interactive.slo, here.now_s)
    if readings.failure is None:
        memory = replace(memory, stepped_back=False)
    ruling = _rule(here, memory, seen, readings)
    report = report_of(ruling.memory, seen, readings, ruling.held, ruling.infeasible)
    if ruling.knobs is None or seen.policy is None:
        return ReplicaPlan(ruling.memory, report)
    if not here.enforces:
        return _recommend(here, ruling, ruling.knobs, report)
    return _enforce(here, ruling, ruling.knobs, seen.policy, report)


def _rule(
    here: Situation, memory: ReplicaMemory, seen: ReplicaSnapshot, readings: Readings
) -> _Ruling:
    if seen.policy is None:
        return _Ruling(memory, held=f"policy not readable: {seen.policy_failure or 'no answer'}")
    if seen.policy.desired.generation.term > here.term:
        theirs = seen.policy.desired.generation.term
        return _Ruling(
            memory, held=f"obeys a newer controller (term {theirs}, this one is {here.term})"
        )
    if here.enforces:
        if memory.wanted is None:
            return _first_sight(here, memory, seen.policy)
        memory, settled = _verify(here, memory, memory.wanted, seen.policy)
        if settled is not None:
            return settled
    current = _current(memory, seen.policy)
    if readings.failure is not None:
        return _outage(here, memory, seen.policy, readings, current)
    if readings.health is Health.IDLE:
        return _within_bounds(here, memory, seen.policy, current, held="idle")
    return _tuned(here, memory, seen, readings, current)


def _first_sight(here: Situation, memory: ReplicaMemory, policy: PolicyReadback) -> _Ruling:
    told = policy.desired
    if told.generation.counter > 0:  # an earlier controller's work is not thrown away
        start = Knobs(told.batch_size, told.step_tokens)
        reason = f"adopted from generation {told.generation.to_json()}"
    else:
        start = memory.last_good or here.start_knobs
        first = start == FIRST_KNOBS
        reason = "cautious first policy" if first else "first policy, from what was good before"
    knobs = clamped(here.pool, policy, start)
    return _Ruling(memory, knobs, changes(told, knobs, reason, keep=True))


def _verify(
    here: Situation, memory: ReplicaMemory, wanted: Policy, policy: PolicyReadback
) -> tuple[ReplicaMemory, _Ruling | None]:
    """Compare what was pushed with what was read back; on drift, push the same values again."""
    if policy.desired == wanted and policy.effective == wanted:
        return replace(memory, num_unverified=0), None
    memory = replace(memory, num_unverified=memory.num_unverified + 1)
    if policy.desired == wanted:
        return memory, _Ruling(memory, held="the last policy is not yet in force")
    theirs = policy.desired.generation
    if theirs < wanted.generation:
        why = "the engine restarted, or the last change did not reach it"
    else:
        why = "another writer changed it"
    reason = f"set again: read back generation {theirs.to_json()}, {why}"
    knobs = clamped(here.pool, policy, Knobs(wanted.batch_size, wanted.step_tokens))
    told_before = memory.num_unverified > UNVERIFIED_TICKS
    moves = () if told_before else changes(policy.desired, knobs, reason, keep=True)
    return memory, _Ruling(memory, knobs, moves, held=f"not verified: {why}")


def _outage(
    here: Situation,
    memory: ReplicaMemory,
    policy: PolicyReadback,
    readings: Readings,
    current: Knobs,
) -> _Ruling:
    held = f"no usable metrics for {readings.age_s:.0f} s: {readings.failure}"
    if readings.age_s < OUTAGE_S or memory.stepped_back:
        return _within_bounds(here, memory, policy, current, held)
    good = memory.last_good or current
    cautious = Knobs(
        min(current.batch_size, int(OUTAGE_CUT * good.batch_size)),
        min(current.step_tokens, int(OUTAGE_CUT * good.step_tokens)),
    )
    knobs = clamped(here.pool, policy, cautious)
    reason = f"{held}; four fifths of the last good, once"
    memory = replace(memory, stepped_back=True)
    return _Ruling(memory, knobs, changes(current, knobs, reason), held)


def _within_bounds(
    here: Situation, memory: ReplicaMemory, policy: PolicyReadback, current: Knobs, held: str
) -> _Ruling:
    """Bounds and objectives of the spec hold on every tick, even when nothing is known."""
    knobs = clamped(here.pool, policy, current)
    return _Ruling(memory, knobs, changes(current, knobs, "bounds of the spec"), held)


def _tuned(
    here: Situation,
    memory: ReplicaMemory,
    seen: ReplicaSnapshot,
    readings: Readings,
    current: Knobs,
) -> _Ruling:
    assert seen.policy is not None and seen.sampled_at_s is not None
    interactive, capacity = here.pool.spec.interactive, seen.policy.capacity
    outcome = tune(
        TuningInput(
            current=current,
            batch_bounds=bounded(interactive.batch_size, capacity.batch_size),
            step_bounds=bounded(interactive.step_tokens, capacity.step_tokens),
            objective=interactive.slo.inter_token_latency,
            demand=readings.demand,
            model=memory.model,
            seen=readings.since_move,
            recent=readings.just_now,
            kv_tokens=capacity.kv_tokens,
            preempting=readings.preempting,
            # A number that was no number casts doubt on the rest of its sample.
            may_grow=here.may_grow and not (seen.sample and seen.sample.rejected),
            state=memory.tuning,
            now_s=seen.sampled_at_s,
        )
    )
    if not here.enforces:  # nothing moves, so there is no move to remember nor a trim to learn
        return _Ruling(memory, outcome.knobs, outcome.moves, infeasible=outcome.infeasible)
    memory = replace(memory, tuning=outcome.state)
    if any(move.after > move.before for move in outcome.moves):
        memory = replace(memory, model=replace(memory.model, warm=False))
    gaps, budget = readings.since_move, interactive.slo.inter_token_latency.bad_budget
    if gaps is not None and not gaps.low_sample and gaps.bad_share <= budget:
        memory = replace(memory, last_good=current)
    return _Ruling(memory, outcome.knobs, outcome.moves, infeasible=outcome.infeasible)


def _enforce(
    here: Situation, ruling: _Ruling, knobs: Knobs, readback: PolicyReadback, report: ReplicaReport
) -> ReplicaPlan:
    memory, told = ruling.memory, readback.desired
    policy = replace(
        told,
        batch_size=knobs.batch_size,
        step_tokens=knobs.step_tokens,
        chunk_tokens=knobs.step_tokens,  # one long prompt may use all that decodes leave
        batch_class_share=BATCH_SHARE,
        slo=thresholds_of(here.pool),
        scheduling="continuous",
    )
    if policy == told and told.generation.term == here.term:
        return ReplicaPlan(replace(memory, wanted=told), report)
    policy = replace(policy, generation=next_generation(here.term, memory.wanted, told))
    before = memory.wanted or told
    latest = memory.history.latest
    tuning = replace(memory.tuning, moved_at_s=latest.at_s if latest else here.now_s)
    memory = replace(memory, wanted=policy, pushed_at_s=here.now_s, tuning=tuning)
    shrinks = policy.batch_size <= before.batch_size and policy.step_tokens <= before.step_tokens
    moves = ruling.moves
    if told.slo != policy.slo and not moves:
        slo = policy.slo
        reason = f"objectives are now TTFT {slo.ttft_ms:g} ms, ITL {slo.itl_ms:g} ms"
        moves = (Move("stepTokens", knobs.step_tokens, knobs.step_tokens, reason),)
    return ReplicaPlan(
        memory,
        replace(report, batch_size=knobs.batch_size, step_tokens=knobs.step_tokens),
        _decisions(here, report.name, moves),
        SetPolicy(report.name, policy, shrinks),
    )


def _recommend(
    here: Situation, ruling: _Ruling, knobs: Knobs, report: ReplicaReport
) -> ReplicaPlan:
    """Say it once; the engine keeps its values, so the same advice would return every tick."""
    said = ruling.memory.recommended
    if not ruling.moves or (said is not None and alike(said, knobs)):
        return ReplicaPlan(ruling.memory, report)
    memory = replace(ruling.memory, recommended=knobs)
    return ReplicaPlan(memory, report, _decisions(here, report.name, ruling.moves))


def _decisions(here: Situation, replica: str, moves: tuple[Move, ...]) -> tuple[Decision, ...]:
    return tuple(
        Decision(here.now_s, replica, m.field, m.before, m.after, m.reason, here.enforces)
        for m in moves
    )


def _current(memory: ReplicaMemory, policy: PolicyReadback) -> Knobs:
    told = memory.wanted or policy.desired
    return Knobs(told.batch_size, told.step_tokens)
