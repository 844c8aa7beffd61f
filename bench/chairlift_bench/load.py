"""An open-loop load generator: chat streams opened when they are due, whatever the server does.

Speaks OpenAI HTTP and nothing else; never retries, so that every failure is seen. `rush_run`,
`rush_plan` and `step_calibration` call it; `outcomes` judges what it recorded.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import aiohttp

from chairlift_bench.outcomes import Outcome

DONE: Final = "[DONE]"
PATIENCE_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One chat request; due_s counts from the start of the load.

    exact_length: the answer is max_tokens long, whatever the model would rather.
    """

    due_s: float
    prompt: str
    max_tokens: int
    exact_length: bool = False


class Load:
    """Sends requests to one gateway and collects outcomes as they end; one use per run.

    A request's clock starts when it was due, not when it was sent: a late generator counts against
    the server rather than in its favour. ends_s: on the monotonic clock, when whatever is
    unfinished is given up and has failed.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        patience_s: float = PATIENCE_S,
        ends_s: float = math.inf,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.num_in_flight = 0
        self._url = f"{base_url.rstrip('/')}/v1/chat/completions"
        self._model = model
        self._headers = dict(headers)
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # A request that takes longer is given up and counts as failed, so that a run always ends.
        self._patience_s = patience_s
        self._ends_s = ends_s

    async def run(self, requests: Sequence[PlannedRequest]) -> list[Outcome]:
        """Send every request when due; return all outcomes once the last one ended."""
        started_s = time.monotonic()
        async with self._client() as client, asyncio.TaskGroup() as sending:
            for request in sorted(requests, key=lambda r: r.due_s):
                due_s = started_s + request.due_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                sending.create_task(self._send(client, request, due_s))
        return self.outcomes

    async def run_closed(
        self, requests: Iterable[PlannedRequest], num_clients: int, duration_s: float
    ) -> list[Outcome]:
        """Keep num_clients requests in flight for duration_s, then let those in flight finish."""
        started_s = time.monotonic()
        pending = iter(requests)

        async def client_loop(client: aiohttp.ClientSession) -> None:
            while (now_s := time.monotonic()) < started_s + duration_s:
                if (request := next(pending, None)) is None:
                    return
                await self._send(client, replace(request, due_s=now_s - started_s), now_s)

        async with self._client() as client, asyncio.TaskGroup() as sending:
            for _ in range(num_clients):
                sending.create_task(client_loop(client))
        return self.outcomes

    def _client(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=self._headers)

    async def _send(
        self, client: aiohttp.ClientSession, request: PlannedRequest, due_s: float
    ) -> None:
        reading = _Reading(due_s)
        error: str | None = None
        self.num_in_flight += 1
        try:
            async with client.post(
                self._url, json=self._body(request), timeout=self._timeout()
            ) as response:
                if response.status == 200:
                    async for line in response.content:
                        reading.take(line)
                    error = reading.missing_end()
                else:
                    error = f"HTTP {response.status}: {(await response.text())[:300]}"
        except (aiohttp.ClientError, TimeoutError, ValueError, StreamFailed) as failure:
            error = f"{type(failure).__name__}: {failure}"
        finally:
            self.num_in_flight -= 1
        self.outcomes.append(reading.outcome(request, error))

    def _timeout(self) -> aiohttp.ClientTimeout:
        # Zero would mean for ever.
        left_s = max(0.001, self._ends_s - time.monotonic())
        return aiohttp.ClientTimeout(total=min(self._patience_s, left_s))

    def _body(self, request: PlannedRequest) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": request.prompt}],
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": request.exact_length,
        }


class StreamFailed(Exception):
    """The server put an error into the stream."""


class _Reading:
    """What one stream has said so far."""

    def __init__(self, due_s: float) -> None:
        self._due_s = due_s
        self._token_times_s: list[float] = []
        self._parts: list[str] = []
        self._finish_reason: str | None = None
        self._finished_s: float | None = None
        self._usage: dict[str, Any] = {}
        self._done = False

    def take(self, line: bytes) -> None:
        """Read one line of the event stream; raise StreamFailed on an error frame."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip().decode()
        if data == DONE:
            self._done = True
            return
        event = json.loads(data)
        if "error" in event:
            raise StreamFailed(json.dumps(event["error"]))
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            if text := choice.get("delta", {}).get("content"):
                self._token_times_s.append(time.monotonic())
                self._parts.append(text)
            if reason := choice.get("finish_reason"):
                self._finish_reason = reason
                self._finished_s = time.monotonic()

    def missing_end(self) -> str | None:
        if not self._done:
            return f"the stream ended without {DONE}"
        if self._finish_reason is None:
            return "the stream ended without a finish_reason"
        return None

    def outcome(self, request: PlannedRequest, error: str | None) -> Outcome:
        times_s = self._token_times_s
        # An answer without text (the first token ended it) reached its reader when it finished.
        first_s = times_s[0] if times_s else self._finished_s
        return Outcome(
            due_s=request.due_s,
            ttft_s=None if first_s is None else first_s - self._due_s,
            gaps_s=tuple(b - a for a, b in zip(times_s, times_s[1:], strict=False)),
            elapsed_s=time.monotonic() - self._due_s,
            text="".join(self._parts),
            finish_reason=self._finish_reason,
            prompt_tokens=int(self._usage.get("prompt_tokens", 0)),
            output_tokens=int(self._usage.get("completion_tokens", 0)),
            error=error,
        )
