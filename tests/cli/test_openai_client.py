"""The public `openai` client, unchanged, against `chairlift local`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

MESSAGES: Any = [{"role": "user", "content": "Why is the sky blue?"}]


@pytest.fixture
def client(shared_local: Any) -> Iterator[openai.OpenAI]:
    with shared_local.client() as client:
        yield client


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_chat_answer_has_text_a_finish_reason_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_chat_stream_is_the_same_answer_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, temperature=0
    )
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *pieces, last = chunks
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [p.choices[0].finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage == whole.usage
    assert all(piece.usage is None for piece in pieces)


def test_a_completion_whole_and_in_pieces(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="Once upon", max_tokens=8, temperature=0)
    assert whole.choices[0].finish_reason == "length" and whole.usage is not None
    assert whole.usage.completion_tokens == 8
    chunks = list(
        client.completions.create(
            model="tiny", prompt="Once upon", max_tokens=8, temperature=0, stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert "other" in str(refused.value)


def test_an_over_long_prompt_is_a_bad_request_that_says_so_by_code(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "word " * 3000}],
                stream=stream,
            )
        assert refused.value.code == "context_length_exceeded"
        assert "2048" in str(refused.value)


def test_a_field_out_of_range_is_a_bad_request_that_names_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert "temperature" in str(refused.value)
