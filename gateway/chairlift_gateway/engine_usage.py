"""Asks engines what requests have used: of an answer that comes as a whole nothing else tells.

One question for all of an engine's requests, or for one whose client has left. `metering` asks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import aiohttp

from chairlift_gateway.usage import Used
from chairlift_protocol.wire import INTERNAL_TOKEN_HEADER, LAST_STEP_WAIT_S, USAGE_PATH

# Below what a gateway has left for last words when it is told to end.
TIMEOUT_S: Final = LAST_STEP_WAIT_S + 0.5


class NoAnswer(Exception):
    """The engine is gone, or too busy to say."""


class EngineUsage:
    def __init__(self, session: aiohttp.ClientSession, internal_token: str) -> None:
        self._session = session
        self._headers = {INTERNAL_TOKEN_HEADER: internal_token}

    async def ask(
        self, url: str, request_ids: Sequence[str], *, end: bool = False
    ) -> Mapping[str, Used] | None:
        """By id, of those that it knows; None of an engine that cannot be asked. Raise NoAnswer.

        end: they are to end now, so that what it says is final, or soon will be.
        """
        try:
            async with self._session.post(
                url + USAGE_PATH,
                data=json.dumps({"requests": list(request_ids), "end": end}),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
                allow_redirects=False,  # the token is for this engine alone
            ) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise NoAnswer(url) from error
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise NoAnswer(url)
        return _told(body) if response.status == HTTPStatus.OK else None


def _told(body: bytes) -> Mapping[str, Used] | None:
    try:
        listed: dict[str, Any] = json.loads(body)["used"]
        return {
            name: Used(
                int(told["prompt_tokens"]),
                int(told["completion_tokens"]),
                is_final=told.get("final") is not False,
            )
            for name, told in listed.items()
        }
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError):
        return None  # another program's path of that name
