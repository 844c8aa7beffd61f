"""What gateways count, over HTTP: at once, or when it is no longer what it was."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import aiohttp

from chairlift_operator.exposition import (
    ExpositionError,
    GatewayClassSample,
    parse_gateway_metrics,
)
from chairlift_operator.http_asking import TIMEOUT_S, EngineError, Http
from chairlift_protocol import wire

Counts = tuple[GatewayClassSample, ...]
# How long a gateway is asked to keep silent; then a sign of life is wanted.
SILENCE_S: Final = 50


@dataclass(frozen=True, slots=True)
class Counted:
    """tag: what to ask for news with; None where a gateway cannot be asked so."""

    counts: Counts
    tag: str | None


async def read_gateway(
    session: aiohttp.ClientSession, url: str, timeout_s: float = TIMEOUT_S
) -> Counts:
    """Arrivals and held requests by class, from a gateway's metrics. EngineError."""
    return _parsed(await Http(session, timeout_s).ask("GET", url + wire.METRICS_PATH))


async def read_arrivals(session: aiohttp.ClientSession, url: str) -> Counted:
    """The same; older gateways have only their metrics. EngineError."""
    reply = await Http(session, TIMEOUT_S).exchange("GET", url + wire.ARRIVALS_PATH)
    if reply.status == HTTPStatus.OK:
        return Counted(_parsed(reply.text), reply.headers.get("etag"))
    return Counted(await read_gateway(session, url), None)


async def is_as_before(session: aiohttp.ClientSession, url: str, tag: str) -> bool:
    """Answered at once when something arrives, else after SILENCE_S. EngineError."""
    headers = {"If-None-Match": tag, "Prefer": f"wait={SILENCE_S}"}
    http = Http(session, SILENCE_S + TIMEOUT_S)
    reply = await http.exchange("GET", url + wire.ARRIVALS_PATH, headers=headers)
    return reply.status == HTTPStatus.NOT_MODIFIED


def _parsed(text: str) -> Counts:
    try:
        return parse_gateway_metrics(text)
    except ExpositionError as error:
        raise EngineError(f"metrics of the gateway: {error}") from error
