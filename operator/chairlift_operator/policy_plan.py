"""From a ruling for one replica to the policy it shall hold, and the sentences about it. Pure.

Called by `replica_plan`, whose rulings these are, and by whoever starts an engine, for its first
policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from chairlift_operator.decisions import Change, Decision, ReplicaReport, SetPolicy
from chairlift_operator.memory import Knobs, ReplicaMemory
from chairlift_operator.policy_changes import alike, next_generation
from chairlift_operator.snapshot import PolicyReadback
from chairlift_operator.spec import Aims, InferencePool
from chairlift_protocol.policy import Generation, Policy, SloThresholds, TenantPolicy
from chairlift_protocol.wire import RequestClass

# Cautious: on unknown hardware a step of this size is slow at worst, never a freeze.
FIRST_KNOBS: Final = Knobs(batch_size=16, step_tokens=256)
TOLD_TENANTS: Final = 5  # by name in a sentence


@dataclass(frozen=True, slots=True)
class Situation:
    """What is the same this tick for every replica of one class.

    start_knobs: what a newcomer starts from. may_grow: False while the pool is only partly seen.
    weights: of tenants; None leaves them.
    """

    pool: InferencePool
    term: int
    now_s: float
    start_knobs: Knobs
    may_grow: bool = True
    request_class: RequestClass = RequestClass.INTERACTIVE
    weights: Mapping[str, float] | None = None

    @property
    def enforces(self) -> bool:
        return self.pool.spec.mode == "Enforce"

    @property
    def aims(self) -> Aims:
        return self.pool.spec.aims(self.request_class)

    @property
    def max_share(self) -> float:
        return max_share(self.pool, self.request_class)


@dataclass(frozen=True, slots=True)
class Ruling:
    """What one rule of the order settled: new values with reasons, or why nothing may move.

    share: what batch work may hold; None leaves it, within its bound.
    """

    memory: ReplicaMemory
    knobs: Knobs | None = None
    moves: tuple[Change, ...] = ()
    held: str | None = None
    infeasible: bool = False
    share: float | None = None


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    memory: ReplicaMemory
    report: ReplicaReport
    decisions: tuple[Decision, ...] = ()
    action: SetPolicy | None = None


def max_share(pool: InferencePool, request_class: RequestClass) -> float:
    return 1.0 if request_class is RequestClass.BATCH else pool.spec.max_batch_share


def first_policy(
    pool: InferencePool, request_class: RequestClass = RequestClass.INTERACTIVE
) -> Policy:
    """What a new engine starts with, so that its first steps are cautious too.

    Its generation is older than any that is pushed.
    """
    aims = pool.spec.aims(request_class)
    step_tokens = aims.step_tokens.clamp(FIRST_KNOBS.step_tokens)
    batch_size = aims.batch_size.max if aims.is_static else FIRST_KNOBS.batch_size
    return Policy(
        generation=Generation(0, 0),
        batch_size=aims.batch_size.clamp(batch_size),
        step_tokens=step_tokens,
        chunk_tokens=step_tokens,
        batch_class_share=max_share(pool, request_class),
        slo=thresholds_of(aims),
        scheduling=scheduling_of(aims),
    )


def thresholds_of(aims: Aims) -> SloThresholds:
    return SloThresholds(
        ttft_ms=aims.slo.time_to_first_token.threshold_ms,
        itl_ms=aims.slo.inter_token_latency.threshold_ms,
    )


def scheduling_of(aims: Aims) -> str:
    return "static" if aims.is_static else "continuous"


def current_share(here: Situation, memory: ReplicaMemory, told: Policy) -> float:
    """What batch work may hold now, within the spec's bound; at first sight, all of that bound."""
    if memory.wanted is None and told.generation.counter == 0:
        return here.max_share
    return min((memory.wanted or told).batch_class_share, here.max_share)


def settle(
    here: Situation, ruling: Ruling, readback: PolicyReadback, report: ReplicaReport
) -> ReplicaPlan:
    """The plan that a ruling amounts to."""
    told, knobs = readback.desired, ruling.knobs
    if knobs is None:
        return ReplicaPlan(ruling.memory, report)
    share = ruling.share
    if share is None:
        share = current_share(here, ruling.memory, told)
    policy = replace(
        told,
        batch_size=knobs.batch_size,
        step_tokens=knobs.step_tokens,
        chunk_tokens=knobs.step_tokens,  # one long prompt may use all that decodes leave
        batch_class_share=share,
        slo=thresholds_of(here.aims),
        scheduling=scheduling_of(here.aims),
        tenants=_weighted(told, here.weights),
    )
    ruling = replace(ruling, moves=(*ruling.moves, *_untold(here, ruling, told, policy)))
    if here.enforces:
        return _enforce(here, ruling, policy, told, report)
    return _recommend(here, ruling, knobs, report)


