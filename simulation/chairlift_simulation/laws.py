"""Whoever moves a pool's knobs: one pure function from what is seen, and what it remembers.

`ChairliftLaw` is the operator's own plan. Baselines of the evaluation are others of the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from chairlift_operator.decisions import Action, Decision
from chairlift_operator.memory import Memory
from chairlift_operator.plan import Plan, plan
from chairlift_operator.snapshot import Snapshot
from chairlift_operator.spec import InferencePool
from chairlift_operator.step_time import StepCosts


@dataclass(frozen=True, slots=True)
class Ruled:
    """plan: the whole of it, where the law is the operator's."""

    actions: tuple[Action, ...] = ()
    decisions: tuple[Decision, ...] = ()
    plan: Plan | None = None


class Law(Protocol):
    """Pure: the same snapshot and state give the same outcome."""

    def start(self) -> Any:
        """What it remembers before it has seen anything."""
        ...

    def rule(self, snapshot: Snapshot, state: Any) -> tuple[Ruled, Any]: ...


@dataclass(frozen=True, slots=True)
class ChairliftLaw:
    """prior: what the step-time model starts from; None to learn cold."""

    pool: InferencePool
    prior: StepCosts | None = None
    term: int = 1

    def start(self) -> Memory:
        return Memory.start(self.term, self.prior)

    def rule(self, snapshot: Snapshot, state: Memory) -> tuple[Ruled, Memory]:
        made = plan(self.pool, snapshot, state, snapshot.taken_at_s)
        return Ruled(made.actions, made.decisions, made), made.memory


class NoLaw:
    """Whatever the engines started with stays."""

    def start(self) -> None:
        return None

    def rule(self, snapshot: Snapshot, state: None) -> tuple[Ruled, None]:
        return Ruled(), None
