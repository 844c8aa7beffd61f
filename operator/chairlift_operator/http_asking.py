"""Questions over HTTP to engines and gateways: every failure becomes one sentence.

Decides nothing; the session belongs to the caller.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import Any, Final

import aiohttp

# Under a tick, so that one hung engine delays nothing; above a CPU engine's longest step, between
# two of which a policy takes effect.
TIMEOUT_S: Final = 3.0
MAX_BODY_BYTES: Final = 4 << 20


class EngineError(RuntimeError):
    """An engine or gateway did not answer, or not as it should; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    text: str


class Http:
    def __init__(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._session = session
        self._timeout = _timeout(timeout_s)

    async def ask(self, method: str, url: str, **options: Any) -> str:
        """The text of a 200; EngineError."""
        reply = await self.exchange(method, url, **options)
        if reply.status != HTTPStatus.OK:
            told = f"{reply.status}: {_brief(reply.text)}"
            raise EngineError(f"{method} {url} answered {told}")
        return reply.text

    async def exchange(self, method: str, url: str, **options: Any) -> Reply:
        """Whatever it answers; EngineError where it does not."""
        try:
            async with self._session.request(
                method, url, timeout=self._timeout, allow_redirects=False, **options
            ) as response:
                text = await _bounded_text(response)
                return Reply(response.status, response.headers, text)
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


def _brief(text: str) -> str:
    """The message of an OpenAI-style error body, else the beginning of the text."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return text.strip()[:200]
