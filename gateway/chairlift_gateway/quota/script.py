"""The script `quota.lua` as seen from outside: its text, its keys, and what its answers mean.

Pure: it knows no connection. `store` sends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final

from chairlift_gateway.quota.law import Outcome, Status
from chairlift_protocol.quota import QuotaKeys

SCRIPT: Final = files(__package__).joinpath("quota.lua").read_text(encoding="utf-8")


def script_keys(keys: QuotaKeys, holder: str, fallback: str) -> list[str]:
    return [
        keys.account(holder),
        keys.leases(holder),
        keys.late(holder),
        keys.leasing,
        keys.limits,
        keys.idle,
        keys.rate(holder),
        keys.rate(fallback),
    ]


def outcome_of(reply: Sequence[Any]) -> tuple[Outcome, str]:
    """And the limits in force, as they are written; empty for none. Raise ValueError."""
    texts = [
        part.decode(errors="replace") if isinstance(part, bytes) else str(part) for part in reply
    ]
    status, number, tokens_left, requests_left, num_leases, limits = texts
    outcome = Outcome(
        Status(status),
        int(number or 0),
        _level(tokens_left),
        _level(requests_left),
        int(num_leases),
    )
    return outcome, limits


def _level(text: str) -> int | None:
    return int(text) if text else None
