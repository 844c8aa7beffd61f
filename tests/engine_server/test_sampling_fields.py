"""Each sampling field through the openai client, and answers in OpenAI's own shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from chairlift_engine.request import TokenLogprobs
from chairlift_engine.server import answers
from chairlift_engine.server.logprob_shapes import LEAST, chat_logprobs, completion_logprobs
from chairlift_engine.server.text_stream import Scored
from chairlift_engine.tokenizer import ByteTokenizer

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(shared_engine) -> Iterator[openai.OpenAI]:
    base_url = f"{shared_engine.url}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def seen(shared_engine) -> Iterator[Any]:
    """What the engine was told of the last request to sample by."""
    add, requests = shared_engine.serving.engine.request_add, []
    engine = shared_engine.serving.engine

    def remember(request: Any) -> None:
        requests.append(request)
        add(request)

    engine.request_add = remember
    yield lambda: requests[-1].sampling
    engine.request_add = add


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("fields", "attribute", "value"),
    [
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"seed": -7}, "seed", -7),
        ({"presence_penalty": 1.5}, "presence_penalty", 1.5),
        ({"frequency_penalty": -2}, "frequency_penalty", -2.0),
        ({"logit_bias": {"97": -100, "5": 1.5}}, "logit_bias", ((97, -100.0), (5, 1.5))),
        ({"extra_body": {"min_p": 0.25}}, "min_p", 0.25),
        ({"extra_body": {"top_k": 7}}, "top_k", 7),
        ({"extra_body": {"repetition_penalty": 1.25}}, "repetition_penalty", 1.25),
        ({"extra_body": {"min_tokens": 3}}, "min_tokens", 3),
    ],
)
def test_each_field_of_the_openai_client_reaches_the_sampler(
    client, seen, fields, attribute, value
) -> None:
    client.completions.create(model="echo", prompt="abc", max_tokens=3, **fields)
    assert getattr(seen(), attribute) == value
    client.chat.completions.create(model="echo", messages=HI, max_tokens=3, **fields)
    assert getattr(seen(), attribute) == value


def test_min_tokens_outlives_stop_tokens_and_stop_strings(client) -> None:
    asked: Any = {"model": "echo", "prompt": "a.b.c", "max_tokens": 9}
    for stop in ({"stop": "."}, {"extra_body": {"stop_token_ids": [ord(".")]}}):
        assert client.completions.create(**asked, **stop).choices[0].text == "a"
        extra = {"extra_body": {"min_tokens": 2, **stop.pop("extra_body", {})}}
        assert client.completions.create(**asked, **stop, **extra).choices[0].text == "a.b"


def test_several_choices_share_a_prompt_that_counts_once(client, seen) -> None:
    asked: Any = {"model": "echo", "prompt": ["ab", "xyz"], "max_tokens": 4, "n": 3, "seed": 5}
    answer = client.completions.create(**asked)
    assert [(c.index, c.text) for c in answer.choices] == [
        *((i, "ab") for i in range(3)),
        *((i, "xyz") for i in range(3, 6)),
    ]
    assert answer.usage.prompt_tokens == 3 + 4
    assert answer.usage.completion_tokens == 3 * 3 + 3 * 4
    chunks = list(client.completions.create(**asked, stream=True))
    assert {c.choices[0].index for c in chunks} == set(range(6))


def test_choices_draw_differently_and_repeat_by_seed(shared_engine) -> None:
    def seeds(**fields: object) -> list[int]:
        body = {"model": "echo", "messages": HI, **fields}
        orders, origin = shared_engine.serving.orders, _Origin()
        order = orders.chat(json.dumps(body).encode(), origin)
        return [r.sampling.seed for r in order.requests]

    three = seeds(n=3, seed=5)
    assert three[0] == 5 and len(set(three)) == 3
    assert three == seeds(n=3, seed=5) and three[:2] == seeds(n=2, seed=5)
    assert not set(three[1:]) & set(seeds(n=3, seed=6))
    assert seeds(n=2) != seeds(n=2)


class _Origin:
    arrival_s, request_class, tenant = 0.0, "interactive", "anonymous"


def test_completions_with_logprobs_say_each_tokens_and_the_likeliest(client) -> None:
    answer = client.completions.create(model="echo", prompt="h\u00e9", max_tokens=9, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["h", "bytes:\\xc3", "bytes:\\xa9", "<|end|>"]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.top_logprobs[0] == {"h": -0.5, "i": -1.5}
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert len(logprobs.tokens) == answer.usage.completion_tokens


def test_chat_with_logprobs_gives_bytes_and_as_many_likeliest_as_asked(client) -> None:
    asked: Any = {"model": "echo", "messages": HI, "max_tokens": 2, "logprobs": True}
    content = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert [(e.token, e.bytes, e.logprob, e.top_logprobs) for e in content] == [
        ("u", [117], -0.5, []),
        ("s", [115], -0.5, []),
    ]
    top = client.chat.completions.create(**asked, top_logprobs=2).choices[0].logprobs.content[0]
    assert [(e.token, e.logprob) for e in top.top_logprobs] == [("u", -0.5), ("v", -1.5)]


def test_an_echoed_prompt_comes_first_with_its_own_logprobs(client) -> None:
    asked: Any = {"model": "echo", "max_tokens": 2, "echo": True}
    plain = client.completions.create(prompt=["\u00e9a", [104, 105]], **asked)
    assert [c.text for c in plain.choices] == ["\u00e9a\u00e9", "hihi"]
    scored = client.completions.create(prompt="\u00e9a", logprobs=1, **asked).choices[0].logprobs
    assert scored.tokens == [
        "<|begin|>", "bytes:\\xc3", "bytes:\\xa9", "a", "bytes:\\xc3", "bytes:\\xa9",
    ]  # fmt: skip
    assert scored.text_offset == [0, 0, 0, 1, 2, 2]
    assert scored.token_logprobs[0] is scored.top_logprobs[0] is None
    streamed = client.completions.create(prompt="\u00e9a", logprobs=1, stream=True, **asked)
    choices = [chunk.choices[0] for chunk in streamed]
    assert "".join(c.text for c in choices) == "\u00e9a\u00e9"
    assert [t for c in choices for t in c.logprobs.tokens] == scored.tokens


@pytest.mark.parametrize("stop", [None, "b", "\u00e9", ["lo", "x"]])
def test_streamed_logprobs_are_those_of_the_whole_answer(shared_engine, stop) -> None:
    asked = {"stop": stop, "max_tokens": 12}
    whole = shared_engine.complete("hello b\u00e9x", logprobs=1, **asked).json()["choices"][0]
    chunks = events(shared_engine.complete("hello b\u00e9x", logprobs=1, stream=True, **asked).text)
    for name, values in whole["logprobs"].items():
        assert [v for c in chunks for v in c["choices"][0]["logprobs"][name]] == values
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["text"]
    if stop is not None:
        assert "".join(whole["logprobs"]["tokens"]) == whole["text"]
    chat = {"logprobs": True, "top_logprobs": 1, **asked}
    whole = shared_engine.chat("hello b\u00e9x", **chat).json()["choices"][0]
    chunks = events(shared_engine.chat("hello b\u00e9x", stream=True, **chat).text)
    streamed = [c["choices"][0]["logprobs"] for c in chunks]
    assert streamed.pop(0) is None, "the opening says the role only"
    assert [e for each in streamed for e in each["content"]] == whole["logprobs"]["content"]


def test_an_infinite_logprob_is_still_json() -> None:
    tokenizer = ByteTokenizer()
    for value in (float("-inf"), float("nan")):
        scored = [Scored(97, 0, TokenLogprobs(value, ((97, -0.1), (98, value))))]
        for shape in (completion_logprobs, chat_logprobs):
            assert str(LEAST) in json.dumps(shape(scored, tokenizer), allow_nan=False)


FIELDS = [
    {},
    {"n": 2, "stop": ["s"]},
    {"n": 2, "logprobs": 2},
    {"logprobs": 0, "max_tokens": 1},
    {"stream_options": {"include_usage": True}, "logprobs": 1},
]


@pytest.mark.parametrize("fields", FIELDS)
def test_answers_have_exactly_openais_shapes(shared_engine, fields) -> None:
    whole = {k: v for k, v in fields.items() if k != "stream_options"}
    text = shared_engine.complete("yes", **whole).text
    conforms(Completion, text)
    conforms(answers.Completion, text)
    chat = {k: v for k, v in whole.items() if k != "logprobs"}
    if "logprobs" in fields:
        chat |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    text = shared_engine.chat("yes", **chat).text
    conforms(ChatCompletion, text)
    conforms(answers.ChatCompletion, text)
    options = {"stream_options": fields["stream_options"]} if "stream_options" in fields else {}
    for chunk in events(shared_engine.chat("yes", stream=True, **chat, **options).text):
        conforms(ChatCompletionChunk, json.dumps(chunk))
        conforms(answers.ChatChunk, json.dumps(chunk))
    # The client's own type for completions has no room for OpenAI's null before the last chunk.
    for chunk in events(shared_engine.complete("yes", stream=True, **whole, **options).text):
        conforms(answers.CompletionChunk, json.dumps(chunk))


def conforms(shape: type[BaseModel], text: str) -> None:
    """Every name is OpenAI's and every value of its type, with nothing converted."""
    parsed = shape.model_validate_json(text, strict=True)
    assert parsed.model_dump(mode="json", exclude_unset=True) == json.loads(text)
    assert not _unknown(parsed)


def _unknown(value: object) -> list[str]:
    if isinstance(value, list):
        return [name for item in value for name in _unknown(item)]
    if not isinstance(value, BaseModel):
        return []
    return [*(value.model_extra or {}), *(n for _, v in value for n in _unknown(v))]