def _weighted(told: Policy, weights: Mapping[str, float] | None) -> Mapping[str, TenantPolicy]:
    """What else an engine was told of tenants stays."""
    if weights is None:
        return told.tenants
    usual = TenantPolicy()
    found = {
        name: replace(told.tenants.get(name, usual), weight=weights.get(name, usual.weight))
        for name in sorted(weights.keys() | told.tenants.keys())
    }
    return {name: tenant for name, tenant in found.items() if tenant != usual}


def _told_weights(policy: Policy) -> str:
    told = [f"{name} {tenant.weight:g}" for name, tenant in policy.tenants.items()]
    more = [f"{len(told) - TOLD_TENANTS} more"] if len(told) > TOLD_TENANTS else []
    return ", ".join(told[:TOLD_TENANTS] + more) or "all 1"


def _untold(here: Situation, ruling: Ruling, told: Policy, policy: Policy) -> list[Change]:
    """Changes that no rule gave a reason for: the spec asks for them."""
    before = ruling.memory.wanted or told
    fields = {move.field for move in ruling.moves}
    changes: list[Change] = []
    if before.batch_class_share != policy.batch_class_share and "batchShare" not in fields:
        shares = (before.batch_class_share, policy.batch_class_share)
        changes.append(Change("batchShare", *shares, "bounds of the spec"))
    if before.scheduling != policy.scheduling:
        static = "static: the baseline, nothing is tuned"
        reason = static if here.aims.is_static else "continuous: batch size and step tokens follow"
        modes = (before.scheduling, policy.scheduling)
        changes.append(Change("scheduling", *modes, f"the spec asks for {reason}"))
    if before.tenants != policy.tenants:
        weights = (_told_weights(before), _told_weights(policy))
        changes.append(Change("tenantWeights", *weights, "the tenants' quotas ask for it"))
    if told.slo != policy.slo and not ruling.moves and not changes:
        slo = policy.slo
        reason = f"objectives are now TTFT {slo.ttft_ms:g} ms, ITL {slo.itl_ms:g} ms"
        changes.append(Change("stepTokens", policy.step_tokens, policy.step_tokens, reason))
    return changes


def _enforce(
    here: Situation, ruling: Ruling, policy: Policy, told: Policy, report: ReplicaReport
) -> ReplicaPlan:
    memory = ruling.memory
    if policy == told and told.generation.term == here.term:
        return ReplicaPlan(replace(memory, wanted=told), report)
    policy = replace(policy, generation=next_generation(here.term, memory.wanted, told))
    before = memory.wanted or told
    latest = memory.history.latest
    tuning = replace(memory.tuning, moved_at_s=latest.at_s if latest else here.now_s)
    memory = replace(memory, wanted=policy, tuning=tuning)
    report = replace(
        report,
        batch_size=policy.batch_size,
        step_tokens=policy.step_tokens,
        batch_share=policy.batch_class_share,
    )
    action = SetPolicy(report.name, policy, _shrinks(before, policy))
    return ReplicaPlan(memory, report, _decisions(here, report.name, ruling.moves), action)


def _shrinks(before: Policy, after: Policy) -> bool:
    return (
        after.batch_size <= before.batch_size
        and after.step_tokens <= before.step_tokens
        and after.batch_class_share <= before.batch_class_share
    )


def _recommend(here: Situation, ruling: Ruling, knobs: Knobs, report: ReplicaReport) -> ReplicaPlan:
    """Say it once; the engine keeps its values, so the same advice would return every tick."""
    said = ruling.memory.recommended
    if not ruling.moves or (said is not None and alike(said, knobs)):
        return ReplicaPlan(ruling.memory, report)
    memory = replace(ruling.memory, recommended=knobs)
    return ReplicaPlan(memory, report, _decisions(here, report.name, ruling.moves))


def _decisions(here: Situation, replica: str, moves: tuple[Change, ...]) -> tuple[Decision, ...]:
    return tuple(
        Decision(here.now_s, replica, m.field, m.before, m.after, m.reason, here.enforces)
        for m in moves
    )
