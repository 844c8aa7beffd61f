"""One request's answer as it grows: tokens in, readable text out.

Detokenises without splitting characters, ends at stop strings, and keeps what its reader has not
taken yet. That buffer holds at most `max_tokens` tokens' text, so a slow client costs its own
memory only. Lives on the event loop; knows no HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from chairlift_engine.request import FinishReason, Request, TokenLogprobs
from chairlift_engine.server.stop_strings import StopStrings
from chairlift_engine.tokenizer import IncrementalDetokenizer, Tokenizer


class Scored(NamedTuple):
    """A token and its logprobs; those of a prompt's first token nobody knows.

    text_offset: characters of the choice's text before it.
    """

    token_id: int
    text_offset: int
    logprobs: TokenLogprobs | None


class Piece(NamedTuple):
    """Text since the last piece, possibly none; finish_reason on the last one.

    A token is scored in the piece that holds its first character, or, where it has none, in the
    next one with text; a stop string cuts both alike.
    """

    text: str
    finish_reason: FinishReason | None
    scored: tuple[Scored, ...] = ()


def joined(pieces: Sequence[Piece]) -> Piece:
    """Consecutive pieces as one."""
    text = "".join(piece.text for piece in pieces)
    return Piece(text, pieces[-1].finish_reason, tuple(s for p in pieces for s in p.scored))


class Echo(NamedTuple):
    """A prompt to be repeated before its answer; offsets are those of its tokens in its text."""

    text: str
    offsets: tuple[int, ...]


class TextStream:
    """`wake` is called whenever there is something to take, `on_closed` once no token comes."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        wake: Callable[[], None],
        on_closed: Callable[[], None],
        echo: Echo | None = None,
    ) -> None:
        self.request = request
        self.num_output_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop_strings = StopStrings(stops)
        self._texts: list[str] = []
        self._scored: list[Scored] = []
        self._unshown: deque[Scored] = deque()
        self._num_made = self._num_shown = 0  # characters: complete, and not held back
        self._echo = echo
        self._wake = wake
        self._on_closed = on_closed

    def feed(
        self,
        token_id: int,
        finish_reason: FinishReason | None,
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """Take one token. A stop token counts, but is not part of the text."""
        if self.finish_reason is not None:
            # Sampled before the engine heard that this had ended. It was made for whoever gave the
            # answer up, but is no part of one that a stop string had completed.
            if not self.finish_reason.is_complete:
                self.num_output_tokens += 1
            return
        if self._echo is not None and self.num_output_tokens == 0:
            self._repeat(self._echo)
        self.num_output_tokens += 1
        if logprobs is not None:
            self._unshown.append(Scored(token_id, self._num_made, logprobs))
        text = "" if finish_reason is FinishReason.STOP else self._detokenizer.feed(token_id)
        if finish_reason is not None:
            text += self._detokenizer.flush()
        may_stop = self.num_output_tokens > self.request.sampling.min_tokens
        shown, stopped = self._stop_strings.feed(text, may_stop)
        if stopped:
            finish_reason = FinishReason.STOP
        elif finish_reason is not None:
            shown += self._stop_strings.flush()
        self._num_made += len(text)
        self._show(shown, is_all=finish_reason is not None and not stopped)
        self.finish_reason = finish_reason
        self._wake()

    def end(self, reason: FinishReason) -> None:
        """Aborted or failed: nothing is shown any more, text held back neither."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self._wake()

    def close(self) -> None:
        """The engine has made its last token."""
        self._on_closed()

    def take(self) -> Piece:
        piece = Piece("".join(self._texts), self.finish_reason, tuple(self._scored))
        self._texts.clear()
        self._scored.clear()
        return piece

    def _repeat(self, echo: Echo) -> None:
        logprobs = self.request.prompt_logprobs
        if logprobs:
            tokens = self.request.token_ids[: self.request.num_prompt_tokens]
            self._scored += map(Scored, tokens, echo.offsets, logprobs)
        self._num_made = len(echo.text)
        self._show(echo.text, is_all=False)

    def _show(self, text: str, is_all: bool) -> None:
        self._texts.append(text)
        self._num_shown += len(text)
        while self._unshown and (is_all or self._unshown[0].text_offset < self._num_shown):
            self._scored.append(self._unshown.popleft())
