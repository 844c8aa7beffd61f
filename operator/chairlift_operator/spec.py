"""What a user asks of a pool: the values of an `InferencePool`, after validation.

Plain frozen dataclasses, so that the rest of the operator can build and replace them freely; the
annotations tell `spec_parsing` (the only reader of untrusted input) how the YAML spells them. Only
fields that work are here: anything else is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, PlainSerializer, Strict, Tag
from pydantic.alias_generators import to_camel

API_VERSION = "chairlift.dev/v1alpha1"
KIND = "InferencePool"
BLOCK_TOKENS = 16

_CONFIG = ConfigDict(extra="forbid", alias_generator=to_camel)
_UNITS_S = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ns|us|ms|s|m|h))+")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|ms|s|m|h)")
_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_SOURCE = re.compile(r"(?:hf://[^\s/]+/\S+|file:///\S+|cache://\S+)")


def parse_duration(value: object) -> float:
    """Seconds of '500ms', '2s' or '1m30s'; ValueError for anything else, bare numbers included."""
    if not isinstance(value, str) or not _DURATION.fullmatch(value):
        raise ValueError("must be a duration with its unit, such as 500ms, 2s or 10m")
    return float(sum(Decimal(n) * _UNITS_S[unit] for n, unit in _DURATION_PART.findall(value)))


def format_duration(duration_s: float) -> str:
    """A spelling that parses back to exactly the same number, in the largest unit of at least 1."""
    exact = Decimal(repr(duration_s))
    unit = next((u for u in ("s", "ms", "us") if exact >= _UNITS_S[u]), "ns") if exact else "s"
    text = f"{exact / _UNITS_S[unit]:f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + unit


def _matching(pattern: re.Pattern[str], demand: str) -> BeforeValidator:
    def check(value: object) -> object:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(demand)
        return value

    return BeforeValidator(check)


Duration = Annotated[float, BeforeValidator(parse_duration), PlainSerializer(format_duration)]
Count = Annotated[int, Strict(), Field(ge=1)]
Name = Annotated[
    str,
    _matching(_NAME, "must be 1 to 63 lower-case letters, digits or '-', letter or digit at ends"),
]


@dataclass(frozen=True, slots=True)
class Metadata:
    __pydantic_config__ = _CONFIG
    name: Name
    namespace: Name = "default"


@dataclass(frozen=True, slots=True)
class Model:
    __pydantic_config__ = _CONFIG
    name: Annotated[str, Field(min_length=1)]
    source: Annotated[
        str,
        _matching(_SOURCE, "must look like hf://owner/name, file:///path or cache://name"),
    ]
    max_length: Annotated[int, Strict(), Field(ge=2 * BLOCK_TOKENS)] = 4096
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A simulated engine's step time: a + b·decodes + c·prefill tokens + d·KV tokens."""

    __pydantic_config__ = _CONFIG
    a_s: Annotated[Duration, Field(alias="a", gt=0)]
    b_s: Annotated[Duration, Field(alias="b")]
    c_s: Annotated[Duration, Field(alias="c")]
    d_s: Annotated[Duration, Field(alias="d")]
    noise: Annotated[float, Field(ge=0, lt=1)] = 0.0
    load_s: Annotated[Duration, Field(alias="load")] = 0.0


def _profile_kind(value: Any) -> str:
    return "costs" if isinstance(value, dict | StepProfile) else "named"


NamedProfile = Literal["reference", "fast", "slow"]


@dataclass(frozen=True, slots=True)
class Simulator:
    __pydantic_config__ = _CONFIG
    profile: Annotated[
        Annotated[NamedProfile, Tag("named")] | Annotated[StepProfile, Tag("costs")],
        Discriminator(_profile_kind),
    ] = "reference"


@dataclass(frozen=True, slots=True)
class Runtime:
    __pydantic_config__ = _CONFIG
    engine: Literal["chairlift", "simulator"] = "chairlift"
    simulator: Simulator | None = None

    def __post_init__(self) -> None:
        if self.simulator is not None and self.engine != "simulator":
            raise ValueError(
                "simulator only works with 'engine: simulator': set that, or remove simulator"
            )


@dataclass(frozen=True, slots=True)
class Objective:
    """`percent` of events must not exceed `threshold_s`."""

    __pydantic_config__ = _CONFIG
    threshold_s: Annotated[Duration, Field(alias="threshold", gt=0)]
    percent: Annotated[float, Field(alias="objective", gt=0, lt=100)] = 95.0

    @property
    def threshold_ms(self) -> float:
        return round(self.threshold_s * 1e3, 6)

    @property
    def bad_budget(self) -> float:
        """The share of events that may miss the threshold."""
        return 1 - self.percent / 100


@dataclass(frozen=True, slots=True)
class Slo:
    __pydantic_config__ = _CONFIG
    time_to_first_token: Objective = Objective(0.5)
    inter_token_latency: Objective = Objective(0.05)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Inclusive range that a live value moves in."""

    __pydantic_config__ = _CONFIG
    min: Count
    max: Count

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}: lower min or raise max")

    def clamp(self, value: float) -> int:
        return int(min(max(value, self.min), self.max))


@dataclass(frozen=True, slots=True)
class BatchSizeBounds(Bounds):
    min: Count = 1
    max: Count = 256


@dataclass(frozen=True, slots=True)
class StepTokensBounds(Bounds):
    min: Annotated[int, Strict(), Field(ge=BLOCK_TOKENS)] = 64
    max: Count = 2048


@dataclass(frozen=True, slots=True)
class Interactive:
    __pydantic_config__ = _CONFIG
    slo: Slo = Slo()
    batch_size: BatchSizeBounds = BatchSizeBounds()
    step_tokens: StepTokensBounds = StepTokensBounds()

    def __post_init__(self) -> None:
        if self.batch_size.max > self.step_tokens.max:
            raise ValueError(
                f"batchSize.max {self.batch_size.max} is above stepTokens.max "
                f"{self.step_tokens.max}, but every running sequence takes a token of each step: "
                "lower batchSize.max or raise stepTokens.max"
            )


@dataclass(frozen=True, slots=True)
class Metrics:
    __pydantic_config__ = _CONFIG
    source: Literal["Direct"] = "Direct"


@dataclass(frozen=True, slots=True)
class PoolSpec:
    __pydantic_config__ = _CONFIG
    model: Model
    runtime: Runtime = Runtime()
    interactive: Interactive = Interactive()
    metrics: Metrics = Metrics()
    mode: Literal["Enforce", "Recommend"] = "Enforce"


@dataclass(frozen=True, slots=True)
class InferencePool:
    __pydantic_config__ = _CONFIG
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
