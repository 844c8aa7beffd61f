"""A connection to Redis in callbacks: commands are written at once, replies read as they arrive.

redis-py has made it, and shaken hands. It knows nothing of quotas; `store` sends on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

import hiredis

from chairlift_gateway.quota.connection import TIMEOUT_S
from chairlift_gateway.quota.patience import Deadline

Command = tuple[str | int | float | bytes, ...]
# One reply for each command, in order; one that is an error stands in its place.
Replies = list[Any]

_NOT_YET: Final = object()


class Wire(asyncio.Protocol):
    """One batch at a time. on_lost is called once, before the batch in flight hears of it: then
    nothing can be sent any more, and what comes later is nobody's answer."""

    def __init__(self, writer: asyncio.StreamWriter, on_lost: Callable[[], None]) -> None:
        self._writer = writer  # one that is collected closes the transport
        self._transport = writer.transport
        self._on_lost = on_lost
        self._reader = hiredis.Reader(notEnoughData=_NOT_YET)
        self._replies: Replies = []
        self._num_awaited = 0
        self._is_lost = False
        self._transport.set_protocol(self)

    def send(
        self, commands: Iterable[Command], on_end: Callable[[Replies | Exception], None]
    ) -> None:
        """on_end gets all replies, or why there are none, TIMEOUT_S later at most. Raise for what
        cannot be written; nothing was sent then."""
        # Its stub says that a command has one word.
        packed = [hiredis.pack_command(command) for command in commands]  # type: ignore[arg-type]
        self._transport.write(b"".join(packed))
        self._num_awaited = len(packed)
        self._on_end = on_end
        self._deadline = Deadline(TIMEOUT_S, self._time_out)

    def close(self) -> None:
        self._lose(ConnectionError("closed by the gateway"))

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _NOT_YET:
                if not isinstance(reply, hiredis.PushNotification):
                    self._replies.append(reply)
        except hiredis.HiredisError as error:
            self._lose(error)
            return
        num_missing = self._num_awaited - len(self._replies)
        if num_missing < 0 or (not num_missing and self._reader.has_data()):
            self._lose(ConnectionError("a reply that nobody asked for"))
        elif not num_missing and self._num_awaited:
            self._end(self._replies)

    def eof_received(self) -> None:
        self._lose(ConnectionError("closed by Redis"))

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(error or ConnectionError("closed by Redis"))

    def _time_out(self) -> None:
        self._lose(TimeoutError("no answer in time"))

    def _lose(self, error: Exception) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._transport.abort()
        self._on_lost()
        if self._num_awaited:
            self._end(error)

    def _end(self, replies: Replies | Exception) -> None:
        self._deadline.cancel()
        self._replies, self._num_awaited = [], 0
        self._on_end(replies)
