from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from chairlift_protocol.load import Load
from chairlift_protocol.wire import IGNORED_FIELDS_HEADER, LOAD_HEADER


def frames(text: str) -> list[Any]:
    assert text.endswith("data: [DONE]\n\n")
    bodies = [part.removeprefix("data: ") for part in text.split("\n\n")[:-2]]
    return [json.loads(body) for body in bodies]


@pytest.fixture
def client(engine):
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_openai_client_completes(client) -> None:
    answer = client.completions.create(model="echo", prompt="hello", max_tokens=3)
    assert answer.choices[0].text == "hel"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 6,
        "completion_tokens": 3,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_the_openai_client_streams_a_chat_with_usage(client) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    whole = client.chat.completions.create(model="echo", messages=messages)
    stream = client.chat.completions.create(
        model="echo", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    usage = chunks[-1].usage
    assert chunks[-1].choices == [] and usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens, (
        "its prefix is known"
    )
    assert client.models.list().data[0].id == "echo"


def test_the_openai_client_raises_what_the_engine_refuses(client) -> None:
    with pytest.raises(openai.NotFoundError, match="'other' is not served"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="tools: is not supported") as caught:
        client.chat.completions.create(
            model="echo",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    assert caught.value.param == "tools"


def test_a_chat_stream_has_exactly_these_frames(engine) -> None:
    events = engine.stream_stepwise(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=2,
        stream_options={"include_usage": True},
    )
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    head = chunks[0]
    assert head["object"] == "chat.completion.chunk" and head["model"] == "echo"
    assert all((c["id"], c["created"]) == (head["id"], head["created"]) for c in chunks)
    assert [c["choices"] for c in chunks] == [
        [_delta({"role": "assistant", "content": ""}, None)],
        [_delta({"content": "u"}, None)],
        [_delta({"content": "s"}, "length")],
        [],
    ]
    assert [c["usage"] for c in chunks[:-1]] == [None, None, None]
    assert chunks[-1]["usage"]["completion_tokens"] == 2


def _delta(delta: dict[str, str], reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


def test_without_the_option_no_chunk_speaks_of_usage(engine) -> None:
    events = engine.stream_stepwise("/v1/completions", prompt="xy", max_tokens=2)
    chunks = [json.loads(event) for event in events[:-1]]
    assert all("usage" not in chunk for chunk in chunks)
    assert [c["choices"] for c in chunks] == [
        [{"index": 0, "text": "x", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "y", "logprobs": None, "finish_reason": "length"}],
    ]


@pytest.mark.parametrize(
    ("prompt", "stop", "text", "reason"),
    [
        ("one END two", "END", "one ", "stop"),
        ("one EN two", "END", "one EN two", "stop"),  # held back, then shown; ends by eos
        ("one EN", ["END", "x"], "one EN", "stop"),
        ("aéb", "é", "a", "stop"),
        ("日本語", None, "日本語", "stop"),
        ("日本語", "本", "日", "stop"),
    ],
)
def test_streamed_and_whole_text_agree(engine, prompt, stop, text, reason) -> None:
    whole = engine.complete(prompt, stop=stop, max_tokens=50).json()["choices"][0]
    chunks = frames(engine.complete(prompt, stop=stop, max_tokens=50, stream=True).text)
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert whole["text"] == "".join(pieces) == text
    assert not any("\ufffd" in piece or "E" in piece for piece in pieces if "E" not in text)
    assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == reason
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])


def test_a_stop_string_frees_the_request_early(engine, eventually) -> None:
    everything = engine.free_list()
    engine.runner.hold()
    engine.runner.allow(2)
    answer = engine.complete("a.b" + "x" * 90, stop=".", max_tokens=90).json()
    assert answer["choices"][0]["text"] == "a"
    assert answer["usage"]["completion_tokens"] == 2
    engine.runner.allow(1)  # for a step that was under way; a next one would be held
    assert engine.free_list() == everything
    ended = 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="echo"}'
    eventually(lambda: engine.metric(ended) == 1)


def test_several_prompts_become_several_choices(engine) -> None:
    answer = engine.complete([[97, 98], [99]], max_tokens=2).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "ab"), (1, "c")]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 4)
    chunks = frames(engine.complete(["ab", "c"], max_tokens=2, stream=True).text)
    for index, text in enumerate(["ab", "c"]):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == text
        assert [choice["finish_reason"] is None for choice in own].count(False) == 1


