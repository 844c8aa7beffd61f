"""Where a request came from: what the gateway says of it, believed only beside the internal token.

Knows no bodies and no engine.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from chairlift_engine.server.errors import ApiError
from chairlift_protocol.wire import (
    CLASS_HEADER,
    INTERNAL_TOKEN_HEADER,
    LEFT_MS_HEADER,
    REQUEST_ID_HEADER,
    TENANT_HEADER,
    USAGE_HEADER,
    WAITED_MS_HEADER,
    RequestClass,
)

ANONYMOUS: Final = "anonymous"


@dataclass(frozen=True, slots=True)
class Origin:
    """Times are on the engine's clock.

    arrival_s: when the request reached the gateway. received_s: when it reached this engine.
    end_by_s: when its client's patience ends; None for never.
    reads_usage: it takes comments in a stream that say what was used.
    request_id: under which it may ask for that too.
    """

    arrival_s: float
    received_s: float
    end_by_s: float | None = None
    request_class: RequestClass = RequestClass.INTERACTIVE
    tenant: str = ANONYMOUS
    reads_usage: bool = False
    request_id: str | None = None


def same_secret(given: str, secret: str) -> bool:
    """Takes the same time wherever the two differ."""
    return hmac.compare_digest(given.encode(errors="replace"), secret.encode())


def is_gateway(headers: Mapping[str, str], internal_token: str | None) -> bool:
    given = headers.get(INTERNAL_TOKEN_HEADER)
    return given is not None and internal_token is not None and same_secret(given, internal_token)


def origin_of(headers: Mapping[str, str], internal_token: str | None, now_s: float) -> Origin:
    if not is_gateway(headers, internal_token):
        return Origin(now_s, now_s)
    left_s = _duration_s(LEFT_MS_HEADER, headers)
    return Origin(
        arrival_s=now_s - (_duration_s(WAITED_MS_HEADER, headers) or 0.0),
        received_s=now_s,
        end_by_s=None if left_s is None else now_s + left_s,
        request_class=_class(headers.get(CLASS_HEADER)),
        tenant=headers.get(TENANT_HEADER) or ANONYMOUS,
        reads_usage=USAGE_HEADER in headers,
        request_id=headers.get(REQUEST_ID_HEADER) if USAGE_HEADER in headers else None,
    )


def _duration_s(name: str, headers: Mapping[str, str]) -> float | None:
    value = headers.get(name)
    if value is None:
        return None
    try:
        duration_ms = float(value)
    except ValueError:
        duration_ms = math.nan
    if not 0 <= duration_ms < math.inf:
        raise ApiError(400, f"{name}: must be milliseconds of 0 or more, not {value!r}")
    return duration_ms / 1e3


def _class(value: str | None) -> RequestClass:
    if value is None:
        return RequestClass.INTERACTIVE
    try:
        return RequestClass(value)
    except ValueError:
        known = " or ".join(RequestClass)
        raise ApiError(400, f"{CLASS_HEADER}: must be {known}, not {value!r}") from None
