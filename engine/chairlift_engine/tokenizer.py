"""Text to token ids and back: the model's own tokenizer, or bytes where there is no model.

Imports neither torch nor transformers until a model's tokenizer is asked for, so that simulators
start in an image without them. Used by the server; the scheduler and the runners see ids only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

# What a decoder shows for bytes that are no character, or not yet.
REPLACEMENT = "\ufffd"


class ChatTemplateError(ValueError):
    """These messages cannot be turned into a prompt; the message says why."""


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """Token ids lie in range(vocab_size)."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out."""
        ...

    def encode(self, text: str) -> list[int]:
        """A plain prompt, with what the model wants at its start."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Without special tokens; bytes that form no character become U+FFFD."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A conversation as a prompt for the assistant's turn. Raises ChatTemplateError."""
        ...


class ByteTokenizer:
    """UTF-8 bytes and four special tokens. Text can never spell a special token."""

    _FIRST_SPECIAL = 256
    BEGIN, END, TURN_START, TURN_END = range(_FIRST_SPECIAL, _FIRST_SPECIAL + 4)

    vocab_size = _FIRST_SPECIAL + 4
    eos_token_ids = frozenset((END, TURN_END))
    special_ids = frozenset(range(_FIRST_SPECIAL, _FIRST_SPECIAL + 4))

    def encode(self, text: str) -> list[int]:
        return [self.BEGIN, *_utf8(text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(i for i in token_ids if i < self._FIRST_SPECIAL).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        ids = [self.BEGIN]
        for message in messages:
            turn = f"{message['role']}\n{message['content']}"
            ids += [self.TURN_START, *_utf8(turn), self.TURN_END]
        return [*ids, self.TURN_START, *b"assistant\n"]


class HfTokenizer:
    """The tokenizer of a Hugging Face model folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        # The Rust tokenizer underneath decodes several times faster than its wrapper.
        self._fast = getattr(self._tokenizer, "backend_tokenizer", None)
        self.vocab_size: int = len(self._tokenizer)
        self.special_ids: frozenset[int] = frozenset(self._tokenizer.all_special_ids)
        self.eos_token_ids = _eos_token_ids(folder, self._tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(_utf8(text).decode())
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str
        if self._fast is not None:
            text = self._fast.decode(list(token_ids), skip_special_tokens=True)
        else:
            text = self._tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return text

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise ChatTemplateError(
                "messages: this model has no chat template; send a prompt to /v1/completions"
            )
        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:  # whatever the model's own template raises, in its own words
            raise ChatTemplateError(f"messages: the model's chat template: {error}") from error
        return ids


def _utf8(text: str) -> bytes:
    # A JSON body can hold half of a surrogate pair, which has no UTF-8.
    return text.encode(errors="replace")


def _eos_token_ids(folder: Path, own: int | None) -> frozenset[int]:
    """Instruction-tuned models often end turns by another token than their tokenizer's."""
    ids = set() if own is None else {own}
    for name in ("generation_config.json", "config.json"):
        try:
            given = json.loads((folder / name).read_text()).get("eos_token_id")
        except OSError:
            continue
        ids.update([given] if isinstance(given, int) else given or ())
    return frozenset(ids)


class IncrementalDetokenizer:
    """The text of a growing output, piece by piece; the pieces joined are `decode` of all its ids.

    A character whose bytes come in several tokens is held back until it is whole. Only the last few
    ids are decoded each time, so a token costs the same wherever it stands.
    """

    _WINDOW, _KEPT = 16, 8

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_given = 0  # characters of the window's text already returned

    def feed(self, token_id: int) -> str:
        """Text that became complete with this token; often empty."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        # At most the last character is incomplete: an earlier one was ended by what follows it.
        complete = text.removesuffix(REPLACEMENT)
        new = complete[self._num_given :]
        self._num_given += len(new)
        if len(self._ids) >= self._WINDOW:
            self._shrink(text)
        return new

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        text = self._tokenizer.decode(self._ids)
        new = text[self._num_given :]
        self._num_given = len(text)
        return new

    def _shrink(self, text: str) -> None:
        """Keep the last ids, cut where their text is still the end of the whole text.

        Elsewhere the cut went through a character. Ids are kept, not dropped, as context: some
        decoders treat the first token of a text differently.
        """
        num_held_back = len(text) - self._num_given
        for kept in range(self._KEPT, len(self._ids)):
            tail = self._tokenizer.decode(self._ids[-kept:])
            if (len(tail) > num_held_back or not num_held_back) and text.endswith(tail):
                self._ids = self._ids[-kept:]
                self._num_given = len(tail) - num_held_back
                return
