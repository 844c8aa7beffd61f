"""What one request has used, as far as the gateway can tell: first guessed, then counted, at last
stated by the engine. Pure.

`metering` holds one for each request; `sse` and a whole answer's end feed it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from chairlift_protocol.quota import bounded_tokens
from chairlift_protocol.wire import USAGE_COMMENT

_COMMENT: Final = re.compile(rb"^" + re.escape(USAGE_COMMENT) + rb"(\{[^\n]*\})\n\n", re.MULTILINE)
_DECODER: Final = json.JSONDecoder()
_USAGE_KEY: Final = b'"usage"'


@dataclass(frozen=True, slots=True)
class Used:
    """As an engine states it. is_final: no token comes on top."""

    prompt_tokens: int
    answer_tokens: int
    is_final: bool = True


@dataclass(slots=True)
class Usage:
    """Guesses stand until an engine has said how it is. guessed_answer_tokens: of an answer that
    comes as a whole, until its engine was asked; a stream's tokens are seen.

    So a client that leaves before the first token is charged the prompt, since an engine was at it.
    Nothing is charged for one that asks for no tokens, nor for one that got an error unless tokens
    of its answer had come; `metering` says which, by is_void.
    """

    guessed_prompt_tokens: int
    guessed_answer_tokens: int = 0
    is_sent: bool = False
    is_void: bool = False
    _prompt_tokens: int | None = None
    _stated_tokens: int = 0
    _seen_tokens: int = 0

    @property
    def num_answer_tokens(self) -> int:
        return self._stated_tokens + self._seen_tokens

    @property
    def num_tokens(self) -> int:
        if self.is_void or not self.is_sent:
            return 0
        if self._prompt_tokens is not None:
            return self._prompt_tokens + self.num_answer_tokens
        guessed = self.guessed_prompt_tokens
        return guessed + max(self.guessed_answer_tokens, self.num_answer_tokens)

    def sent(self) -> None:
        """To one engine, or to the next: what the one before said is no longer so."""
        self.is_sent = True
        self._prompt_tokens, self._stated_tokens, self._seen_tokens = None, 0, 0

    def see(self, num_tokens: int) -> None:
        self._seen_tokens += num_tokens

    def state(self, used: Used) -> None:
        """What is seen from now on comes on top."""
        self._prompt_tokens = bounded_tokens(used.prompt_tokens)
        self._stated_tokens = bounded_tokens(used.answer_tokens)
        self._seen_tokens = 0

    def take_comments(self, events: bytes) -> tuple[bytes, bytes]:
        """The events without what the engine says to the gateway alone, and those of them that no
        statement covers yet."""
        if USAGE_COMMENT not in events:
            return events, events
        uncovered = events
        for comment in _COMMENT.finditer(events):
            self._state_json(comment[1])
            uncovered = events[comment.end() :]
        return _COMMENT.sub(b"", events), uncovered

    def read_whole(self, body: bytes | bytearray) -> None:
        """Of a whole answer: its last member of that name, since text cannot hold a bare quote."""
        found = body.rfind(_USAGE_KEY)
        if found >= 0:
            self._state_json(bytes(body[found + len(_USAGE_KEY) :].lstrip(b" :\n")))

    def _state_json(self, text: bytes) -> None:
        try:
            told, _ = _DECODER.raw_decode(text.decode("utf-8", "replace"))
            self.state(Used(int(told["prompt_tokens"]), int(told["completion_tokens"])))
        except (ValueError, KeyError, TypeError, OverflowError):
            return
