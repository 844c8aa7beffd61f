"""Text to token ids and back: the model's own tokenizer, or bytes where there is no model.

Imports neither torch nor transformers until a model's tokenizer is asked for, so that simulators
start in an image without them. Used by the server; the scheduler and the runners see ids only.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

# What a decoder shows for bytes that are no character, or not yet.
REPLACEMENT = "\ufffd"
# How vocabularies write what cannot be written: SentencePiece spaces and single bytes.
SPACE_MARK = "\u2581"
BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet of byte-level vocabularies: printable bytes are themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_LETTER = _byte_letters()


class ChatTemplateError(ValueError):
    """These messages cannot be turned into a prompt; the message says why."""


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """Token ids lie in range(vocab_size)."""
        ...

    @property
    def longest_token_characters(self) -> int:
        """So a text of N times as many characters has at least N tokens."""
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

    def decode(self, token_ids: Sequence[int], *, specials: bool = False) -> str:
        """Without special tokens, unless asked; bytes that form no character become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for: often part of a character; a special token's name."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A conversation as a prompt for the assistant's turn. Raises ChatTemplateError.

        What the messages say is text, also where it spells a special token.
        """
        ...


class ByteTokenizer:
    """UTF-8 bytes and four special tokens. Text can never spell a special token."""

    _FIRST_SPECIAL = 256
    BEGIN, END, TURN_START, TURN_END = range(_FIRST_SPECIAL, _FIRST_SPECIAL + 4)
    _NAMES = (b"<|begin|>", b"<|end|>", b"<|turn|>", b"<|turn_end|>")

    vocab_size = _FIRST_SPECIAL + 4
    longest_token_characters = 1
    eos_token_ids = frozenset((END, TURN_END))
    special_ids = frozenset(range(_FIRST_SPECIAL, _FIRST_SPECIAL + 4))

    def encode(self, text: str) -> list[int]:
        return [self.BEGIN, *_utf8(text)]

    def decode(self, token_ids: Sequence[int], *, specials: bool = False) -> str:
        if specials:
            return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")
        return bytes(i for i in token_ids if i < self._FIRST_SPECIAL).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < self._FIRST_SPECIAL:
            return bytes((token_id,))
        return self._NAMES[token_id - self._FIRST_SPECIAL]

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        ids = [self.BEGIN]
        for message in messages:
            turn = f"{message['role']}\n{message['content']}"
            ids += [self.TURN_START, *_utf8(turn), self.TURN_END]
        return [*ids, self.TURN_START, *b"assistant\n"]


class HfTokenizer:
    """The tokenizer of a Hugging Face model folder.

    num_embeddings: how many ids the model has room for, where that is known.
    """

    def __init__(self, folder: Path, num_embeddings: int | None = None) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        # The Rust tokenizer underneath decodes several times faster than its wrapper.
        self._fast = getattr(self._tokenizer, "backend_tokenizer", None)
        size = len(self._tokenizer)
        self.vocab_size: int = size if num_embeddings is None else min(size, num_embeddings)
        self.longest_token_characters: int = max(map(len, self._tokenizer.get_vocab()))
        self.special_ids: frozenset[int] = frozenset(self._tokenizer.all_special_ids)
        self.eos_token_ids = _eos_token_ids(folder, self._tokenizer.eos_token_id)
        self._added = {i: str(t) for i, t in self._tokenizer.added_tokens_decoder.items()}
        self._forgeable = _spellings(
            token for i, token in self._added.items() if self._is_control(i)
        )
        self._decoder = "" if self._fast is None else _state(self._fast.decoder)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(_utf8(text).decode())
        return ids

    def decode(self, token_ids: Sequence[int], *, specials: bool = False) -> str:
        text: str
        if self._fast is not None:
            text = self._fast.decode(list(token_ids), skip_special_tokens=not specials)
        else:
            text = self._tokenizer.decode(
                list(token_ids),
                skip_special_tokens=not specials,
                clean_up_tokenization_spaces=False,
            )
        return text

    def token_bytes(self, token_id: int) -> bytes:
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        token: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # models round their vocabulary up
            return b""
        if '"ByteLevel"' in self._decoder and BYTE_OF_LETTER.keys() >= set(token):
            return bytes(BYTE_OF_LETTER[letter] for letter in token)
        if fallback := BYTE_FALLBACK.fullmatch(token):
            return bytes((int(fallback[1], 16),))
        return token.replace(SPACE_MARK, " ").encode()

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise ChatTemplateError(
                "messages: this model has no chat template; send a prompt to /v1/completions"
            )
        # Where a message spells a special token, it is cut inside that and encoded in two parts.
        # The cut's mark must be nothing that a client could have written.
        cut = f"\ue000{secrets.token_hex(8)}\ue000"
        try:
            prompt: str = self._tokenizer.apply_chat_template(
                [{k: self._cut(text, cut) for k, text in message.items()} for message in messages],
                add_generation_prompt=True,
                tokenize=False,
            )
        except Exception as error:  # whatever the model's own template raises, in its own words
            raise ChatTemplateError(f"messages: the model's chat template: {error}") from error
        parts = [_utf8(part).decode() for part in prompt.split(cut)]
        encoded = self._tokenizer(
            parts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return [token_id for ids in encoded["input_ids"] for token_id in ids]

    def _is_control(self, token_id: int) -> bool:
        special: bool = self._tokenizer.added_tokens_decoder[token_id].special
        return special or token_id in self.eos_token_ids

    def _cut(self, text: str, cut: str) -> str:
        parts, start = [], 0
        while match := self._forgeable.search(text, start):
            parts.append(text[start : match.start() + 1])
            start = match.start() + 1
        return cut.join([*parts, text[start:]])


def _spellings(tokens: Iterable[str]) -> re.Pattern[str]:
    """Any of these tokens' texts; of one character only, it cannot be cut and is left alone."""
    longest_first = sorted((t for t in tokens if len(t) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _state(decoder: Any) -> str:
    """A Rust decoder's own JSON; it names its steps."""
    return "" if decoder is None else bytes(decoder.__getstate__()).decode()


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
