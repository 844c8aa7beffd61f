from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_gateway.sse import LONGEST_HELD_BYTES, EventSplitter, num_token_events

EVENTS = [b"data: {}\n\n", b"data: {}\r\n\r\n", b": ping\n\n", b"data: [DONE]\n\n"]


@given(st.lists(st.sampled_from(EVENTS), max_size=8), st.data())
def test_however_the_bytes_are_cut_whole_events_come_out_unchanged(
    events: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(events) + b"data: broken"
    splitter, out, position = EventSplitter(), b"", 0
    while position < len(stream):
        size = data.draw(st.integers(1, 20))
        piece = splitter.feed(stream[position : position + size])
        assert piece == b"" or piece.endswith((b"\n\n", b"\n\r\n"))
        out += piece
        position += size
    assert out == b"".join(events)
    assert splitter.rest() == b"data: broken"


def test_a_giant_event_is_relayed_in_pieces_and_not_held() -> None:
    splitter = EventSplitter()
    giant = b"data: " + b"x" * LONGEST_HELD_BYTES
    assert splitter.feed(giant) == giant
    assert splitter.rest() == b""


def chat(delta: dict[str, object], **more: object) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": delta, **more}]}).encode()


@pytest.mark.parametrize(
    ("payload", "is_token"),
    [
        (chat({"content": "Hi"}), True),
        (chat({"content": " "}), True),
        (chat({"role": "assistant", "content": "Hi"}), True),
        (chat({"content": '"role":"assistant","content":""'}), True),
        (chat({"content": '{"error": "none"}'}), True),
        (chat({"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}), True),
        (b'{"choices":[{"index":0,"text":"a"}]}', True),
        (chat({"role": "assistant", "content": ""}), False),
        (chat({"role": "assistant"}), False),
        (chat({}, finish_reason="length"), False),
        (b'{"choices":[{"index":0,"text":"","finish_reason":"stop"}]}', False),
        (b'{"choices":[],"usage":{"completion_tokens":3}}', False),
        (b'{"error":{"message":"no"}}', False),
        (b"[DONE]", False),
    ],
)
def test_only_an_event_with_text_is_a_token(payload: bytes, is_token: bool) -> None:
    compact = payload if payload == b"[DONE]" else json.dumps(json.loads(payload)).encode()
    for spelled in (payload, compact):
        assert num_token_events(b"data: " + spelled + b"\n\n") == is_token
        assert num_token_events(b"data: " + spelled + b"\r\n\r\n") == is_token


def test_comments_are_no_tokens_and_events_that_came_together_all_count() -> None:
    assert num_token_events(b": ping\n\n") == 0
    token = b"data: " + chat({"content": "a"}) + b"\n\n"
    assert num_token_events(token + b": ping\n\n" + token + b"data: [DONE]\n\n") == 2
