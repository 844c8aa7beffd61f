from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from chairlift_engine.request import FinishReason, Request, SamplingParams, TokenLogprobs
from chairlift_engine.server.stop_strings import StopStrings
from chairlift_engine.server.text_stream import Piece, TextStream, joined
from chairlift_engine.tokenizer import ByteTokenizer, IncrementalDetokenizer, Tokenizer

letters = st.text("abé", max_size=12)
stop_lists = st.lists(st.text("abé", min_size=1, max_size=4), max_size=4)


def one_character_at_a_time(text: str, stops: list[str], num_free: int = 0) -> tuple[str, bool]:
    """The definition: stop where the first stop string is complete, cut the longest that is.

    One that is complete within the first `num_free` characters does not count.
    """
    for end in range(num_free + 1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))], True
    return text, False


@given(st.lists(letters, max_size=6), stop_lists)
def test_the_cut_is_the_same_however_the_text_is_split(pieces: list[str], stops: list[str]) -> None:
    strings, shown, met = StopStrings(stops), "", False
    expected = one_character_at_a_time("".join(pieces), stops)
    for piece in pieces:
        text, met = strings.feed(piece)
        shown += text
        assert expected[0].startswith(shown), "a prefix of the stop string leaked"
        if met:
            break
    else:
        shown += strings.flush()
    assert (shown, met) == expected


@given(st.lists(letters, max_size=6), stop_lists, st.integers(0, 6))
def test_a_stop_string_that_is_complete_too_early_is_not_met(
    pieces: list[str], stops: list[str], num_free: int
) -> None:
    strings, shown, met = StopStrings(stops), "", False
    expected = one_character_at_a_time("".join(pieces), stops, len("".join(pieces[:num_free])))
    for number, piece in enumerate(pieces):
        text, met = strings.feed(piece, may_stop=number >= num_free)
        shown += text
        if met:
            break
    else:
        shown += strings.flush()
    assert (shown, met) == expected


class Syllables(ByteTokenizer):
    """Tokens of several characters and of parts of one, as real vocabularies have them."""

    TOKENS = (*"ab\u00e9".encode(), b"ab", b"ba\xc3", b"\xa9a", b"aba", b"", "\u00e9b".encode())

    def decode(self, token_ids: Sequence[int], *, specials: bool = False) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        token = self.TOKENS[token_id]
        return bytes((token,)) if isinstance(token, int) else token


outputs = st.lists(st.integers(0, len(Syllables.TOKENS) - 1), min_size=1, max_size=12)


@given(outputs, stop_lists, st.integers(0, 4), st.data())
def test_streamed_text_and_logprobs_are_those_of_the_whole_for_every_stop_setting(
    token_ids: list[int], stops: list[str], min_tokens: int, data: st.DataObject
) -> None:
    tokenizer = Syllables()
    sampling = SamplingParams(max_tokens=99, min_tokens=min_tokens, num_logprobs=0)
    request = Request("r", [1], sampling, arrival_s=0.0)
    stream = TextStream(request, tokenizer, stops, lambda: None, lambda: None)
    pieces: list[Piece] = []
    for position, token in enumerate(token_ids, 1):
        reason = FinishReason.LENGTH if position == len(token_ids) else None
        stream.feed(token, reason, TokenLogprobs(-float(position), ()))
        if data.draw(st.booleans()):
            pieces.append(stream.take())
    whole = joined([*pieces, stream.take()])

    # Offline: the text of all tokens, cut after the fact.
    first_free = len(complete_text(tokenizer, token_ids[:min_tokens], token_ids))
    text, met = one_character_at_a_time(tokenizer.decode(token_ids), stops, first_free)
    assert whole.text == text
    assert whole.finish_reason is (FinishReason.STOP if met else FinishReason.LENGTH)

    begins = [
        len(complete_text(tokenizer, token_ids[:n], token_ids)) for n in range(len(token_ids))
    ]
    shown = [n for n, begin in enumerate(begins) if begin < len(text) or not met]
    assert [s.token_id for s in whole.scored] == [token_ids[n] for n in shown]
    assert [s.text_offset for s in whole.scored] == [begins[n] for n in shown]
    assert [s.logprobs for s in whole.scored] == [TokenLogprobs(-1.0 - n, ()) for n in shown]
    num_characters = 0
    for piece in pieces:
        num_characters += len(piece.text)
        assert (
            met or piece.finish_reason or all(s.text_offset < num_characters for s in piece.scored)
        ), "a token was told of before its text"


def complete_text(tokenizer: Tokenizer, first: list[int], all_ids: list[int]) -> str:
    """What a stream knows of the text after these tokens."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join(detokenizer.feed(token_id) for token_id in first)
    return text + detokenizer.flush() if first == all_ids else text


def test_a_character_that_the_length_cut_off_is_shown_as_a_replacement() -> None:
    request = Request("r", [1], SamplingParams(max_tokens=1), arrival_s=0.0)
    stream = TextStream(request, ByteTokenizer(), (), lambda: None, lambda: None)
    stream.feed("é".encode()[0], FinishReason.LENGTH)
    assert stream.take().text == "\ufffd"
