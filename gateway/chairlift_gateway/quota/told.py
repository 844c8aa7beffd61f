"""Limits as clients are told of them: headers that OpenAI's clients know. Pure."""

from __future__ import annotations

import math
from typing import Final

from chairlift_gateway.quota.law import Outcome, Status
from chairlift_protocol.quota import Limits

_WHAT: Final = {
    Status.TOKENS: "tokens per minute",
    Status.REQUESTS: "requests per minute",
    Status.CONCURRENCY: "requests at the same time",
}


def ratelimit_headers(limits: Limits, outcome: Outcome) -> list[tuple[bytes, bytes]]:
    told: list[tuple[str, str]] = []
    for name, rate, left in (
        ("requests", limits.requests_per_minute, outcome.requests_left),
        ("tokens", limits.tokens_per_minute, outcome.tokens_left),
    ):
        if rate is None or left is None:
            continue
        told.append((f"x-ratelimit-limit-{name}", str(rate)))
        told.append((f"x-ratelimit-remaining-{name}", str(max(0, left))))
        told.append((f"x-ratelimit-reset-{name}", _duration(_until_full_s(limits, rate, left))))
    return [(name.encode(), value.encode()) for name, value in told]


def retry_after_s(outcome: Outcome) -> int:
    return max(1, math.ceil(outcome.number / 1000))


def reason(limits: Limits, outcome: Outcome) -> str:
    bounds = {
        Status.TOKENS: limits.tokens_per_minute,
        Status.REQUESTS: limits.requests_per_minute,
        Status.CONCURRENCY: limits.concurrency,
    }
    lowered = f" (lowered from {limits.lowered_from} while the pool is congested)"
    return (
        f"Rate limit reached: {bounds[outcome.status]} {_WHAT[outcome.status]}"
        f"{lowered if _is_lowered(limits, outcome) else ''}. "
        f"Please try again in {retry_after_s(outcome)} s."
    )


def label(limits: Limits, outcome: Outcome) -> str:
    """Which limit, for metrics."""
    return "congestion" if _is_lowered(limits, outcome) else outcome.status.value


def _is_lowered(limits: Limits, outcome: Outcome) -> bool:
    return outcome.status is Status.TOKENS and limits.lowered_from is not None


def _until_full_s(limits: Limits, rate: int, left: int) -> float:
    full = max(1.0, rate * limits.burst_ms / 60_000)
    return max(0.0, full - left) * 60 / rate if rate else 60.0


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 6m0s, 1.5s, 20ms."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest_s = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest_s}s" if minutes else f"{rest_s}s"
