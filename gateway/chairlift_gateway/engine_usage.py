"""Asks engines what requests have used: of an answer that comes as a whole nothing else tells.

One question for all of an engine's requests, or for one whose client has left. `metering` asks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from chairlift_gateway.engine_http import EngineFailed
from chairlift_gateway.engine_pool import EnginePool, EngineRequest
from chairlift_gateway.usage import Used
from chairlift_protocol.wire import INTERNAL_TOKEN_HEADER, LAST_STEP_WAIT_S, USAGE_PATH

# Below what a gateway has left for last words when it is told to end.
TIMEOUT_S: Final = LAST_STEP_WAIT_S + 0.5
# Some 100 bytes for each request that an engine has.
MAX_BYTES: Final = 4 * 1024 * 1024


class NoAnswer(Exception):
    """The engine is gone, or too busy to say."""


class EngineUsage:
    def __init__(self, engines: EnginePool, internal_token: str) -> None:
        self._engines = engines
        self._headers = (
            (b"content-type", b"application/json"),
            (INTERNAL_TOKEN_HEADER.encode(), internal_token.encode()),
        )

    async def ask(
        self, url: str, request_ids: Sequence[str], *, end: bool = False
    ) -> Mapping[str, Used] | None:
        """By id, of those that it knows; None of an engine that cannot be asked. Raise NoAnswer.

        end: they are to end now, so that what it says is final, or soon will be.
        """
        asked = json.dumps({"requests": list(request_ids), "end": end}).encode()
        request = EngineRequest("POST", USAGE_PATH, self._headers, asked)
        try:
            answer = await self._engines.fetch(
                url, request, within_s=TIMEOUT_S, max_bytes=MAX_BYTES
            )
        except EngineFailed as error:
            raise NoAnswer(url) from error
        if answer.head.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise NoAnswer(url)
        return _told(answer.body) if answer.head.status == HTTPStatus.OK else None


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
