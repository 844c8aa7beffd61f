"""One replica's part of a plan: first sight, drift, bounds, outage, tuning; in that order. Pure.

What is ruled here, `policy_plan` makes into at most one policy, newer than any the engine was seen
to hold. Called by `plan` for each replica; knows the pool's spec and this replica's memory, and no
other replica but by the policy that a newcomer may start from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from chairlift_operator.batch_share import LendingInput, first_tokens_missed, lend
from chairlift_operator.decisions import Change, Health
from chairlift_operator.memory import Knobs, ReplicaMemory
from chairlift_operator.policy_changes import bounded, changes, clamped
from chairlift_operator.policy_plan import (
    FIRST_KNOBS,
    ReplicaPlan,
    Ruling,
    Situation,
    current_share,
    settle,
)
from chairlift_operator.readings import Readings, failure_of, read, take_in
from chairlift_operator.reports import report_of
from chairlift_operator.snapshot import PolicyReadback, ReplicaSnapshot
from chairlift_operator.tuning import TuningInput, tune
from chairlift_protocol.policy import Policy
from chairlift_protocol.wire import RequestClass

OUTAGE_S: Final = 60.0
OUTAGE_CUT: Final = 0.8
UNVERIFIED_TICKS: Final = 2


def plan_replica(here: Situation, memory: ReplicaMemory, seen: ReplicaSnapshot) -> ReplicaPlan:
    failure = failure_of(seen, memory.history, here.now_s)
    memory = take_in(memory, seen, failure, here.now_s)
    readings = read(memory, seen, here.aims.slo, failure, here.now_s)
    if readings.failure is None:
        memory = replace(memory, stepped_back=False)
    ruling = _rule(here, memory, seen, readings)
    report = report_of(ruling.memory, seen, readings, ruling.held, ruling.infeasible)
    if seen.policy is None:
        return ReplicaPlan(ruling.memory, report)
    return settle(here, ruling, seen.policy, report)


def _rule(
    here: Situation, memory: ReplicaMemory, seen: ReplicaSnapshot, readings: Readings
) -> Ruling:
    if seen.policy is None:
        return Ruling(memory, held=f"policy not readable: {seen.policy_failure or 'no answer'}")
    if seen.policy.desired.generation.term > here.term:
        theirs = seen.policy.desired.generation.term
        return Ruling(
            memory, held=f"obeys a newer controller (term {theirs}, this one is {here.term})"
        )
    if here.enforces:
        if memory.wanted is None:
            return _first_sight(here, memory, seen.policy)
        memory, settled = _verify(here, memory, memory.wanted, seen.policy)
        if settled is not None:
            return settled
    current = _current(memory, seen.policy)
    if here.aims.is_static:
        return _static(here, memory, seen.policy, current)
    if readings.failure is not None:
        return _outage(here, memory, seen.policy, readings, current)
    if readings.health is Health.IDLE:
        idle = _within_bounds(here, memory, seen.policy, current, held="idle")
        return _lent(here, idle, seen.policy, readings, settled=True)
    tuned, is_settled = _tuned(here, memory, seen.policy, seen, readings, current)
    return _lent(here, tuned, seen.policy, readings, is_settled)


def _first_sight(here: Situation, memory: ReplicaMemory, policy: PolicyReadback) -> Ruling:
    told = policy.desired
    if told.generation.counter > 0:  # an earlier controller's work is not thrown away
        start = Knobs(told.batch_size, told.step_tokens)
        reason = f"adopted from generation {told.generation.to_json()}"
    else:
        start = memory.last_good or here.start_knobs
        first = start == FIRST_KNOBS
        reason = "cautious first policy" if first else "first policy, from what was good before"
    if here.aims.is_static:
        start = Knobs(here.aims.batch_size.max, told.step_tokens)
        reason = "static scheduling, as the spec asks: nothing is tuned"
    knobs = clamped(here.aims, policy, start)
    return Ruling(memory, knobs, changes(told, knobs, reason, keep=True))


def _verify(
    here: Situation, memory: ReplicaMemory, wanted: Policy, policy: PolicyReadback
) -> tuple[ReplicaMemory, Ruling | None]:
    """Compare what was pushed with what was read back; on drift, push the same values again."""
    if policy.desired == wanted and policy.effective == wanted:
        return replace(memory, num_unverified=0), None
    memory = replace(memory, num_unverified=memory.num_unverified + 1)
    if policy.desired == wanted:
        return memory, Ruling(memory, held="the last policy is not yet in force")
    theirs = policy.desired.generation
    if theirs < wanted.generation:
        why = "the engine restarted, or the last change did not reach it"
    else:
        why = "another writer changed it"
    reason = f"set again: read back generation {theirs.to_json()}, {why}"
    knobs = clamped(here.aims, policy, Knobs(wanted.batch_size, wanted.step_tokens))
    told_before = memory.num_unverified > UNVERIFIED_TICKS
    moves = () if told_before else changes(policy.desired, knobs, reason, keep=True)
    return memory, Ruling(memory, knobs, moves, held=f"not verified: {why}")


def _outage(
    here: Situation,
    memory: ReplicaMemory,
    policy: PolicyReadback,
    readings: Readings,
    current: Knobs,
) -> Ruling:
    held = f"no usable metrics for {readings.age_s:.0f} s: {readings.failure}"
    if readings.age_s < OUTAGE_S or memory.stepped_back:
        return _within_bounds(here, memory, policy, current, held)
    good = memory.last_good or current
    # Shorter steps are safe whatever comes; fewer slots would keep requests waiting for nothing.
    cautious = min(current.step_tokens, int(OUTAGE_CUT * good.step_tokens))
    knobs = clamped(here.aims, policy, Knobs(current.batch_size, cautious))
    reason = f"{held}; four fifths of the last good, once"
    memory = replace(memory, stepped_back=True)
    return Ruling(memory, knobs, changes(current, knobs, reason), held)


def _within_bounds(
    here: Situation, memory: ReplicaMemory, policy: PolicyReadback, current: Knobs, held: str
) -> Ruling:
    """Bounds and objectives of the spec hold on every tick, even when nothing is known."""
    knobs = clamped(here.aims, policy, current)
    return Ruling(memory, knobs, changes(current, knobs, "bounds of the spec"), held)


def _static(
    here: Situation, memory: ReplicaMemory, policy: PolicyReadback, current: Knobs
) -> Ruling:
    """As large a batch as there may be; step tokens do nothing under static batching."""
    knobs = clamped(here.aims, policy, Knobs(here.aims.batch_size.max, current.step_tokens))
    moves = changes(current, knobs, "static scheduling takes the largest batch")
    return Ruling(memory, knobs, moves, held="static scheduling: nothing is tuned")


def _tuned(
    here: Situation,
    memory: ReplicaMemory,
    policy: PolicyReadback,
    seen: ReplicaSnapshot,
    readings: Readings,
    current: Knobs,
) -> tuple[Ruling, bool]:
    """The ruling, and whether step tokens and batch size are where the law wants them."""
    assert seen.sampled_at_s is not None
    aims, capacity = here.aims, policy.capacity
    share = current_share(here, memory, policy.desired)
    # A share that fell is what limits batch work; slots are not, and would cost first tokens.
    lends = share >= here.max_share and not first_tokens_missed(readings.served, aims.slo)
    outcome = tune(
        TuningInput(
            current=current,
            batch_bounds=bounded(aims.batch_size, capacity.batch_size),
            step_bounds=bounded(aims.step_tokens, capacity.step_tokens),
            objective=aims.slo.inter_token_latency,
            demand=readings.demand,
            model=memory.model,
            seen=readings.since_move,
            full_share=readings.full_share,
            recent=readings.just_now,
            kv_tokens=capacity.kv_tokens,
            preempting=readings.preempting,
            # A number that was no number casts doubt on the rest of its sample.
            may_grow=here.may_grow and not (seen.sample and seen.sample.rejected),
            state=memory.tuning,
            now_s=seen.sampled_at_s,
            lend_share=share if lends else 0.0,
        )
    )
    settled = not outcome.moves and not memory.model.is_contradicted
    ruling = Ruling(memory, outcome.knobs, outcome.moves, infeasible=outcome.infeasible)
    if not here.enforces:  # nothing moves, so there is no move to remember nor a trim to learn
        return ruling, settled
    memory = replace(memory, tuning=outcome.state)
    if any(move.after > move.before for move in outcome.moves):
        memory = replace(memory, model=replace(memory.model, warm=False))
    gaps, budget = readings.since_move, aims.slo.inter_token_latency.bad_budget
    if gaps is not None and not gaps.low_sample and gaps.bad_share <= budget:
        memory = replace(memory, last_good=current)
    return replace(ruling, memory=memory), settled


def _lent(
    here: Situation, ruling: Ruling, policy: PolicyReadback, readings: Readings, settled: bool
) -> Ruling:
    """What batch work may hold from now on, beside the knobs that were ruled."""
    memory = ruling.memory
    told = (memory.wanted or policy.desired).batch_class_share
    if here.request_class is RequestClass.BATCH or not here.max_share or not here.pool.spec.batch:
        return ruling  # nothing to lend, or nobody asked for limits on it
    lending = lend(
        LendingInput(
            current=current_share(here, memory, policy.desired),
            max_share=here.max_share,
            served=readings.served,
            slo=here.aims.slo,
            settled=settled,
            may_grow=here.may_grow,
            state=memory.lending,
            now_s=here.now_s,
        )
    )
    moves = ruling.moves
    if lending.share != told:
        moves = (*moves, Change("batchShare", told, lending.share, lending.reason))
    if here.enforces:
        memory = replace(memory, lending=lending.state)
    return replace(ruling, memory=memory, moves=moves, share=lending.share)


def _current(memory: ReplicaMemory, policy: PolicyReadback) -> Knobs:
    told = memory.wanted or policy.desired
    return Knobs(told.batch_size, told.step_tokens)
