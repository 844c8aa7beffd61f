"""Metric faults: what a law is shown instead of what is, for a while.

A `Distortion` remembers the snapshots that it has seen, for delays; otherwise pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from chairlift_operator.exposition import EngineSample
from chairlift_operator.snapshot import GatewaySnapshot, ReplicaSnapshot, Snapshot


class FaultKind(StrEnum):
    NAN = "nan"
    STALE = "stale"
    HALF_MISSING = "half-missing"
    RESET = "counter-reset"
    DELAY = "delay"
    DOWN = "down"


DURATION_S = {
    FaultKind.NAN: 120.0,
    FaultKind.STALE: 120.0,
    FaultKind.HALF_MISSING: 120.0,
    FaultKind.RESET: 5.0,
    FaultKind.DELAY: 120.0,
    FaultKind.DOWN: 300.0,
}
DELAY_S = 30.0
# Under these nothing may grow and no replica may go; a counter that begins anew is no blindness.
BLINDING = frozenset(FaultKind) - {FaultKind.RESET}


@dataclass(slots=True)
class Distortion:
    """Used for one run."""

    kind: FaultKind
    from_s: float
    past: list[Snapshot] = field(default_factory=list)

    @property
    def until_s(self) -> float:
        return self.from_s + DURATION_S[self.kind]

    def __call__(self, snapshot: Snapshot) -> Snapshot:
        self.past.append(snapshot)
        now_s = snapshot.taken_at_s
        if self.kind is FaultKind.RESET:
            return self._reset(snapshot) if now_s >= self.from_s else snapshot
        if not self.from_s <= now_s < self.until_s:
            return snapshot
        if self.kind is FaultKind.DOWN:
            gateway = GatewaySnapshot(failure="connection refused")
            return _each(replace(snapshot, gateway=gateway), _missing)
        if self.kind is FaultKind.STALE:
            return self._as_of(snapshot, self.from_s)
        if self.kind is FaultKind.DELAY:
            return self._as_of(snapshot, now_s - DELAY_S)
        if self.kind is FaultKind.NAN:
            return _each(snapshot, _nan)
        names = sorted(seen.name for seen in snapshot.replicas)
        hit = set(names[: math.ceil(len(names) / 2)])
        return _each(snapshot, lambda seen: _missing(seen) if seen.name in hit else seen)

    def _as_of(self, snapshot: Snapshot, at_s: float) -> Snapshot:
        """The samples of then; policies are read from the engines and are of now."""
        then = max((s for s in self.past if s.taken_at_s <= at_s), key=lambda s: s.taken_at_s)
        old = {seen.name: seen for seen in then.replicas}

        def aged(seen: ReplicaSnapshot) -> ReplicaSnapshot:
            before = old.get(seen.name)
            if before is None:
                return _missing(seen)
            return replace(seen, sample=before.sample, sampled_at_s=before.sampled_at_s)

        return _each(snapshot, aged)

    def _reset(self, snapshot: Snapshot) -> Snapshot:
        """Counters go on from zero, as after a restart of the process that counts."""
        then = next(s for s in self.past if s.taken_at_s >= self.from_s)
        before = {seen.name: seen.sample for seen in then.replicas}

        def since(seen: ReplicaSnapshot) -> ReplicaSnapshot:
            first = before.get(seen.name)
            if first is None or seen.sample is None:
                return seen
            return replace(seen, sample=_minus(seen.sample, first))

        return _each(snapshot, since)


_COUNTERS = (
    "step_seconds", "num_steps", "step_decode_seqs", "step_prefill_tokens", "step_kv_tokens",
    "prompt_tokens", "generation_tokens", "num_preemptions", "num_finished",
)  # fmt: skip


def _each(snapshot: Snapshot, change: Callable[[ReplicaSnapshot], ReplicaSnapshot]) -> Snapshot:
    return replace(snapshot, replicas=tuple(change(seen) for seen in snapshot.replicas))


def _missing(seen: ReplicaSnapshot) -> ReplicaSnapshot:
    return replace(seen, sample=None, sampled_at_s=None, scrape_failure="connection refused")


def _nan(seen: ReplicaSnapshot) -> ReplicaSnapshot:
    """As the exposition's reader leaves it: None, and named."""
    if seen.sample is None:
        return seen
    blank = EngineSample(
        rejected=tuple(sorted(seen.sample.missing or EngineSample().missing)),
        policy_generation=seen.sample.policy_generation,
    )
    return replace(seen, sample=blank)


def _minus(sample: EngineSample, first: EngineSample) -> EngineSample:
    values = {name: getattr(sample, name) - getattr(first, name) for name in _COUNTERS}
    slo = {(c.objective, c.threshold_ms, c.request_class): c for c in first.slo_counts}
    counts = []
    for count in sample.slo_counts:
        was = slo.get((count.objective, count.threshold_ms, count.request_class))
        if was is not None and count.num_good is not None and count.num_bad is not None:
            good = count.num_good - (was.num_good or 0.0)
            count = replace(count, num_good=good, num_bad=count.num_bad - (was.num_bad or 0.0))
        counts.append(count)
    return replace(sample, slo_counts=tuple(counts), **values)
