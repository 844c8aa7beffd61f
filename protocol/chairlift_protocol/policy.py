"""The live policy of an engine, as the operator writes it and the engine answers it."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

SCHEDULING: Final = ("continuous", "static")
MAX_WHOLE_NUMBER: Final = 2**53  # what JSON readers and metrics hold exactly
BATCH_MIN_SHARE: Final = 0.05
WEIGHTS: Final = (0.001, 1000.0)


class PolicyError(ValueError):
    """A policy body that cannot be understood; the message names the field and what it takes."""


@dataclass(frozen=True, slots=True, order=True)
class Generation:
    """Orders policies: `term` counts leaderships, so that a deposed writer's policy is older."""

    term: int
    counter: int

    @classmethod
    def from_json(cls, value: object) -> Self:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise PolicyError(f"generation: must be [term, counter], not {reprlib.repr(value)}")
        term, counter = (_whole_number("generation", part, minimum=0) for part in value)
        return cls(term, counter)

    def to_json(self) -> list[int]:
        return [self.term, self.counter]


@dataclass(frozen=True, slots=True)
class SloThresholds:
    """What an event must not exceed to count as good in `chairlift_slo_events_total`."""

    ttft_ms: float
    itl_ms: float


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """One tenant's weight and caps; None leaves a cap to the engine's default.

    weight: share of the computed tokens, against the other tenants' weights.
    slots: running requests. kv_tokens: KV memory that its requests may hold when one more starts;
    one may always run. waiting: queued requests, above which new ones are refused.
    """

    weight: float = 1.0
    slots: int | None = None
    kv_tokens: int | None = None
    waiting: int | None = None

    @classmethod
    def from_json(cls, name: str, body: object) -> Self:
        fields = _object(name, body)
        _check_names(name, fields, cls.__dataclass_fields__, optional=set(cls.__dataclass_fields__))
        weight = _number(f"{name}.weight", fields.get("weight", 1.0), *WEIGHTS)
        caps = {
            cap: _whole_number(f"{name}.{cap}", fields[cap], minimum=0 if cap == "waiting" else 1)
            for cap in ("slots", "kv_tokens", "waiting")
            if fields.get(cap) is not None
        }
        return cls(weight, **caps)

    def to_json(self) -> dict[str, Any]:
        caps = {"slots": self.slots, "kv_tokens": self.kv_tokens, "waiting": self.waiting}
        return {"weight": self.weight, **{k: v for k, v in caps.items() if v is not None}}


@dataclass(frozen=True, slots=True)
class Policy:
    """Values that change between two steps of a running engine, inside its start-up capacity.

    batch_size: running sequences, mid-prefill ones included.
    step_tokens: tokens one step may carry; decodes first, the rest admits prefill.
    chunk_tokens: prefill tokens one request may take of a step.
    batch_class_share: 0..1 of batch size and step tokens that batch-class work may hold while
        interactive work leaves them free; 0 serves no batch-class work.
    scheduling: "static" is the baseline for comparisons; it ignores step and chunk tokens.
    batch_min_share: 0..1 of both that batch-class work is given even while interactive work
        waits, unless its share is 0.
    tenants: by name; who is not named has weight 1 and the default caps.
    """

    generation: Generation
    batch_size: int
    step_tokens: int
    chunk_tokens: int
    batch_class_share: float
    slo: SloThresholds
    scheduling: str = "continuous"
    batch_min_share: float = BATCH_MIN_SHARE
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict)

    @classmethod
    def from_json(cls, body: object) -> Self:
        """Raise PolicyError on a missing, unknown or ill-typed field."""
        fields = _object("policy", body)
        optional = {"scheduling", "batch_min_share", "tenants"}
        _check_names("policy", fields, cls.__dataclass_fields__, optional)
        slo = _object("slo", fields["slo"])
        _check_names("slo", slo, SloThresholds.__dataclass_fields__, optional=set())
        scheduling = fields.get("scheduling", "continuous")
        if scheduling not in SCHEDULING:
            raise PolicyError(f"scheduling: must be one of {SCHEDULING}, not {scheduling!r}")
        return cls(
            generation=Generation.from_json(fields["generation"]),
            batch_size=_whole_number("batch_size", fields["batch_size"], minimum=1),
            step_tokens=_whole_number("step_tokens", fields["step_tokens"], minimum=1),
            chunk_tokens=_whole_number("chunk_tokens", fields["chunk_tokens"], minimum=1),
            batch_class_share=_number("batch_class_share", fields["batch_class_share"], 0.0, 1.0),
            slo=SloThresholds(
                ttft_ms=_number("slo.ttft_ms", slo["ttft_ms"], 0.001, math.inf),
                itl_ms=_number("slo.itl_ms", slo["itl_ms"], 0.001, math.inf),
            ),
            scheduling=scheduling,
            batch_min_share=_number(
                "batch_min_share", fields.get("batch_min_share", BATCH_MIN_SHARE), 0.0, 1.0
            ),
            tenants={
                str(name): TenantPolicy.from_json(f"tenants.{name}", tenant)
                for name, tenant in _object("tenants", fields.get("tenants", {})).items()
            },
        )

    def to_json(self) -> dict[str, Any]:
        """Newer fields only where they say something: older readers refuse unknown names."""
        newer: dict[str, Any] = {}
        if self.batch_min_share != BATCH_MIN_SHARE:
            newer["batch_min_share"] = self.batch_min_share
        if self.tenants:
            newer["tenants"] = {name: t.to_json() for name, t in self.tenants.items()}
        return {
            **newer,
            "generation": self.generation.to_json(),
            "batch_size": self.batch_size,
            "step_tokens": self.step_tokens,
            "chunk_tokens": self.chunk_tokens,
            "batch_class_share": self.batch_class_share,
            "scheduling": self.scheduling,
            "slo": {"ttft_ms": self.slo.ttft_ms, "itl_ms": self.slo.itl_ms},
        }


def _object(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PolicyError(f"{name}: must be a JSON object, not {type(value).__name__}")
    return value


def _check_names(
    name: str, given: Mapping[str, Any], known: Mapping[str, Any], optional: set[str]
) -> None:
    if unknown := sorted(set(given) - set(known)):
        raise PolicyError(f"{name}: unknown field {unknown[0]!r}; it takes {', '.join(known)}")
    if missing := sorted(set(known) - set(given) - optional):
        raise PolicyError(f"{name}: field {missing[0]!r} is missing")


def _whole_number(name: str, value: object, minimum: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        if minimum <= value <= MAX_WHOLE_NUMBER:
            return value
    raise PolicyError(
        f"{name}: must be a whole number of at least {minimum}, not {reprlib.repr(value)}"
    )


def _number(name: str, value: object, minimum: float, maximum: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PolicyError(f"{name}: must be a number, not {reprlib.repr(value)}")
    try:
        number = float(value)
    except OverflowError:  # a whole number of more than 308 digits
        number = math.inf
    if not math.isfinite(number) or not minimum <= number <= maximum:
        raise PolicyError(f"{name}: must lie in {minimum}..{maximum}, not {reprlib.repr(value)}")
    return number
