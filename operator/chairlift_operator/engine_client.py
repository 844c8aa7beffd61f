"""One engine over HTTP: its metrics and readiness on the public port, its policy on the admin port.

Every failure becomes an `EngineError` with one sentence. Decides nothing; called by
`direct_cluster` and `apply`. The session belongs to the caller.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import aiohttp

from chairlift_operator.exposition import (
    EngineSample,
    ExpositionError,
    GatewayClassSample,
    parse_engine_metrics,
    parse_gateway_metrics,
)
from chairlift_operator.snapshot import PolicyReadback
from chairlift_protocol import wire
from chairlift_protocol.policy import Policy
from chairlift_protocol.wire import RequestClass

# Under a tick, so that one hung engine delays nothing; above a CPU engine's longest step, between
# two of which a policy takes effect.
TIMEOUT_S: Final = 3.0
MAX_BODY_BYTES: Final = 4 << 20


class EngineError(RuntimeError):
    """An engine did not answer, or not as it should; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class ReplicaEndpoint:
    """Where one engine listens. URLs without a trailing slash."""

    name: str
    public_url: str
    admin_url: str
    admin_token: str = field(repr=False)
    request_class: RequestClass = RequestClass.INTERACTIVE
    is_draining: bool = False


class EngineClient:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: ReplicaEndpoint,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.endpoint = endpoint
        self._http = _Http(session, timeout_s)

    async def scrape(self) -> EngineSample:
        text = await self._http.ask("GET", self.endpoint.public_url + wire.METRICS_PATH)
        try:
            return parse_engine_metrics(text)
        except ExpositionError as error:
            raise EngineError(f"metrics: {error}") from error

    async def is_ready(self) -> bool:
        try:
            await self._http.ask("GET", self.endpoint.public_url + wire.READY_PATH)
        except EngineError:
            return False
        return True

    async def read_policy(self) -> PolicyReadback:
        return _readback(await self._ask_admin("GET"))

    async def write_policy(self, policy: Policy) -> PolicyReadback:
        """Write, then read again: what a second answer says is what the engine holds."""
        await self._ask_admin("PATCH", policy.to_json())
        return await self.read_policy()

    async def drain(self) -> int:
        """Let it take nothing new; how many requests are left. May be asked again."""
        text = await self._ask_admin("POST", path=wire.ADMIN_DRAIN_PATH)
        try:
            return int(json.loads(text)["num_left"])
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"drain answer not understood: {error}") from error

    async def _ask_admin(
        self,
        method: str,
        body: dict[str, Any] | None = None,
        path: str = wire.ADMIN_POLICY_PATH,
    ) -> str:
        headers = {"Authorization": f"Bearer {self.endpoint.admin_token}"}
        url = self.endpoint.admin_url + path
        return await self._http.ask(method, url, headers=headers, json=body)


async def read_gateway(
    session: aiohttp.ClientSession, url: str, timeout_s: float = TIMEOUT_S
) -> tuple[GatewayClassSample, ...]:
    """Arrivals and held requests by class, from a gateway's metrics."""
    text = await _Http(session, timeout_s).ask("GET", url + wire.METRICS_PATH)
    try:
        return parse_gateway_metrics(text)
    except ExpositionError as error:
        raise EngineError(f"metrics of the gateway: {error}") from error


class _Http:
    def __init__(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._session = session
        self._timeout = _timeout(timeout_s)

    async def ask(self, method: str, url: str, **options: Any) -> str:
        try:
            async with self._session.request(
                method, url, timeout=self._timeout, allow_redirects=False, **options
            ) as response:
                text = await _bounded_text(response)
                if response.status != 200:
                    raise EngineError(f"{method} {url} answered {response.status}: {_brief(text)}")
                return text
        except TimeoutError:
            raise EngineError(f"{method} {url} took over {self._timeout.total:g} s") from None
        except aiohttp.ClientError as error:
            raise EngineError(f"{method} {url} failed: {error or type(error).__name__}") from error


@cache
def _timeout(total_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=total_s)


async def _bounded_text(response: aiohttp.ClientResponse) -> str:
    body = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise EngineError(f"{response.url} answered more than {MAX_BODY_BYTES} bytes")
    return body.decode(errors="replace")


def _readback(text: str) -> PolicyReadback:
    try:
        return PolicyReadback.from_json(json.loads(text))
    except (ValueError, OverflowError, RecursionError) as error:  # PolicyError among them
        raise EngineError(f"policy answer not understood: {error}") from error


def _brief(text: str) -> str:
    """The message of an OpenAI-style error body, else the beginning of the text."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return text.strip()[:200]
