"""One engine over HTTP: its metrics and readiness on the public port, its policy on the admin port.

Every failure becomes an `EngineError` with one sentence. Decides nothing; called by
`direct_cluster` and `apply`. The session belongs to the caller.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from chairlift_operator.exposition import EngineSample, ExpositionError, parse_engine_metrics
from chairlift_operator.http_asking import TIMEOUT_S, EngineError, Http
from chairlift_operator.snapshot import PolicyReadback
from chairlift_protocol import wire
from chairlift_protocol.policy import Policy
from chairlift_protocol.wire import RequestClass


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
        self._http = Http(session, timeout_s)

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


def _readback(text: str) -> PolicyReadback:
    try:
        return PolicyReadback.from_json(json.loads(text))
    except (ValueError, OverflowError, RecursionError) as error:  # PolicyError among them
        raise EngineError(f"policy answer not understood: {error}") from error
