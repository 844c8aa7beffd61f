"""The live policy of an engine, as the operator writes it and the engine answers it."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

SCHEDULING: Final = ("continuous", "static")
MAX_WHOLE_NUMBER: Final = 2**53  # what JSON readers and metrics hold exactly


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
class Policy:
    """Values that change between two steps of a running engine, inside its start-up capacity.

    batch_size: running sequences, mid-prefill ones included.
    step_tokens: tokens one step may carry; decodes first, the rest admits prefill.
    chunk_tokens: prefill tokens one request may take of a step.
    batch_class_share: 0..1 of batch size and step tokens that batch-class work may hold while
        interactive work leaves them free; 0 serves no batch-class work.
    scheduling: "static" is the baseline for comparisons; it ignores step and chunk tokens.
    """

    generation: Generation
    batch_size: int
    step_tokens: int
    chunk_tokens: int
    batch_class_share: float
    slo: SloThresholds
    scheduling: str = "continuous"

    @classmethod
    def from_json(cls, body: object) -> Self:
        """Raise PolicyError on a missing, unknown or ill-typed field."""
        fields = _object("policy", body)
        _check_names("policy", fields, cls.__dataclass_fields__, optional={"scheduling"})
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
        )

    def to_json(self) -> dict[str, Any]:
        return {
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
