"""What a plan says: actions to perform, decisions with their reasons, and how a pool stands.

Values only; made by `plan`, performed by `apply`, shown by the command line and by status.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from chairlift_operator.signals import Signal
from chairlift_operator.snapshot import ENGINE_SOURCE, Phase
from chairlift_operator.step_time import StepCosts
from chairlift_operator.windows import Attainment
from chairlift_protocol.policy import Policy
from chairlift_protocol.wire import RequestClass


class Health(StrEnum):
    """How far a pool's measurements can be trusted this tick."""

    OK = "OK"
    IDLE = "IDLE"
    LOW_SAMPLE = "LOW_SAMPLE"
    PARTIAL = "PARTIAL"
    STALE = "STALE"
    MISSING = "MISSING"


BLIND: Final = (Health.STALE, Health.MISSING)


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """Write a policy to one replica; nothing restarts."""

    replica: str
    policy: Policy
    shrinks: bool

    @property
    def target(self) -> str:
        return self.replica


@dataclass(frozen=True, slots=True)
class SetReplicas:
    """Have so many replicas of a class. victims: those that go, drained first; none when it grows.

    drain_timeout_s: how long the requests of a victim may still run.
    """

    request_class: RequestClass
    count: int
    victims: tuple[str, ...]
    reason: str
    drain_timeout_s: float

    @property
    def shrinks(self) -> bool:
        return bool(self.victims)

    @property
    def target(self) -> str:
        return self.request_class.value


Action = SetPolicy | SetReplicas
Setting = int | float | str
WORDS: Final = {
    "batchSize": "batch size",
    "stepTokens": "step tokens",
    "batchShare": "batch share",
    "scheduling": "scheduling",
    "tenantWeights": "weights of tenants",
    "replicas": "replicas",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One value of a policy and why it changes. field is as the user's spec spells it."""

    field: str
    before: Setting
    after: Setting
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """One change and why. enforced is False in Recommend mode: said, not done."""

    at_s: float
    replica: str
    field: str
    before: Setting
    after: Setting
    reason: str
    enforced: bool = True

    @property
    def sentence(self) -> str:
        before, after = _shown(self.before), _shown(self.after)
        change = f"{after} kept" if before == after else f"{before}→{after}"
        return f"{WORDS[self.field]} {change}: {self.reason}"


def _shown(setting: Setting) -> str:
    return f"{setting:g}" if isinstance(setting, float) else str(setting)


@dataclass(frozen=True, slots=True)
class NamedSignal:
    """A measurement the controller used, and what it did because of it."""

    name: str
    signal: Signal
    effect: str


class Truth(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class Condition:
    """As in a Kubernetes status: reason is one CamelCase word, message says what to check."""

    type: str
    status: Truth
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Strain:
    """What a replica's steps were made of while its gaps were counted; means of a step.

    costs: what such steps cost; None where no model can be trusted to tell.
    prompt_tokens: mean of the prompts computed; None without any.
    step_tokens: the most that a step now computes; None under static batching, which has no bound.
    """

    num_decodes: float
    prefill_tokens: float
    kv_tokens: float
    costs: StepCosts | None
    prompt_tokens: float | None
    step_tokens: int | None


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Who holds the slots of a replica. tenant: who held most of them in nearly every sample of a
    minute, while others waited; None where nobody did."""

    tenant: str | None
    num_held: float
    num_running: float
    num_others_waiting: float


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica as a live view shows it. held: why nothing may move, None when it may."""

    name: str
    ready: bool
    health: Health
    request_class: RequestClass = RequestClass.INTERACTIVE
    phase: Phase = Phase.SERVING
    held: str | None = None
    batch_share: float | None = None
    batch_size: int | None = None
    step_tokens: int | None = None
    num_running: float | None = None
    num_waiting: float | None = None
    num_borrowing: float = 0.0
    num_borrowing_waiting: float = 0.0
    kv_usage: float | None = None
    step_s: float | None = None
    output_tokens_per_s: float | None = None
    inter_token: Attainment | None = None
    first_token: Attainment | None = None
    costs: StepCosts | None = None
    kappa: float = 1.0
    num_unverified: int = 0
    infeasible: bool = False
    num_rejected_values: int = 0
    observed_at_s: float | None = None
    source: str = ENGINE_SOURCE
    strain: Strain | None = None
    slot_use: SlotUse | None = None

    @property
    def num_own_waiting(self) -> float:
        """Waiting requests without the batch work that borrows here."""
        return max(0.0, (self.num_waiting or 0.0) - self.num_borrowing_waiting)
