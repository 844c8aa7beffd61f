"""A page of what arrived and is held, which can be asked to answer only once that changes.

`If-None-Match` (RFC 9110) says what the asker knows and `Prefer: wait=S` (RFC 7240) how long it
would wait for something newer. So the operator hears of the first request after a pause at once,
and quiet gateways cost it nothing. `app` serves it; `metrics` notes each change.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST

from chairlift_gateway.client_request import ClientRequest
from chairlift_gateway.headers import find
from chairlift_gateway.metrics import GatewayMetrics

LONGEST_WAIT_S: Final = 60
# An operator waits once at each gateway. Anybody may, and each costs an arrival a third of a
# millisecond, since it is answered then.
MAX_WAITING: Final = 16
_WAIT: Final = re.compile(r"(?:^|[,;\s])wait=(\d{1,4})(?=$|[,;\s])", re.IGNORECASE)


class Changes:
    """A number for each state, and who waits for the next."""

    def __init__(self) -> None:
        self._life = secrets.token_hex(4)  # another process counts from zero again
        self._number = 0
        self._next = asyncio.Event()
        self._is_over = False
        self._num_waiting = 0

    @property
    def tag(self) -> str:
        return f'"{self._life}-{self._number}"'

    def note(self) -> None:
        self._number += 1
        self._wake()

    def end(self) -> None:
        """Nobody waits any more: the process is about to end."""
        self._is_over = True
        self._wake()

    async def is_newer(self, tag: str, wait_s: float) -> bool:
        """Than this tag, within that time; at once where many wait already."""
        if tag == self.tag and not self._is_over and self._num_waiting < MAX_WAITING:
            self._num_waiting += 1
            try:
                async with asyncio.timeout(wait_s):
                    await self._next.wait()
            except TimeoutError:
                pass
            finally:
                self._num_waiting -= 1
        return tag != self.tag

    def _wake(self) -> None:
        self._next.set()
        self._next = asyncio.Event()


class ArrivalsPage:
    """200 with the series and an ETag, or 304 where the asker's is the newest."""

    def __init__(self, metrics: GatewayMetrics, changes: Changes) -> None:
        self._metrics = metrics
        self._changes = changes
        self._page = ("", b"")

    async def answer(self, request: ClientRequest) -> None:
        known = (find(request.head.headers, b"if-none-match") or b"").decode("latin-1")
        if known and not await self._changes.is_newer(known, _wait_s(request)):
            request.respond(304, [(b"etag", known.encode("latin-1"))], b"")
            return
        tag, page = self._newest()
        headers = [(b"content-type", CONTENT_TYPE_LATEST.encode()), (b"etag", tag.encode())]
        request.respond(200, headers, page)

    def _newest(self) -> tuple[str, bytes]:
        """Made once for all who waited for it."""
        if self._page[0] != self._changes.tag:
            self._page = (self._changes.tag, self._metrics.arrivals())
        return self._page


def _wait_s(request: ClientRequest) -> int:
    preferred = (find(request.head.headers, b"prefer") or b"").decode("latin-1")
    wanted = _WAIT.search(preferred)
    return min(LONGEST_WAIT_S, int(wanted[1])) if wanted else 0
