"""One request's answer as it grows: tokens in, readable text out.

Detokenises without splitting characters, ends at stop strings, and keeps what its reader has not
taken yet. That buffer holds at most `max_tokens` tokens' text, so a slow client costs its own
memory only. Lives on the event loop; knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from chairlift_engine.request import FinishReason, Request
from chairlift_engine.server.stop_strings import StopStrings
from chairlift_engine.tokenizer import IncrementalDetokenizer, Tokenizer


class Piece(NamedTuple):
    """Text since the last piece, possibly none; finish_reason on the last one."""

    text: str
    finish_reason: FinishReason | None


class TextStream:
    """`wake` is called whenever there is something to take."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        wake: Callable[[], None],
    ) -> None:
        self.request = request
        self.num_output_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop_strings = StopStrings(stops)
        self._texts: list[str] = []
        self._wake = wake

    def feed(self, token_id: int, finish_reason: FinishReason | None) -> None:
        """Take one token. A stop token counts, but is not part of the text."""
        if self.finish_reason is not None:
            return  # sampled before the engine heard that a stop string had ended this
        self.num_output_tokens += 1
        text = "" if finish_reason is FinishReason.STOP else self._detokenizer.feed(token_id)
        if finish_reason is not None:
            text += self._detokenizer.flush()
        shown, stopped = self._stop_strings.feed(text)
        if stopped:
            finish_reason = FinishReason.STOP
        elif finish_reason is not None:
            shown += self._stop_strings.flush()
        self._texts.append(shown)
        self.finish_reason = finish_reason
        self._wake()

    def end(self, reason: FinishReason) -> None:
        """No token comes any more: aborted or failed. Text held back is not shown then."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self._wake()

    def take(self) -> Piece:
        text = "".join(self._texts)
        self._texts.clear()
        return Piece(text, self.finish_reason)
