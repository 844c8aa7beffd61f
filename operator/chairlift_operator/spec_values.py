"""The kinds of value a spec is made of: durations with units, names, counts, inclusive ranges.

Each says in one sentence what it takes. Used by `spec`, which puts them together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Final

from pydantic import (
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    Strict,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

BLOCK_TOKENS: Final = 16
SPEC_CONFIG = ConfigDict(extra="forbid", alias_generator=to_camel)
_UNITS_S = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
}
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ns|us|ms|s|m|h))+")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ns|us|ms|s|m|h)")
# Its children's names, which end with -interactive and the like, must fit too.
_POOL_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,38}[a-z0-9])?")
NAME_PATTERN: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
NAME_DEMAND: Final = "must be 1 to 63 lower-case letters, digits or '-', letter or digit at ends"


@dataclass(frozen=True, slots=True, eq=False)  # types are compared by what annotates them
class Check:
    """A rule of a value, and what the CRD's schema says of it where it can.

    is_first: it reads what the user wrote, rather than the value made of that.
    """

    check: Callable[[Any], Any]
    schema: Mapping[str, Any]
    is_first: bool = False

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        wrap = (
            core_schema.no_info_before_validator_function
            if self.is_first
            else core_schema.no_info_after_validator_function
        )
        return wrap(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(schema), **self.schema}


def parse_duration(value: object) -> float:
    """Seconds of '500ms', '2s' or '1m30s'; ValueError for anything else, bare numbers included."""
    if not isinstance(value, str) or not _DURATION.fullmatch(value):
        raise ValueError("must be a duration with its unit, such as 500ms, 2s or 10m")
    exact = sum(Decimal(n) * _UNITS_S[unit] for n, unit in _DURATION_PART.findall(value))
    if exact > 24 * _UNITS_S["h"]:
        raise ValueError("must be at most 24h")
    return float(exact)


def format_duration(duration_s: float) -> str:
    """A spelling that parses back to exactly the same number, in the largest unit of at least 1."""
    exact = Decimal(repr(duration_s))
    unit = next((u for u in ("s", "ms", "us") if exact >= _UNITS_S[u]), "ns") if exact else "s"
    text = f"{exact / _UNITS_S[unit]:f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + unit


def matching(pattern: re.Pattern[str], demand: str, or_else: str | None = None) -> Check:
    """or_else: a word that is taken too."""
    text = pattern.pattern if or_else is None else f"{pattern.pattern}|{re.escape(or_else)}"
    whole = re.compile(text)

    def check(value: object) -> object:
        if not isinstance(value, str) or not whole.fullmatch(value):
            raise ValueError(demand)
        return value

    return Check(check, {"pattern": f"^(?:{text})$"}, is_first=True)


def at_least(least: str) -> Check:
    least_s = parse_duration(least)

    def check(duration_s: float) -> float:
        if duration_s < least_s:
            raise ValueError(f"must be at least {least}")
        return duration_s

    rules = [
        *_DURATION_RULES,
        duration_rule(f">= duration('{least}')", f"must be at least {least}"),
    ]
    return Check(check, {"x-kubernetes-validations": rules})


def duration_rule(comparison: str, demand: str) -> dict[str, str]:
    return {"rule": f"duration(self) {comparison}", "message": demand}


def printable(max_characters: int) -> Check:
    """Text that can be a label, a log line and a command's argument."""

    def check(text: str) -> str:
        if not text.isprintable() or not 0 < len(text) <= max_characters:
            raise ValueError(f"must be 1 to {max_characters} printable characters")
        if text != text.strip() or text.startswith("-"):
            raise ValueError("must not begin with '-', nor begin or end with a blank")
        return text

    return Check(check, {"minLength": 1, "maxLength": max_characters})


_DURATION_RULES = [duration_rule("<= duration('24h')", "must be at most 24h")]
_DURATION_SCHEMA: Mapping[str, Any] = {
    "type": "string",
    "pattern": f"^{_DURATION.pattern}$",
    "maxLength": 32,
    "x-kubernetes-validations": _DURATION_RULES,
}
LARGEST_COUNT: Final = 1_000_000
Duration = Annotated[
    float,
    Check(parse_duration, _DURATION_SCHEMA, is_first=True),
    PlainSerializer(format_duration),
]
Number = Annotated[float, Strict()]  # neither text nor true
Count = Annotated[int, Strict(), Field(ge=1, le=LARGEST_COUNT)]
CountOrNone = Annotated[int, Strict(), Field(ge=0, le=LARGEST_COUNT)]
Name = Annotated[str, matching(NAME_PATTERN, NAME_DEMAND)]
PoolName = Annotated[
    str,
    matching(
        _POOL_NAME, "must be 1 to 40 lower-case letters, digits or '-', letter or digit at ends"
    ),
]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Inclusive range that a live value moves in."""

    __pydantic_config__ = SPEC_CONFIG
    min: Count
    max: Count

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}: lower min or raise max")

    def clamp(self, value: float) -> int:
        return int(min(max(value, self.min), self.max))
