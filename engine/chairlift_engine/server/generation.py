"""The choices of one HTTP request while they are generated: where their pieces meet one reader.

Started, read until nothing is left, or abandoned; whatever happens, `abandon` frees what it holds.
Lives on the event loop; knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from chairlift_engine.server.bridge import Bridge
from chairlift_engine.server.errors import interrupted
from chairlift_engine.server.order import Order
from chairlift_engine.server.text_stream import Piece, TextStream
from chairlift_engine.tokenizer import Tokenizer


class ClientLeft(Exception):
    """Nobody is left to answer."""


class Generation:
    def __init__(self, order: Order, bridge: Bridge, tokenizer: Tokenizer) -> None:
        self._bridge = bridge
        self._ready: dict[int, None] = {}  # a set that keeps its order
        self._changed = asyncio.Event()
        self._streams = [
            TextStream(
                request,
                tokenizer,
                order.stops,
                partial(self._wake, index),
                self._close_one,
                order.echo_of(index),
            )
            for index, request in enumerate(order.requests)
        ]
        self._num_unfinished = self._num_open = len(self._streams)
        self._abandoned = False

    @property
    def num_output_tokens(self) -> int:
        return sum(stream.num_output_tokens for stream in self._streams)

    def start(self, on_closed: Callable[[], None]) -> None:
        """on_closed: called when the engine has made the last token of every choice, which for one
        that is stopped is after the step under way."""
        self._on_closed = on_closed
        for stream in self._streams:
            self._bridge.open(stream)

    async def read(self) -> list[tuple[int, Piece]]:
        """The next pieces, by choice; empty when every choice has finished.

        Raises ClientLeft after `abandon`, and ApiError when the server ended one of them.
        """
        if self._num_unfinished == 0:
            return []
        await self._changed.wait()
        self._changed.clear()
        if self._abandoned:
            raise ClientLeft
        ready, self._ready = self._ready, {}
        pieces = [(index, self._streams[index].take()) for index in ready]
        for _, piece in pieces:
            if piece.finish_reason is None:
                continue
            if not piece.finish_reason.is_complete:
                raise interrupted(piece.finish_reason, self._bridge.retry_after_s)
            self._num_unfinished -= 1
        return pieces

    def abandon(self) -> None:
        """Abort what has not finished, and wake the reader; harmless when all has."""
        self._abandoned = True
        self._changed.set()
        self.stop()

    def stop(self) -> None:
        """Abort what has not finished; a reader hears that it was given up."""
        for stream in self._streams:
            if stream.finish_reason is None:
                self._bridge.abort(stream)

    def _close_one(self) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._on_closed()

    def _wake(self, index: int) -> None:
        self._ready[index] = None
        self._changed.set()
