"""What a user asks of a pool: the values of an `InferencePool`, after validation.

Plain frozen dataclasses, so that the rest of the operator can build and replace them freely; the
annotations tell `spec_parsing` (the only reader of untrusted input) how the YAML spells them. Only
fields that work are here: anything else is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from pydantic import Field, Strict

from chairlift_operator.spec_metrics import Metrics
from chairlift_operator.spec_pods import Gateway
from chairlift_operator.spec_quotas import Quotas
from chairlift_operator.spec_runtime import Model, Runtime
from chairlift_operator.spec_values import (
    BLOCK_TOKENS,
    LARGEST_COUNT,
    SPEC_CONFIG,
    Bounds,
    Count,
    CountOrNone,
    Duration,
    Name,
    Number,
    PoolName,
    at_least,
    format_duration,
)
from chairlift_protocol.wire import RequestClass

LEAST_RETURN_S: Final = 10.0  # two ticks: one to see it, one in case the write is lost
# A step of batch work may take this long: drains, aborts and policies wait for its end.
BATCH_STEP_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Metadata:
    __pydantic_config__ = SPEC_CONFIG
    name: PoolName
    namespace: Name = "default"


@dataclass(frozen=True, slots=True)
class Objective:
    """`percent` of events must not exceed `threshold_s`."""

    __pydantic_config__ = SPEC_CONFIG
    threshold_s: Annotated[Duration, at_least("0.001ms"), Field(alias="threshold")]
    # Nearer to 0 or 100, no number of events that an engine ever sees could tell.
    percent: Annotated[Number, Field(alias="objective", ge=1, le=99.99)] = 95.0

    @property
    def threshold_ms(self) -> float:
        return round(self.threshold_s * 1e3, 6)

    @property
    def bad_budget(self) -> float:
        """The share of events that may miss the threshold."""
        return 1 - self.percent / 100


@dataclass(frozen=True, slots=True)
class Slo:
    __pydantic_config__ = SPEC_CONFIG
    time_to_first_token: Objective = Objective(0.5)
    inter_token_latency: Objective = Objective(0.05)


@dataclass(frozen=True, slots=True)
class BatchSizeBounds(Bounds):
    min: Count = 1
    max: Count = 256


@dataclass(frozen=True, slots=True)
class StepTokensBounds(Bounds):
    min: Annotated[int, Strict(), Field(ge=BLOCK_TOKENS, le=LARGEST_COUNT)] = 64
    max: Count = 2048


@dataclass(frozen=True, slots=True)
class ReplicaBounds(Bounds):
    min: Count = 1
    max: Count = 1


@dataclass(frozen=True, slots=True)
class BatchReplicaBounds(Bounds):
    min: CountOrNone = 0
    max: CountOrNone = 0


@dataclass(frozen=True, slots=True)
class BatchPoolBatchSizeBounds(Bounds):
    min: Count = 1
    max: Count = 512


@dataclass(frozen=True, slots=True)
class BatchPoolStepTokensBounds(Bounds):
    min: Annotated[int, Strict(), Field(ge=BLOCK_TOKENS, le=LARGEST_COUNT)] = 64
    max: Count = 8192


def _check_step_holds_batch(batch_size: Bounds, step_tokens: Bounds) -> None:
    if batch_size.max > step_tokens.max:
        raise ValueError(
            f"batchSize.max {batch_size.max} is above stepTokens.max "
            f"{step_tokens.max}, but every running sequence takes a token of each step: "
            "lower batchSize.max or raise stepTokens.max"
        )


@dataclass(frozen=True, slots=True)
class Interactive:
    """scheduling: Static is the baseline for comparisons; nothing is tuned under it."""

    __pydantic_config__ = SPEC_CONFIG
    slo: Slo = Slo()
    replicas: ReplicaBounds = ReplicaBounds()
    batch_size: BatchSizeBounds = BatchSizeBounds()
    step_tokens: StepTokensBounds = StepTokensBounds()
    scheduling: Literal["Continuous", "Static"] = "Continuous"

    def __post_init__(self) -> None:
        _check_step_holds_batch(self.batch_size, self.step_tokens)


@dataclass(frozen=True, slots=True)
class BatchSlo:
    """maximum_wait_s: how long an item may wait for its first token."""

    __pydantic_config__ = SPEC_CONFIG
    maximum_wait_s: Annotated[Duration, at_least("0.001ms"), Field(alias="maximumWait")] = 600.0


@dataclass(frozen=True, slots=True)
class Borrowing:
    """Batch work on interactive replicas, while they meet their objectives."""

    __pydantic_config__ = SPEC_CONFIG
    max_share_percent: Annotated[Number, Field(alias="maxShare", gt=0, le=100)] = 80.0
    return_within_s: Annotated[Duration, Field(alias="returnWithin")] = 10.0

    def __post_init__(self) -> None:
        if self.return_within_s < LEAST_RETURN_S:
            raise ValueError(
                f"returnWithin {format_duration(self.return_within_s)} is below "
                f"{format_duration(LEAST_RETURN_S)}, two of the controller's ticks: raise it"
            )

    @property
    def max_share(self) -> float:
        return self.max_share_percent / 100


@dataclass(frozen=True, slots=True)
class Batch:
    __pydantic_config__ = SPEC_CONFIG
    slo: BatchSlo = BatchSlo()
    replicas: BatchReplicaBounds = BatchReplicaBounds()
    batch_size: BatchPoolBatchSizeBounds = BatchPoolBatchSizeBounds()
    step_tokens: BatchPoolStepTokensBounds = BatchPoolStepTokensBounds()
    borrowing: Borrowing | None = None

    def __post_init__(self) -> None:
        _check_step_holds_batch(self.batch_size, self.step_tokens)
        if self.borrowing is None and self.replicas.max == 0:
            raise ValueError(
                "batch work would have nowhere to run: set replicas.max to 1 or more, or add "
                "borrowing, so that it runs on interactive replicas"
            )


@dataclass(frozen=True, slots=True)
class CapacityLimit:
    """Engines that both classes together may hold, and how many more while one is replaced."""

    __pydantic_config__ = SPEC_CONFIG
    replicas: Count
    surge: CountOrNone = 0


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """mode Off: the numbers of replicas stay as they are, within their bounds. External: somebody
    else sets them.

    scale_down_window_s: demand of so long a time must fit fewer replicas. drain_timeout_s: how long
    the requests of a replica that goes may still run.
    """

    __pydantic_config__ = SPEC_CONFIG
    mode: Literal["Managed", "External", "Off"] = "Managed"
    scale_down_window_s: Annotated[Duration, at_least("15s"), Field(alias="scaleDownWindow")] = (
        300.0
    )
    drain_timeout_s: Annotated[Duration, Field(alias="drainTimeout")] = 600.0


@dataclass(frozen=True, slots=True)
class Aims:
    """Objectives and bounds of one class of replicas; never written by a user."""

    slo: Slo
    batch_size: Bounds
    step_tokens: Bounds
    is_static: bool


@dataclass(frozen=True, slots=True)
class PoolSpec:
    __pydantic_config__ = SPEC_CONFIG
    model: Model
    runtime: Runtime = Runtime()
    interactive: Interactive = Interactive()
    batch: Batch | None = None
    capacity: CapacityLimit | None = None
    autoscaling: Autoscaling = Autoscaling()
    gateway: Gateway = Gateway()
    metrics: Metrics = Metrics()
    quotas: Quotas | None = None
    mode: Literal["Enforce", "Recommend"] = "Enforce"

    def __post_init__(self) -> None:
        least_batch = self.batch.replicas.min if self.batch else 0
        least = self.interactive.replicas.min + least_batch
        if least > self.num_replicas:
            raise ValueError(
                f"interactive.replicas.min {self.interactive.replicas.min} and "
                f"batch.replicas.min {least_batch} make {least}, above capacity.replicas "
                f"{self.num_replicas}: lower a min or raise capacity.replicas"
            )
        if self.gateway.anonymous == "Refuse" and not self.tells_tenants_apart:
            raise ValueError(
                "gateway.anonymous: Refuse would refuse everybody, because nothing names tenants: "
                "add quotas or gateway.trustedTenantHeader, or remove anonymous"
            )

    def aims(self, request_class: RequestClass) -> Aims:
        """What replicas of one class are tuned to; a batch pool's from its section or defaults."""
        if request_class is RequestClass.INTERACTIVE:
            own = self.interactive
            return Aims(own.slo, own.batch_size, own.step_tokens, own.scheduling == "Static")
        batch = self.batch or Batch(borrowing=Borrowing())
        slo = Slo(Objective(batch.slo.maximum_wait_s), Objective(BATCH_STEP_S))
        return Aims(slo, batch.batch_size, batch.step_tokens, is_static=False)

    def replicas(self, request_class: RequestClass) -> Bounds:
        if request_class is RequestClass.INTERACTIVE:
            return self.interactive.replicas
        return self.batch.replicas if self.batch else BatchReplicaBounds()

    @property
    def tells_tenants_apart(self) -> bool:
        return self.quotas is not None or self.gateway.trusted_tenant_header is not None

    @property
    def max_batch_share(self) -> float:
        """What batch work may at most hold of an interactive replica. All that is left over, as
        long as the spec says nothing of batch work."""
        if self.batch is None:
            return 1.0
        return self.batch.borrowing.max_share if self.batch.borrowing else 0.0

    @property
    def num_replicas(self) -> int:
        """Engines that the pool may hold; without a capacity, as many as its classes may."""
        if self.capacity is not None:
            return self.capacity.replicas
        return self.interactive.replicas.max + (self.batch.replicas.max if self.batch else 0)


@dataclass(frozen=True, slots=True)
class InferencePool:
    __pydantic_config__ = SPEC_CONFIG
    metadata: Metadata
    spec: PoolSpec
    api_version: Literal["chairlift.dev/v1alpha1"] = field(default="chairlift.dev/v1alpha1")
    kind: Literal["InferencePool"] = field(default="InferencePool")

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def namespace(self) -> str:
        return self.metadata.namespace
