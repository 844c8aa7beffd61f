"""Gateways of pools at rest: what one counted stays true until it answers that something arrived.

One open request a gateway instead of one each tick. Who is not asked about any more, as after a
rest or a lost leadership, is let go.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import aiohttp

from chairlift_operator.gateway_client import Counted, Counts, is_as_before, read_arrivals
from chairlift_operator.http_asking import EngineError
from chairlift_operator.kube.settings import TICK_S

logger = logging.getLogger(__name__)

UNREAD_S: Final = 4 * TICK_S


@dataclass(slots=True)
class _Silence:
    """waiting: whether the counts are as they were, once it is over."""

    known: Counted
    waiting: asyncio.Task[bool]
    read_at_s: float


class Listening:
    def __init__(self, session: aiohttp.ClientSession, now_s: Callable[[], float]) -> None:
        self._session, self._now_s = session, now_s
        self._silences: dict[str, _Silence] = {}

    async def read(self, url: str) -> Counts:
        """What this gateway counts now; EngineError."""
        silence = self._silences.get(url)
        if silence is not None and not silence.waiting.done():
            silence.read_at_s = self._now_s()
            return silence.known.counts
        is_known = silence is not None and silence.waiting.result()
        known = silence.known if silence and is_known else await read_arrivals(self._session, url)
        if known.tag is not None:
            waiting = asyncio.create_task(self._is_as_before(url, known.tag))
            self._silences[url] = _Silence(known, waiting, self._now_s())
        return known.counts

    async def run(self) -> None:
        """Until cancelled: nobody is left waiting then."""
        try:
            while True:
                await asyncio.sleep(TICK_S)
                self._let_go(self._now_s() - UNREAD_S)
        finally:
            self._let_go(math.inf)

    def _let_go(self, read_before_s: float) -> None:
        late = [u for u, silence in self._silences.items() if silence.read_at_s < read_before_s]
        for url in late:
            self._silences.pop(url).waiting.cancel()

    async def _is_as_before(self, url: str, tag: str) -> bool:
        """Where it cannot be told, the next look asks the gateway itself."""
        try:
            return await is_as_before(self._session, url, tag)
        except EngineError as error:
            logger.debug("%s", error)
            return False
