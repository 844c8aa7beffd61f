"""What a user asks of a tenant of a pool: the values of a `TenantQuota`, after validation.

Like `spec`, of another kind. A limit that is left out is no limit; a class that is left out has the
limits of everybody else (`*`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from pydantic import Field, Strict

from chairlift_operator.spec_values import (
    SPEC_CONFIG,
    Duration,
    Name,
    Number,
    PoolName,
    at_least,
    format_duration,
    matching,
)
from chairlift_protocol.policy import WEIGHTS
from chairlift_protocol.quota import (
    ANONYMOUS,
    DEFAULT_BURST_MS,
    DEFAULT_TENANT,
    MAX_BURST_MS,
    MAX_CONCURRENCY,
    MAX_REQUESTS_PER_MINUTE,
    MAX_TOKENS_PER_MINUTE,
    TENANT_PATTERN,
    Limits,
)
from chairlift_protocol.wire import RequestClass

MAX_KEY_SOURCES: Final = 16
# Whom nobody can prove to be by a key.
KEYLESS_TENANTS: Final = (DEFAULT_TENANT, ANONYMOUS)

_TENANT_DEMAND: Final = (
    "must be 1 to 63 of a-z, 0-9, '-', '.' and '_', letter or digit at ends; or '*', for everybody "
    "without a quota"
)
# In single quotes: a YAML reader takes a bare * for the beginning of an alias.
TenantName = Annotated[
    str, matching(TENANT_PATTERN, _TENANT_DEMAND, or_else=DEFAULT_TENANT), Field(max_length=63)
]


@dataclass(frozen=True, slots=True)
class QuotaMetadata:
    __pydantic_config__ = SPEC_CONFIG
    name: Name
    namespace: Name = "default"


@dataclass(frozen=True, slots=True)
class PoolRef:
    __pydantic_config__ = SPEC_CONFIG
    name: PoolName


@dataclass(frozen=True, slots=True)
class KeySource:
    """Every value of the Secret is a key, and its requests are of this class."""

    __pydantic_config__ = SPEC_CONFIG
    secret: Name
    request_class: Annotated[Literal["interactive", "batch"], Field(alias="class")] = "interactive"


@dataclass(frozen=True, slots=True)
class ClassLimits:
    """Of one class of requests. burst_s: how much of the rates may come at once, as their time."""

    __pydantic_config__ = SPEC_CONFIG
    tokens_per_minute: Annotated[int, Strict(), Field(ge=0, le=MAX_TOKENS_PER_MINUTE)] | None = None
    requests_per_minute: (
        Annotated[int, Strict(), Field(ge=0, le=MAX_REQUESTS_PER_MINUTE)] | None
    ) = None
    concurrency: Annotated[int, Strict(), Field(ge=0, le=MAX_CONCURRENCY)] | None = None
    burst_s: Annotated[Duration, at_least("1ms"), Field(alias="burst")] = DEFAULT_BURST_MS / 1e3
    when_idle: Literal["Refuse", "Borrow"] = "Refuse"

    def __post_init__(self) -> None:
        if self.burst_s > MAX_BURST_MS / 1e3:
            longest = format_duration(MAX_BURST_MS / 1e3)
            raise ValueError(f"burst {format_duration(self.burst_s)} is above {longest}: lower it")
        if self.when_idle == "Borrow" and self.tokens_per_minute is None:
            raise ValueError(
                "whenIdle: Borrow lends tokens, and tokensPerMinute does not limit them: set "
                "tokensPerMinute, or remove whenIdle"
            )

    def limits(self) -> Limits:
        """As Redis holds them."""
        return Limits(
            self.tokens_per_minute,
            self.requests_per_minute,
            self.concurrency,
            max(1, round(self.burst_s * 1e3)),
            self.when_idle == "Borrow",
        )


@dataclass(frozen=True, slots=True)
class TenantQuotaSpec:
    """keys: none for a tenant that a trusted header names. weight: of its turns at the engines."""

    __pydantic_config__ = SPEC_CONFIG
    pool_ref: PoolRef
    tenant: TenantName
    keys: tuple[KeySource, ...] = ()
    weight: Annotated[Number, Field(ge=WEIGHTS[0], le=WEIGHTS[1])] = 1.0
    interactive: ClassLimits | None = None
    batch: ClassLimits | None = None

    def __post_init__(self) -> None:
        if len(self.keys) > MAX_KEY_SOURCES:
            raise ValueError(f"keys has {len(self.keys)} items: at most {MAX_KEY_SOURCES} are read")
        if self.weight != 1.0 and self.tenant == DEFAULT_TENANT:
            raise ValueError("tenant * stands for many, who have weight 1: remove weight")
        if self.keys and self.tenant in KEYLESS_TENANTS:
            raise ValueError(
                "tenants * and anonymous stand for requests without a key: remove keys, or name a "
                "tenant"
            )

    def of(self, request_class: RequestClass) -> ClassLimits | None:
        return self.interactive if request_class is RequestClass.INTERACTIVE else self.batch


@dataclass(frozen=True, slots=True)
class TenantQuota:
    __pydantic_config__ = SPEC_CONFIG
    metadata: QuotaMetadata
    spec: TenantQuotaSpec
    api_version: Literal["chairlift.dev/v1alpha1"] = field(default="chairlift.dev/v1alpha1")
    kind: Literal["TenantQuota"] = field(default="TenantQuota")

    @property
    def name(self) -> str:
        return self.metadata.name
