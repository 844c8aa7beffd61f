"""What a Secret of API keys holds: digests, and what is wrong with it. Pure.

Only Secrets of one type are read, so that nobody can have any other Secret hashed and published by
naming it in a quota.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

KEYS_TYPE: Final = "chairlift.dev/api-keys"
# Their hashes are published without salt: what can be guessed is no key.
LEAST_CHARACTERS: Final = 24
MOST_CHARACTERS: Final = 512
_ADVICE: Final = "`chairlift key create` makes one"
_NOT_READABLE: Final = "NotReadable"


@dataclass(frozen=True, slots=True)
class KeyTrouble:
    """reason: one word. message: a sentence's beginning, which names the Secret."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class SecretKeys:
    """digests: SHA-256 in hex of each key that can be used. trouble: with the others."""

    digests: tuple[str, ...] = ()
    trouble: KeyTrouble | None = None

    @property
    def is_unknown(self) -> bool:
        """Whether it may hold keys, and nobody knows which."""
        return self.trouble is not None and self.trouble.reason == _NOT_READABLE


def unreadable(name: str, why: str) -> SecretKeys:
    """A Secret that is refused and was never read."""
    told = f"Secret {name} cannot be read, so what gateways know of its tenant's keys stays: {why}"
    return SecretKeys(trouble=KeyTrouble(_NOT_READABLE, told))


def read_keys(name: str, secret: Mapping[str, Any] | None) -> SecretKeys:
    """secret: as the API server has it; None where there is none of this name."""
    if secret is None:
        told = f"Secret {name} does not exist: make it, of type {KEYS_TYPE}"
        return SecretKeys(trouble=KeyTrouble("SecretNotFound", told))
    if secret.get("type") != KEYS_TYPE:
        told = (
            f"Secret {name} is of type {secret.get('type', 'Opaque')}, and not read: make it anew, "
            f"of type {KEYS_TYPE}"
        )
        return SecretKeys(trouble=KeyTrouble("WrongType", told))
    data: Mapping[str, str] = secret.get("data") or {}
    if not data:
        told = f"Secret {name} is empty: put a key into it; {_ADVICE}"
        return SecretKeys(trouble=KeyTrouble("NoKeys", told))
    digests, trouble = [], None
    for field in sorted(data):
        key = _decoded(data[field])
        if why := _unusable(key):
            told = f"Secret {name}: {field} {why}; {_ADVICE}"
            trouble = trouble or KeyTrouble("WeakKey", told)
        else:
            digests.append(hashlib.sha256(key).hexdigest())
    return SecretKeys(tuple(digests), trouble)


def _decoded(text: str) -> bytes:
    """Without the line's end that editors add; nothing for what is not base64."""
    try:
        return base64.b64decode(text).strip()
    except ValueError:
        return b""


def _unusable(key: bytes) -> str | None:
    if not all(0x21 <= byte <= 0x7E for byte in key):
        return "holds what no header can carry: keys are ASCII without blanks"
    if not LEAST_CHARACTERS <= len(key) <= MOST_CHARACTERS:
        return f"has {len(key)} characters: keys have {LEAST_CHARACTERS} to {MOST_CHARACTERS}"
    return None
