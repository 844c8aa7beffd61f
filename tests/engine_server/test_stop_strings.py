from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chairlift_engine.request import FinishReason, Request, SamplingParams
from chairlift_engine.server.stop_strings import StopStrings
from chairlift_engine.server.text_stream import TextStream
from chairlift_engine.tokenizer import ByteTokenizer

letters = st.text("abé", max_size=12)
stop_lists = st.lists(st.text("abé", min_size=1, max_size=4), max_size=4)


def one_character_at_a_time(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: stop where the first stop string is complete, cut the longest that is."""
    for end in range(1, len(text) + 1):
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


@given(letters.filter(bool), stop_lists)
def test_a_stream_of_byte_tokens_shows_the_text_before_the_stop(
    text: str, stops: list[str]
) -> None:
    tokenizer = ByteTokenizer()
    request = Request("r", [1], SamplingParams(max_tokens=99), arrival_s=0.0)
    stream, shown = TextStream(request, tokenizer, stops, lambda: None), ""
    tokens = tokenizer.encode(text)
    for position, token in enumerate(tokens, 1):
        stream.feed(token, FinishReason.LENGTH if position == len(tokens) else None)
        piece = stream.take().text
        assert "\ufffd" not in piece, "a character was split"
        shown += piece
    expected, met = one_character_at_a_time(text, stops)
    assert shown == expected
    assert stream.finish_reason == (FinishReason.STOP if met else FinishReason.LENGTH)


def test_a_character_that_the_length_cut_off_is_shown_as_a_replacement() -> None:
    request = Request("r", [1], SamplingParams(max_tokens=1), arrival_s=0.0)
    stream = TextStream(request, ByteTokenizer(), (), lambda: None)
    stream.feed("é".encode()[0], FinishReason.LENGTH)
    assert stream.take().text == "\ufffd"
