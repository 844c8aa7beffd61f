"""One Prometheus over HTTP: instant queries at a common evaluation time.

Every failure becomes an `Answer` with its reason; nothing is raised and nothing is guessed. The
session belongs to the caller.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Final

import aiohttp

from chairlift_operator.prometheus.series import Answer, AnswerError, understood

# A thousand pools' pods with a few samples of each series fit.
MAX_BODY_BYTES: Final = 64 << 20
LARGE_BODY_BYTES: Final = 1 << 20
NUM_CONCURRENT: Final = 4  # of the 20 queries that Prometheus runs at a time by default


class PrometheusClient:
    """url: without a trailing slash."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._session = session

    async def ask(
        self, queries: Mapping[str, str], at_s: float, timeout_s: float
    ) -> dict[str, Answer]:
        """All as of one moment, by their names; each within the timeout or not at all."""
        slots = asyncio.Semaphore(NUM_CONCURRENT)

        async def one(name: str, text: str) -> Answer:
            async with slots:
                return await self._answer(name, text, at_s, timeout_s)

        answers = await asyncio.gather(*(one(name, text) for name, text in queries.items()))
        return {answer.query: answer for answer in answers}

    async def _answer(self, name: str, text: str, at_s: float, timeout_s: float) -> Answer:
        try:
            # Prometheus gives up first, so that it does not go on for nobody.
            status, body = await self._post(text, at_s, 0.8 * timeout_s, timeout_s)
            if len(body) > LARGE_BODY_BYTES:  # the loop goes on meanwhile
                return await asyncio.to_thread(_read, name, status, body)
            return _read(name, status, body)
        except TimeoutError:
            failure = f"no answer within {timeout_s:g} s"
        except aiohttp.ClientError as error:
            failure = str(error) or type(error).__name__
        except AnswerError as error:
            failure = str(error)
        return Answer(name, failure=_brief(failure))

    async def _post(
        self, text: str, at_s: float, limit_s: float, timeout_s: float
    ) -> tuple[int, bytes]:
        async with self._session.post(
            self.url + "/api/v1/query",
            data={"query": text, "time": f"{at_s:.3f}", "timeout": f"{limit_s:.3f}"},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            allow_redirects=False,  # whoever names the address names the one that is asked
        ) as response:
            body = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise AnswerError(f"the answer has more than {MAX_BODY_BYTES} bytes")
            return response.status, bytes(body)


def _read(name: str, status: int, body: bytes) -> Answer:
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        # Not what it says: it may be anything's answer.
        raise AnswerError(f"HTTP {status}, and no JSON") from None
    return understood(name, told)


def _brief(sentence: str) -> str:
    return sentence if len(sentence) <= 200 else sentence[:197] + "..."
