"""What the controller's knobs are measured against: fixed ones, AIMD, bracketing, gradients.

Each is a pure function of the same snapshots behind the simulation's `Law`, and moves batch size
and step tokens of each replica by itself. Autoscalers are in `evaluate_scalers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from chairlift_operator.decisions import Action, SetPolicy
from chairlift_operator.exposition import EngineSample
from chairlift_operator.memory import Knobs
from chairlift_operator.policy_changes import next_generation
from chairlift_operator.policy_plan import thresholds_of
from chairlift_operator.snapshot import Phase, ReplicaSnapshot, Snapshot
from chairlift_operator.spec import InferencePool
from chairlift_operator.windows import History, ObjectiveKey, attainment_over
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.laws import Ruled

INTERACTIVE = RequestClass.INTERACTIVE
WINDOW_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One replica's recent samples. moved_at_s: readings before are of other knobs."""

    history: History = History()
    moved_at_s: float = -math.inf
    own: Any = None


class KnobRule(Protocol):
    def next(
        self, knobs: Knobs, seen: Seen, sample: EngineSample, now_s: float
    ) -> tuple[Knobs, Any]:
        """The knobs from now on, and what the rule remembers in `Seen.own`."""
        ...


@dataclass(frozen=True, slots=True)
class PerReplica:
    """A knob rule as a law: one replica at a time, inside the bounds of the spec."""

    pool: InferencePool
    rule_of: KnobRule

    def start(self) -> Mapping[str, Seen]:
        return {}

    def rule(self, snapshot: Snapshot, state: Mapping[str, Seen]) -> tuple[Ruled, Any]:
        after: dict[str, Seen] = {}
        actions: list[Action] = []
        for seen in snapshot.replicas:
            known = state.get(seen.name, Seen())
            after[seen.name] = known
            if seen.phase is not Phase.SERVING or seen.sample is None or seen.policy is None:
                continue
            history = known.history.with_sample(snapshot.taken_at_s, seen.sample)
            known = replace(known, history=history)
            told = seen.policy.desired
            knobs = Knobs(told.batch_size, told.step_tokens)
            wanted, own = self.rule_of.next(knobs, known, seen.sample, snapshot.taken_at_s)
            wanted = self._bounded(wanted)
            moved_at_s = known.moved_at_s if wanted == knobs else snapshot.taken_at_s
            after[seen.name] = replace(known, own=own, moved_at_s=moved_at_s)
            if wanted != knobs:
                actions.append(self._action(seen, wanted))
        return Ruled(tuple(actions)), after

    def _bounded(self, knobs: Knobs) -> Knobs:
        aims = self.pool.spec.aims(INTERACTIVE)
        batch_size = aims.batch_size.clamp(knobs.batch_size)
        return Knobs(batch_size, aims.step_tokens.clamp(max(knobs.step_tokens, batch_size)))

    def _action(self, seen: ReplicaSnapshot, knobs: Knobs) -> SetPolicy:
        assert seen.policy is not None
        told = seen.policy.desired
        policy = replace(
            told,
            generation=next_generation(1, None, told),
            batch_size=knobs.batch_size,
            step_tokens=knobs.step_tokens,
            chunk_tokens=knobs.step_tokens,
            slo=thresholds_of(self.pool.spec.aims(INTERACTIVE)),
        )
        return SetPolicy(seen.name, policy, shrinks=False)


@dataclass(frozen=True, slots=True)
class Fixed:
    knobs: Knobs

    def next(
        self, knobs: Knobs, seen: Seen, sample: EngineSample, now_s: float
    ) -> tuple[Knobs, None]:
        return self.knobs, None


@dataclass(frozen=True, slots=True)
class Aimd:
    """Adds while it is met and requests wait, cuts when more than the budget is late."""

    key: ObjectiveKey
    bad_budget: float
    add_batch: int = 4
    add_tokens: int = 32
    cut: float = 0.9

    def next(
        self, knobs: Knobs, seen: Seen, sample: EngineSample, now_s: float
    ) -> tuple[Knobs, None]:
        found = attainment_over([seen.history], self.key, WINDOW_S, now_s, seen.moved_at_s)
        if found is None:
            return knobs, None
        if found.bad_share > self.bad_budget:
            return _times(knobs, self.cut), None
        if not sample.num_waiting:
            return knobs, None
        return Knobs(knobs.batch_size + self.add_batch, knobs.step_tokens + self.add_tokens), None


@dataclass(frozen=True, slots=True)
class Pang:
    """Bracket search for the batch size on the mean time between tokens; step tokens stay."""

    target_s: float
    step_tokens: int = 512
    kv_tokens: float = math.inf
    most: int = 256
    widest: int = 16
    narrowed: int = 4

    def next(
        self, knobs: Knobs, seen: Seen, sample: EngineSample, now_s: float
    ) -> tuple[Knobs, Any]:
        low, high = seen.own or (1, self.most)
        mean_s = _mean_step_s(seen.history, now_s)
        batch = min(knobs.batch_size, self.most)
        if mean_s is None:
            return Knobs(batch, self.step_tokens), (low, high)
        if mean_s > 1.05 * self.target_s:
            low, high = max(1, low - self.narrowed), max(batch, low + self.widest)
        elif mean_s < 0.95 * self.target_s:
            low, high = max(1, min(batch, high - self.widest)), min(self.most, high + self.narrowed)
        else:
            low, high = max(1, batch - self.widest // 2), min(self.most, batch + self.widest // 2)
        wanted = (low + high) // 2
        running, used = sample.num_running or 0.0, (sample.kv_usage or 0.0) * self.kv_tokens
        if sample.num_waiting and running and used > 0:
            wanted = min(wanted, max(int(running), int(0.95 * self.kv_tokens / (used / running))))
        return Knobs(wanted, self.step_tokens), (low, high)


@dataclass(frozen=True, slots=True)
class Gradient2:
    """Netflix's: the limit follows the ratio of long-term to recent step time; step tokens stay."""

    step_tokens: int = 512

    def next(
        self, knobs: Knobs, seen: Seen, sample: EngineSample, now_s: float
    ) -> tuple[Knobs, Any]:
        short_s = _mean_step_s(seen.history, now_s, window_s=5.0)
        if short_s is None:
            return Knobs(knobs.batch_size, self.step_tokens), seen.own
        limit, long_s = seen.own or (float(knobs.batch_size), short_s)
        long_s += 0.05 * (short_s - long_s)
        if long_s / short_s > 2:
            long_s *= 0.9
        if (sample.num_running or 0.0) >= limit / 2:
            gradient = min(1.0, max(0.5, long_s / short_s))
            limit = max(1.0, 0.8 * limit + 0.2 * (gradient * limit + 4))
        return Knobs(int(limit), self.step_tokens), (limit, long_s)


def _times(knobs: Knobs, factor: float) -> Knobs:
    return Knobs(int(factor * knobs.batch_size), int(factor * knobs.step_tokens))


def _mean_step_s(history: History, now_s: float, window_s: float = WINDOW_S) -> float | None:
    window = history.within(window_s, now_s)
    steps, busy_s = window.increase("num_steps"), window.increase("step_seconds")
    return busy_s / steps if steps and busy_s else None
