"""What an `InferencePool`'s status holds: the CRD's schema follows from it, `status` fills it in.

Numbers of any kind are text where a person reads them only: a schema cannot say "number or word".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import WithJsonSchema

from chairlift_operator.spec_values import SPEC_CONFIG

NUM_DECISIONS: Final = 10
# When a status is too long to read, the last signals are the first to go.
NUM_SIGNALS: Final = 60

Timestamp = Annotated[str, WithJsonSchema({"type": "string", "maxLength": 32})]


@dataclass(frozen=True, slots=True)
class ConditionStatus:
    __pydantic_config__ = SPEC_CONFIG
    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    last_transition_time: Timestamp
    observed_generation: int = 0


@dataclass(frozen=True, slots=True)
class ClassStatus:
    """One class of replicas. batch_size and step_tokens: of the replica with the least of them."""

    __pydantic_config__ = SPEC_CONFIG
    desired: int
    ready: int
    starting: int = 0
    draining: int = 0
    replicas: str = ""
    batch_size: int | None = None
    step_tokens: int | None = None
    batch_share_percent: float | None = None
    policy_generation: str | None = None


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    __pydantic_config__ = SPEC_CONFIG
    desired: int
    ready: int
    url: str


@dataclass(frozen=True, slots=True)
class SignalStatus:
    __pydantic_config__ = SPEC_CONFIG
    name: str
    state: Literal["Value", "Idle", "Unknown"]
    observed_at: Timestamp
    source: str
    effect: str
    value: str | None = None


@dataclass(frozen=True, slots=True)
class DecisionStatus:
    __pydantic_config__ = SPEC_CONFIG
    at: Timestamp
    target: str
    field: str
    before: str
    after: str
    reason: str
    sentence: str
    enforced: bool = True
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolStatus:
    __pydantic_config__ = SPEC_CONFIG
    observed_generation: int = 0
    operator: str | None = None
    slo: str | None = None
    progress: str | None = None
    last_reason: str | None = None
    interactive: ClassStatus | None = None
    batch: ClassStatus | None = None
    gateway: GatewayStatus | None = None
    conditions: tuple[ConditionStatus, ...] = ()
    signals: tuple[SignalStatus, ...] = ()
    decisions: tuple[DecisionStatus, ...] = ()
