"""A pool at one moment, as observed: the only thing besides its memory that `plan` looks at.

Frozen and made of plain values, so that the journal can store it and a replay decides the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Self

from chairlift_operator.exposition import EngineSample, GatewayClassSample
from chairlift_operator.pool_windows import PoolWindows
from chairlift_operator.signals import LARGEST
from chairlift_protocol.policy import Policy, PolicyError
from chairlift_protocol.wire import RequestClass

ENGINE_SOURCE: Final = "engine /metrics"
GATEWAY_SOURCE: Final = "gateway /metrics"


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """Bounds that an engine reserved memory for at its start."""

    batch_size: int
    step_tokens: int
    kv_tokens: int
    model_length_tokens: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class PolicyReadback:
    """What an engine's admin endpoint answers: what it was told, what is in force, its bounds."""

    desired: Policy
    effective: Policy
    capacity: EngineCapacity

    @classmethod
    def from_json(cls, body: object) -> Self:
        """Raise PolicyError on a body that cannot be understood; unknown parts are ignored."""
        if not isinstance(body, Mapping) or not isinstance(body.get("capacity"), Mapping):
            raise PolicyError("policy answer: must be an object with desired, effective, capacity")
        capacity: Mapping[str, Any] = body["capacity"]
        try:
            bounds = EngineCapacity(
                **{name: int(capacity[name]) for name in EngineCapacity.__dataclass_fields__}
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise PolicyError(f"policy answer: capacity lacks or garbles {error}") from error
        for name in EngineCapacity.__dataclass_fields__:
            if not 1 <= getattr(bounds, name) <= LARGEST:
                raise PolicyError(f"policy answer: capacity.{name} is no size that an engine has")
        return cls(
            Policy.from_json(body.get("desired")), Policy.from_json(body.get("effective")), bounds
        )


class Phase(StrEnum):
    STARTING = "starting"  # asked for; no answer yet
    SERVING = "serving"
    DRAINING = "draining"  # takes nothing new; goes when its requests have ended


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """One engine. Where `sample` or `policy` is None, the failure beside it says why.

    detail: how far a starting one is. stuck: why it never will be, past its deadline.
    source: where the sample was read.
    """

    name: str
    ready: bool
    request_class: RequestClass = RequestClass.INTERACTIVE
    sample: EngineSample | None = None
    sampled_at_s: float | None = None
    scrape_failure: str | None = None
    policy: PolicyReadback | None = None
    policy_failure: str | None = None
    phase: Phase = Phase.SERVING
    detail: str | None = None
    stuck: str | None = None
    source: str = ENGINE_SOURCE

    @property
    def is_supply(self) -> bool:
        return self.phase is not Phase.DRAINING

    @property
    def is_pending(self) -> bool:
        return self.is_supply and not self.ready


@dataclass(frozen=True, slots=True)
class GatewaySnapshot:
    """Arrivals, before any refusal. Without classes the failure says why."""

    classes: tuple[GatewayClassSample, ...] = ()
    sampled_at_s: float | None = None
    failure: str | None = None
    source: str = GATEWAY_SOURCE


@dataclass(frozen=True, slots=True)
class Snapshot:
    """num_reserved: replicas of the capacity that something else needs meanwhile.

    windows: what Prometheus tells of minutes and hours; None for a pool that does without it.
    weights: of tenants, as their quotas have it; None leaves engines' as they are.
    """

    pool: str
    taken_at_s: float
    replicas: tuple[ReplicaSnapshot, ...]
    gateway: GatewaySnapshot = GatewaySnapshot()
    num_reserved: int = 0
    windows: PoolWindows | None = None
    weights: Mapping[str, float] | None = None
