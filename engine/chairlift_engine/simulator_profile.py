"""What a simulated model costs and how it fails: a name, a JSON object, or a TOML file.

The file may be edited while it is served from: see `ProfileFile`. Knows no clock and no requests;
`simulator` runs by it, the entry point opens it.
"""

from __future__ import annotations

import json
import logging
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

logger = logging.getLogger(__name__)

FILE_SUFFIX: Final = ".toml"
CHECK_S: Final = 1.0  # between two looks at the file
TOKENS_PER_SLOT: Final = 1024


class ProfileError(ValueError):
    """A simulator profile that cannot be understood; the message says what it takes."""


class FaultKind(StrEnum):
    SLOW = "slow"  # every step from then on takes `factor` times as long
    STALL = "stall"  # one step takes `duration_s` longer
    CRASH = "crash"  # the step fails, and the engine with it
    OOM = "oom"  # the step runs out of memory


@dataclass(frozen=True, slots=True)
class Fault:
    """Due from the first step that begins `at_s` or more after the model was loaded, or from the
    `at_step`-th step on; exactly one of the two is finite."""

    kind: FaultKind
    at_s: float = math.inf
    at_step: float = math.inf
    factor: float = 1.0
    duration_s: float = 0.0

    def is_due(self, elapsed_s: float, num_steps: int) -> bool:
        return elapsed_s >= self.at_s or num_steps >= self.at_step


_FAULT_FIELDS: Final = {
    FaultKind.SLOW: "factor",
    FaultKind.STALL: "duration_s",
    FaultKind.CRASH: None,
    FaultKind.OOM: None,
}
_COSTS: Final = ("a_ms", "b_ms", "c_ms", "d_ms", "noise", "load_s")


@dataclass(frozen=True, slots=True)
class Profile:
    """Step-time coefficients in ms, relative noise (standard deviation), load time, faults."""

    a_ms: float = 8.0
    b_ms: float = 0.06
    c_ms: float = 0.045
    d_ms: float = 5e-5
    noise: float = 0.04
    load_s: float = 0.0
    faults: tuple[Fault, ...] = ()

    def scaled(self, factor: float) -> Self:
        return replace(
            self,
            a_ms=self.a_ms * factor,
            b_ms=self.b_ms * factor,
            c_ms=self.c_ms * factor,
            d_ms=self.d_ms * factor,
        )

    def step_s(self, num_decode_seqs: int, num_prefill_tokens: int, kv_tokens: int) -> float:
        """Mean time of a step, without noise and faults."""
        return 1e-3 * (
            self.a_ms
            + self.b_ms * num_decode_seqs
            + self.c_ms * num_prefill_tokens
            + self.d_ms * kv_tokens
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """A profile's name, or a JSON object of what `from_mapping` takes."""
        if (factor := _FACTORS.get(text)) is not None:
            return cls().scaled(factor)
        try:
            values = json.loads(text)
        except json.JSONDecodeError:
            values = None
        if not isinstance(values, dict):
            raise ProfileError(
                f"simulator profile {text!r}: use one of {', '.join(_FACTORS)}, a file whose name "
                f"ends in {FILE_SUFFIX}, or a JSON object of {_KNOWN}"
            )
        return cls.from_mapping(values)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Some of the costs, and a table for each fault: `slow`, `stall`, `crash`, `oom`."""
        costs: dict[str, float] = {}
        faults: list[Fault] = []
        for name, value in values.items():
            if name in _COSTS:
                costs[name] = _number(name, value)
            elif name in _FAULT_FIELDS:
                faults.append(_fault(FaultKind(name), value))
            else:
                raise ProfileError(f"simulator profile: unknown field {name!r}; it takes {_KNOWN}")
        return cls(**costs, faults=tuple(faults))


_FACTORS: Final = {"reference": 1.0, "fast": 0.45, "slow": 1.6}
_KNOWN: Final = ", ".join((*_COSTS, *_FAULT_FIELDS))


def simulated_kv_tokens(model_length_tokens: int, batch_size: int) -> int:
    """KV memory of a simulated engine that is not told how much it has."""
    return max(model_length_tokens, batch_size * TOKENS_PER_SLOT)


class ProfileFile:
    """A profile in a TOML file that may change while it is in use.

    A changed file takes effect within `CHECK_S` and a step; a broken one leaves the profile in
    force and is reported once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._stamped()
        self._next_check_s = -math.inf

    def read(self) -> Profile:
        """Raises ProfileError, with the file's name, for a file that cannot be used."""
        try:
            return Profile.from_mapping(tomllib.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:  # what is no UTF-8, no TOML, no profile
            raise ProfileError(f"{self._path}: {error}") from error

    def changed(self, now_s: float) -> Profile | None:
        """The new profile when the file has changed since; looks once in `CHECK_S`."""
        if now_s < self._next_check_s:
            return None
        self._next_check_s = now_s + CHECK_S
        stamp = self._stamped()
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            profile = self.read()
        except ProfileError as error:
            logger.warning("the profile in force stays: %s", error)
            return None
        logger.info("profile read again: %s", profile)
        return profile

    def _stamped(self) -> tuple[int, int] | None:
        """Changes with every edit, also when the file is replaced by another; None without one."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino


def open_profile(text: str) -> tuple[Profile, ProfileFile | None]:
    """What `--simulator-profile` names, and the file to watch when it is one."""
    if not text.endswith(FILE_SUFFIX):
        return Profile.parse(text), None
    file = ProfileFile(Path(text))
    return file.read(), file


def _fault(kind: FaultKind, value: object) -> Fault:
    size_field = _FAULT_FIELDS[kind]
    allowed = ("at_s", "at_step", *([size_field] if size_field else ()))
    if not isinstance(value, dict):
        raise ProfileError(f"simulator profile: {kind} must be a table of {', '.join(allowed)}")
    for name in value:
        if name not in allowed:
            raise ProfileError(
                f"simulator profile: unknown field '{kind}.{name}'; it takes {', '.join(allowed)}"
            )
    if ("at_s" in value) == ("at_step" in value):
        raise ProfileError(f"simulator profile: {kind} takes one of at_s and at_step")
    if size_field is not None and size_field not in value:
        raise ProfileError(f"simulator profile: '{kind}.{size_field}' is missing")
    return Fault(kind, **{name: _number(f"{kind}.{name}", part) for name, part in value.items()})


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ProfileError(f"simulator profile: {name} must be 0 or more, not {value!r}")
    return value
