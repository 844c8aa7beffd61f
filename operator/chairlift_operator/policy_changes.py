"""Small arithmetic on policies: bounds, generations, and a change as moves with a reason. Pure."""

from __future__ import annotations

from chairlift_operator.law import DEAD_BAND
from chairlift_operator.memory import Knobs
from chairlift_operator.snapshot import PolicyReadback
from chairlift_operator.spec import Aims
from chairlift_operator.spec_values import Bounds
from chairlift_operator.tuning import Move
from chairlift_protocol.policy import Generation, Policy


def next_generation(term: int, wanted: Policy | None, told: Policy) -> Generation:
    known = [told.generation] if wanted is None else [told.generation, wanted.generation]
    return Generation(term, 1 + max((g.counter for g in known if g.term == term), default=0))


def bounded(bounds: Bounds, capacity: int) -> Bounds:
    return Bounds(min(bounds.min, capacity), min(bounds.max, capacity))


def clamped(aims: Aims, policy: PolicyReadback, knobs: Knobs) -> Knobs:
    capacity = policy.capacity
    return Knobs(
        bounded(aims.batch_size, capacity.batch_size).clamp(knobs.batch_size),
        bounded(aims.step_tokens, capacity.step_tokens).clamp(knobs.step_tokens),
    )


def changes(
    before: Knobs | Policy, after: Knobs, reason: str, keep: bool = False
) -> tuple[Move, ...]:
    """Moves from one pair of values to another; with `keep`, an unchanged pair is told as well."""
    moves = (
        Move("batchSize", before.batch_size, after.batch_size, reason),
        Move("stepTokens", before.step_tokens, after.step_tokens, reason),
    )
    changed = tuple(m for m in moves if m.before != m.after)
    return changed or (moves[1:] if keep else ())


def alike(one: Knobs, other: Knobs) -> bool:
    return all(
        abs(a - b) <= DEAD_BAND * a
        for a, b in (
            (one.batch_size, other.batch_size),
            (one.step_tokens, other.step_tokens),
        )
    )