def test_stop_token_ids_and_ignore_eos(engine) -> None:
    stopped = engine.complete("abc", stop_token_ids=[ord("b")], max_tokens=9).json()
    assert stopped["choices"][0]["text"] == "a"
    ran_on = engine.complete("ab", ignore_eos=True, max_tokens=5).json()
    assert ran_on["choices"][0]["finish_reason"] == "length"
    assert ran_on["usage"]["completion_tokens"] == 5


def test_completions_default_to_sixteen_tokens_and_chat_to_the_models_length(engine) -> None:
    assert engine.complete("x" * 40).json()["usage"]["completion_tokens"] == 16
    usage = engine.chat("x", ignore_eos=True).json()["usage"]
    assert usage["total_tokens"] == engine.capacity.model_length_tokens


def test_max_tokens_is_clamped_to_the_models_length_in_chat_as_in_completions(engine) -> None:
    asked = {"ignore_eos": True, "max_tokens": 10_000}
    for answer in (engine.complete("x" * 100, **asked), engine.chat("x" * 100, **asked)):
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert answer.json()["usage"]["total_tokens"] == engine.capacity.model_length_tokens


def test_unknown_fields_are_accepted_and_named_in_a_header(engine) -> None:
    response = engine.complete("x", mystery=1, metadata={"a": "b"}, user="me", **{"a,b\n": 2})
    assert response.status_code == 200
    assert response.headers[IGNORED_FIELDS_HEADER] == "mystery,a%2Cb%0A"


def test_every_response_says_the_load_and_echoes_the_request_id(engine) -> None:
    for response in (
        engine.complete("x", headers={"x-request-id": "mine"}),
        engine.client.get("/nowhere", headers={"x-request-id": "mine"}),
    ):
        assert Load.from_json(json.loads(response.headers[LOAD_HEADER])).num_waiting == 0
        assert response.headers["x-request-id"] == "mine"
    assert engine.client.get("/load").json()["free_kv_tokens"] == 64 * 8


def test_one_request_id_twice_at_once_crosses_no_output(engine) -> None:
    engine.runner.hold()
    bodies = [{"model": "echo", "prompt": p, "max_tokens": 3} for p in ("abc", "xyz")]
    connections = [
        engine.open_raw("/v1/completions", body, "x-request-id: twice\r\n") for body in bodies
    ]
    engine.runner.release()
    for connection, text in zip(connections, ("abc", "xyz"), strict=True):
        with connection, connection.makefile("r") as answer:
            received = answer.read()
        assert f'"text":"{text}"' in received and "x-request-id: twice" in received


def test_tokenize_answers_ids_of_a_text_or_a_chat(engine) -> None:
    answer = engine.client.post("/tokenize", json={"prompt": "ab"}).json()
    assert answer == {"count": 3, "max_model_len": 256, "tokens": [256, 97, 98]}
    chat = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
    assert engine.client.post("/tokenize", json=chat).json()["count"] > 3


def test_detokenize_answers_the_text_with_special_tokens_by_name(engine) -> None:
    tokens = engine.client.post("/tokenize", json={"prompt": "a\u00e9"}).json()["tokens"]
    answer = engine.client.post("/detokenize", json={"tokens": tokens, "mystery": 1})
    assert answer.json() == {"prompt": "<|begin|>a\u00e9"}
    assert answer.headers[IGNORED_FIELDS_HEADER] == "mystery"
    for bad in ([260], [-1], ["a"], "ab", [True]):
        refused = engine.client.post("/detokenize", json={"tokens": bad})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith("tokens")


def test_a_method_that_a_path_does_not_have_is_refused_with_those_it_has(engine) -> None:
    refused = engine.client.get("/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["type"] == "invalid_request_error"


def test_a_gateway_that_asks_is_told_what_a_stream_has_used_and_a_client_is_not(engine) -> None:
    asks = {"x-chairlift-usage": "1"}
    gateway = {**asks, "x-chairlift-internal-token": "internal secret"}
    fields = {"max_tokens": 2, "stream": True}
    for headers in ({}, asks):
        assert "usage" not in engine.complete("xy", headers=headers, **fields).text
    first, *events, last, done, end = engine.complete("xy", headers=gateway, **fields).text.split(
        "\n\n"
    )
    assert first == ': chairlift-usage {"prompt_tokens":3,"completion_tokens":0}'
    assert last == ': chairlift-usage {"prompt_tokens":3,"completion_tokens":2}'
    assert (done, end) == ("data: [DONE]", "")
    assert events and all(event.startswith("data: ") for event in events)
