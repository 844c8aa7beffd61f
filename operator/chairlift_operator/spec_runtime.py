"""The model a pool serves and the engine that runs it, as a spec says them. Part of `spec`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Strict, Tag

from chairlift_operator.spec_pods import HuggingFace, Image, PodTemplate, Resources
from chairlift_operator.spec_values import (
    BLOCK_TOKENS,
    SPEC_CONFIG,
    Check,
    Duration,
    Number,
    at_least,
    matching,
    printable,
)

_SOURCE = re.compile(r"(?:hf://[^\s/]+/\S+|file:///\S+|cache://\S+|pvc://[^\s/]+(?:/\S*)?)")
_SOURCES = "must look like hf://owner/name, file:///path, pvc://claim/path or cache://name"


@dataclass(frozen=True, slots=True)
class Model:
    __pydantic_config__ = SPEC_CONFIG
    name: Annotated[str, printable(max_characters=200)]
    source: Annotated[str, matching(_SOURCE, _SOURCES), printable(max_characters=1000)]
    max_length: Annotated[int, Strict(), Field(ge=2 * BLOCK_TOKENS, le=10_000_000)] = 4096
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    hugging_face: HuggingFace | None = None

    def __post_init__(self) -> None:
        if self.hugging_face is not None and not self.source.startswith("hf://"):
            raise ValueError(
                "huggingFace only works with a source that begins with hf://: set such a source, "
                "or remove huggingFace"
            )


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A simulated engine's step time: a + b·decodes + c·prefill tokens + d·KV tokens."""

    __pydantic_config__ = SPEC_CONFIG
    a_s: Annotated[Duration, at_least("0.001ms"), Field(alias="a")]
    b_s: Annotated[Duration, Field(alias="b")]
    c_s: Annotated[Duration, Field(alias="c")]
    d_s: Annotated[Duration, Field(alias="d")]
    noise: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    load_s: Annotated[Duration, Field(alias="load")] = 0.0


def _profile_kind(value: Any) -> str:
    if isinstance(value, dict | StepProfile):
        return "costs"
    return "file" if isinstance(value, str) and value.startswith("file:") else "named"


NamedProfile = Literal["reference", "fast", "slow"]
_PROFILE_FILE = re.compile(r"file:///\S+\.toml")
ProfileFile = Annotated[str, matching(_PROFILE_FILE, "must look like file:///path/name.toml")]


@dataclass(frozen=True, slots=True)
class Simulator:
    __pydantic_config__ = SPEC_CONFIG
    profile: Annotated[
        Annotated[NamedProfile, Tag("named")]
        | Annotated[ProfileFile, Tag("file")]
        | Annotated[StepProfile, Tag("costs")],
        Discriminator(_profile_kind),
        # A structural schema knows no "text or object"; the parser tells them apart.
        Check(lambda value: value, {"x-kubernetes-preserve-unknown-fields": True}),
    ] = "reference"


@dataclass(frozen=True, slots=True)
class Runtime:
    __pydantic_config__ = SPEC_CONFIG
    engine: Literal["chairlift", "simulator"] = "chairlift"
    simulator: Simulator | None = None
    share_prefixes: Annotated[bool, Strict()] = False  # between tenants
    image: Image | None = None
    resources: Resources = Resources()
    pod_template: PodTemplate = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.simulator is not None and self.engine != "simulator":
            raise ValueError(
                "simulator only works with 'engine: simulator': set that, or remove simulator"
            )
