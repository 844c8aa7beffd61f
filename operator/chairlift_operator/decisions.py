"""What a plan says: actions to perform, decisions with their reasons, and how a pool stands.

Values only; made by `plan`, performed by `apply`, shown by the command line and by status.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from chairlift_operator.signals import Signal
from chairlift_operator.step_time import StepCosts
from chairlift_operator.windows import Attainment
from chairlift_protocol.policy import Policy


class Health(StrEnum):
    """How far a pool's measurements can be trusted this tick."""

    OK = "OK"
    IDLE = "IDLE"
    LOW_SAMPLE = "LOW_SAMPLE"
    PARTIAL = "PARTIAL"
    STALE = "STALE"
    MISSING = "MISSING"


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """Write a policy to one replica; nothing restarts."""

    replica: str
    policy: Policy
    shrinks: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """One change and why. enforced is False in Recommend mode: said, not done."""

    at_s: float
    replica: str
    field: str
    before: int
    after: int
    reason: str
    enforced: bool = True

    @property
    def sentence(self) -> str:
        words = {"batchSize": "batch size", "stepTokens": "step tokens"}
        kept = self.before == self.after
        change = f"{self.after} kept" if kept else f"{self.before}→{self.after}"
        return f"{words[self.field]} {change}: {self.reason}"


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
class ReplicaReport:
    """One replica as a live view shows it. held: why nothing may move, None when it may."""

    name: str
    ready: bool
    health: Health
    held: str | None = None
    batch_size: int | None = None
    step_tokens: int | None = None
    num_running: float | None = None
    num_waiting: float | None = None
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
