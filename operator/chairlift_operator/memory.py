"""What the planner carries from one tick to the next. Frozen: a tick takes one and returns another.

Everything here can be rebuilt by replaying the journal from its start; `start` is the only way in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from chairlift_operator.arrivals import Arrivals
from chairlift_operator.batch_share import LendingState
from chairlift_operator.law import Bracket, LastMove
from chairlift_operator.replica_law import FIRST_WARM_UP_S, ScaleState
from chairlift_operator.snapshot import GatewaySnapshot
from chairlift_operator.step_time import StepCosts, StepTimeModel
from chairlift_operator.windows import History
from chairlift_protocol.policy import Policy
from chairlift_protocol.wire import RequestClass

_A_STEP: Final = (16.0, 512.0, 16_384.0)  # decodes, prefill tokens, KV tokens: to compare costs at


@dataclass(frozen=True, slots=True)
class Knobs:
    batch_size: int
    step_tokens: int


@dataclass(frozen=True, slots=True)
class TuningState:
    """The law's own state for one replica.

    kappa: trim of the latency target, 0.7 to 1. moved_at_s: since when readings are of these knobs.
    bracketed_ms: the objective that the bracket was found under.
    """

    kappa: float = 1.0
    trimmed_at_s: float = -math.inf
    moved_at_s: float = -math.inf
    batch_move: LastMove | None = None
    step_move: LastMove | None = None
    bracket: Bracket = Bracket()
    bracketed_ms: float = math.inf


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """One engine as the planner knows it.

    wanted: the policy last pushed or adopted; None before first sight.
    learned_at_s: up to which sample the model has learned.
    num_unverified: ticks in a row in which the last push was not read back.
    stepped_back: the one cautious step of an outage was taken.
    kv_tokens: its KV memory, 0 before it was read.
    """

    request_class: RequestClass = RequestClass.INTERACTIVE
    history: History = History()
    model: StepTimeModel = StepTimeModel()
    learned_at_s: float = -math.inf
    wanted: Policy | None = None
    num_unverified: int = 0
    last_good: Knobs | None = None
    recommended: Knobs | None = None
    tuning: TuningState = TuningState()
    lending: LendingState = LendingState()
    first_seen_s: float = 0.0
    last_seen_s: float = 0.0
    num_rejected_values: int = 0
    stepped_back: bool = False
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScalingMemory:
    """starting: since when replicas were seen to start. warm_up_s: how long that takes.

    grown_at_s: when the newest interactive replica became ready.
    told: the counts last decided, and whether they were to be enforced: said once, not each tick.
    """

    arrivals: Arrivals = Arrivals()
    states: Mapping[RequestClass, ScaleState] = field(default_factory=lambda: MappingProxyType({}))
    starting: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    told: Mapping[RequestClass, tuple[int, bool]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    warm_up_s: float = FIRST_WARM_UP_S
    grown_at_s: float = -math.inf

    def of(self, request_class: RequestClass) -> ScaleState:
        return self.states.get(request_class, ScaleState())


@dataclass(frozen=True, slots=True)
class Memory:
    """term: which leadership writes; policies of an older one are refused by engines.

    prior: coefficients that a new replica's model starts from, None to learn cold: what this
    pool's replicas learned last, or what was known before there were any.
    hardware: what step times depend on by the spec, None before the first plan. hardware_since_s:
    when the spec last named another; who was there before may still run on that.
    """

    term: int = 1
    prior: StepCosts | None = None
    hardware: str | None = None
    hardware_since_s: float = -math.inf
    replicas: Mapping[str, ReplicaMemory] = field(default_factory=lambda: MappingProxyType({}))
    scaling: ScalingMemory = ScalingMemory()

    @classmethod
    def start(cls, term: int = 1, prior: StepCosts | None = None) -> Memory:
        return cls(term=term, prior=prior)

    def with_arrivals(self, gateway: GatewaySnapshot) -> Memory:
        """What a gateway said between two plans."""
        arrivals = self.scaling.arrivals.with_snapshot(gateway)
        return replace(self, scaling=replace(self.scaling, arrivals=arrivals))

    def on(self, hardware: str, now_s: float) -> Memory:
        """What was learned on other hardware is no prior for this."""
        if self.hardware is None or self.hardware == hardware:
            return replace(self, hardware=hardware)
        return replace(self, prior=None, hardware=hardware, hardware_since_s=now_s)

    @property
    def learned(self) -> StepCosts | None:
        """The step time that replicas have learned: the slowest's, so that the next is careful."""
        own = [r for r in self.replicas.values() if r.first_seen_s >= self.hardware_since_s]
        known = [r.model.costs for r in own if r.model.stands]
        return max(
            (costs for costs in known if costs is not None),
            key=lambda costs: costs.step_s(*_A_STEP),
            default=None,
        )

    def of(self, replica: str, now_s: float) -> ReplicaMemory:
        known = self.replicas.get(replica)
        if known is not None:
            return known
        model = StepTimeModel() if self.prior is None else StepTimeModel.from_prior(self.prior)
        return ReplicaMemory(model=model, first_seen_s=now_s, last_seen_s=now_s)
