from __future__ import annotations

import dataclasses
import json

import pytest

from chairlift_engine.server import bodies
from chairlift_engine.tokenizer import ByteTokenizer

MESSAGES = [{"role": "user", "content": "hi"}]

REFUSED_FIELDS = [
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", [""]),
    ("prompt", None),
    ("prompt", 5),
    ("prompt", ["a", 1]),
    ("prompt", [True]),
    ("prompt", [1, 2.0]),
    ("prompt", [1_000_000]),
    ("prompt", [-1]),
    ("prompt", [10**50]),
    ("prompt", [10**400]),
    ("stop_token_ids", [10**400]),
    ("prompt", "a\0b"),
    ("prompt", "\ud800"),
    ("prompt", ["a"] * 1025),
    ("model", None),
    ("model", 3),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", -0.1),
    ("temperature", 10**400),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_p", float("nan")),
    ("top_k", -2),
    ("top_k", 1.5),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("max_completion_tokens", 0),
    ("n", 0),
    ("n", 129),
    ("n", 10**30),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("stop", ""),
    ("stop", 7),
    ("stop", "\udfff"),
    ("stop_token_ids", [1_000_000]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "1"),
    ("seed", 2**63),
    ("seed", 1.0),
    ("stream", "yes"),
    ("stream_options", 1),
    ("tools", [{"type": "function"}]),
    ("tool_choice", "required"),
    ("response_format", {"type": "json_object"}),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("top_logprobs", 3),
    ("logit_bias", {"260": 5}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"x": 5}),
    ("logit_bias", {"9" * 400: 5}),
    ("logit_bias", {"\u0661": 5}),
    ("logit_bias", {"1": 100.5}),
    ("logit_bias", {"1": float("nan")}),
    ("logit_bias", {str(i): 0 for i in range(1025)}),
    ("logit_bias", [1]),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("echo", "yes"),
    ("suffix", "x"),
    ("best_of", 2),
    ("min_p", 1.1),
    ("min_p", -0.1),
    ("min_tokens", -1),
    ("min_tokens", 17),  # more than the sixteen that a completion has
    ("repetition_penalty", 0),
    ("repetition_penalty", float("inf")),
    ("priority", 1),
    ("priority", False),
    ("functions", [{"name": "f"}]),
    ("audio", {"voice": "x"}),
    ("modalities", ["text", "audio"]),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "value"), REFUSED_FIELDS)
def test_a_bad_field_is_refused_by_name(shared_engine, name, value, stream) -> None:
    fields = {"stream": True} if stream else {}
    response = shared_engine.complete(**{**fields, name: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(name) and len(error["message"]) < 300
    assert error["param"].startswith(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("max_tokenss", "max_tokens"),
        ("max_tokesn", "max_tokens"),
        ("max_tikens", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("respons_format", "response_format"),
        ("TopP", "top_p"),
    ],
)
def test_a_slip_in_a_field_of_ours_is_refused_with_what_was_meant(
    shared_engine, name, meant
) -> None:
    response = shared_engine.complete(**{name: 8})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["message"].endswith(f"did you mean {meant}?")) == (name, True)


def test_a_field_of_another_server_is_accepted_and_said(shared_engine) -> None:
    names = ["top_a", "length_penalty", "typical_p", "stops_all", "seeds"]
    response = shared_engine.complete(**dict.fromkeys(names, 1))
    assert response.status_code == 200, response.text
    assert response.headers["x-chairlift-ignored-fields"] == ",".join(names)


@pytest.mark.parametrize(
    "where",
    [
        lambda names: dict.fromkeys(names, 1),
        lambda names: {
            **dict.fromkeys(names[:10], 1),
            "stream": True,
            "stream_options": dict.fromkeys(names[10:], 1),
        },
        lambda names: {"messages": [{**MESSAGES[0], name: 1} for name in names]},
    ],
    ids=["body", "stream options", "messages"],
)
def test_however_many_names_nobody_knows_only_the_first_are_looked_at_for_slips(
    monkeypatch: pytest.MonkeyPatch, where
) -> None:
    looked_at = []
    monkeypatch.setattr(bodies, "_meant", lambda name, known: looked_at.append(name))
    names = [f"unknown_{number}" for number in range(1000)]
    body = bodies.ChatBody.model_validate({"model": "m", "messages": MESSAGES, **where(names)})
    assert [name.split(".")[-1] for name in body.ignored()] == names
    assert looked_at == names[: bodies.MAX_LOOKED_AT]


def test_stream_options_without_a_stream_are_refused(shared_engine) -> None:
    response = shared_engine.complete(stream_options={"include_usage": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "n": 1, "best_of": 1},
        {"logprobs": None, "echo": False, "suffix": None, "logit_bias": {}, "priority": 0},
        {"tools": [], "response_format": {"type": "text"}, "min_p": 0.0, "top_logprobs": 0},
        {"repetition_penalty": 1, "min_tokens": 0, "service_tier": "auto"},
        {"store": True, "metadata": {}, "user": "me", "stop": [], "stop_token_ids": []},
        {"temperature": None, "top_p": None, "top_k": -1, "seed": None, "stream": None},
        {"temperature": 0, "top_p": 1, "top_k": 0, "seed": -5, "max_tokens": None},
    ],
)
def test_values_that_change_nothing_are_accepted(shared_engine, fields) -> None:
    response = shared_engine.complete(**fields)
    assert response.status_code == 200, response.text
    assert "x-chairlift-ignored-fields" not in response.headers


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"min_tokens": 300}, "min_tokens"),
        ({"n": 129}, "n"),
        ({"n": 0, "stream": True}, "n"),
    ],
)
def test_fields_that_chat_does_not_take_are_refused_by_name(shared_engine, fields, param) -> None:
    response = shared_engine.chat(**fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_more_requests_than_a_call_may_hold_are_refused(shared_engine) -> None:
    response = shared_engine.complete(["a"] * 100, n=11)
    assert response.json()["error"]["param"] == "n"
    assert "1024 requests" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "robot", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages.0.content"),
        ([{"role": "user", "content": "\ud800"}], "messages.0.content"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages.0.tool_calls"),
    ],
)
def test_bad_messages_are_refused_by_place(shared_engine, messages, param) -> None:
    body = {"model": "echo", "messages": messages}
    response = shared_engine.client.post("/v1/chat/completions", content=json.dumps(body))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b"3", "must be a JSON object"),
        (b"{", "not JSON"),
        (b'{"model": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_bad_body_is_refused_with_a_sentence(shared_engine, raw, sentence) -> None:
    response = shared_engine.client.post("/v1/completions", content=raw)
    assert response.status_code == 400
    assert sentence in response.json()["error"]["message"]


def test_a_body_over_ten_mebibytes_is_refused_and_the_engine_serves_on(shared_engine) -> None:
    response = shared_engine.complete("x" * (10 * 2**20))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert shared_engine.complete("x").status_code == 200


def test_an_unknown_model_is_not_served_by_the_one_that_is_there(shared_engine) -> None:
    response = shared_engine.complete("x", model="lora")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("capacity", "longest", "limit_says"),
    [
        ({"model_length_tokens": 32}, 31, "context length is 32 tokens"),
        ({"num_blocks": 3, "block_tokens": 8}, 23, "KV cache holds 24 tokens"),
    ],
)
def test_an_over_long_prompt_is_refused_with_both_numbers(
    start_engine, capacity, longest, limit_says
) -> None:
    engine = start_engine(**capacity)
    for num_tokens in (longest - 1, longest):
        answer = engine.complete([97] * num_tokens)
        assert answer.json()["usage"]["prompt_tokens"] == num_tokens
    for response in (
        engine.complete([97] * (longest + 1)),
        engine.complete(["ok", "x" * (longest + 1)], stream=True),
    ):
        error = response.json()["error"]
        assert response.status_code == 400
        assert (error["type"], error["code"]) == (
            "invalid_request_error",
            "context_length_exceeded",
        )
        assert limit_says in error["message"]
        assert f"{longest + 1} tokens" in error["message"] and f"{longest} fit" in error["message"]


def test_millions_of_ids_are_refused_before_they_are_parsed(shared_engine) -> None:
    endless = b'{"tokens": [' + b"97," * 10_000
    refused = shared_engine.client.post("/detokenize", content=endless)
    assert refused.status_code == 400
    assert "tokens: has more than 9000 ids" in refused.json()["error"]["message"]
    commas_elsewhere = {"tokens": [97] * 512, "user": "," * 900}
    assert shared_engine.client.post("/detokenize", json=commas_elsewhere).status_code == 200


def said(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def test_twice_the_context_is_counted_and_what_is_longer_refused_with_both_numbers(
    shared_engine,
) -> None:
    context_tokens = shared_engine.capacity.model_length_tokens
    most = 2 * context_tokens
    turn = len(ByteTokenizer().apply_chat_template([{"role": "user", "content": ""}]))
    for path, param, fits, too_long, has in (
        ("/tokenize", "prompt", "x" * (most - 1), "x" * most, f"{most + 1} tokens"),
        ("/tokenize", "prompt", "", "x" * 2000, "2000 characters"),
        ("/tokenize", "messages", [said("x" * (most - turn))], [said("x" * most)], "tokens"),
        ("/tokenize", "messages", [said("x")], [said("")] * 600, "at least 600 tokens"),
        ("/detokenize", "tokens", [97] * most, [97] * (most + 1), f"{most + 1} ids"),
    ):
        assert shared_engine.client.post(path, json={param: fits}).status_code == 200
        refused = shared_engine.client.post(path, json={param: too_long})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param)
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith(f"{param}: has ") and has in error["message"]
        assert f"at most {most} are read" in error["message"]
        assert f"maximum context length of {context_tokens}" in error["message"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": ["ok", "x" * 2**20]}),
        ("/v1/chat/completions", {"messages": [said("x" * 2**20)]}),
        ("/v1/chat/completions", {"messages": [{**said("x"), "name": "x" * 2**20}]}),
        ("/tokenize", {"prompt": "x" * 2**20}),
        ("/tokenize", {"messages": [said("")] * 1000}),
        ("/detokenize", {"tokens": [97] * 1000}),
    ],
)
def test_what_cannot_fit_is_refused_before_it_takes_the_tokenizers_time(
    start_engine, path, asked
) -> None:
    class Busy(ByteTokenizer):
        longest = 0

        def encode(self, text):
            self.longest = max(self.longest, len(text))
            return super().encode(text)

        def decode(self, token_ids, *, specials=False):
            self.longest = max(self.longest, len(token_ids))
            return super().decode(token_ids, specials=specials)

        def apply_chat_template(self, messages):
            self.longest = max(self.longest, *(len(m["content"]) for m in messages), len(messages))
            return super().apply_chat_template(messages)

    tokenizer = Busy()
    engine = start_engine(lambda loaded: dataclasses.replace(loaded, tokenizer=tokenizer))
    refused = engine.client.post(path, json={"model": "echo", **asked})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert tokenizer.longest <= len("ok")


def test_a_thousand_refused_requests_hold_no_blocks(shared_engine) -> None:
    everything = shared_engine.free_list()
    too_long = json.dumps({"model": "echo", "prompt": [97] * 300})
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    request = f"{head}content-length: {len(too_long)}\r\n\r\n{too_long}"
    with shared_engine.connect() as connection, connection.makefile("rb") as answers:
        for _ in range(50):
            connection.sendall(request.encode() * 20)
            statuses = 0
            while statuses < 20:
                statuses += answers.readline().endswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert shared_engine.free_list() == everything


def test_gateway_headers_are_believed_only_beside_the_internal_token(shared_engine) -> None:
    name = (
        'chairlift_slo_events_total{class="batch",objective="ttft",'
        'result="good",threshold_ms="1000"}'
    )
    before = shared_engine.metric(name)
    says_batch = {"x-chairlift-class": "batch", "x-chairlift-waited-ms": "-1"}
    for token in ({}, {"x-chairlift-internal-token": "guess"}):
        headers = {**says_batch, **token}
        assert shared_engine.complete("x", headers=headers).status_code == 200
    assert shared_engine.metric(name) == before
    right = {"x-chairlift-internal-token": "internal secret"}
    refused = shared_engine.complete("x", headers={**says_batch, **right})
    assert refused.status_code == 400
    assert "x-chairlift-waited-ms" in refused.json()["error"]["message"]
    assert (
        shared_engine.complete("x", headers={**right, "x-chairlift-class": "batch"}).status_code
        == 200
    )
    assert shared_engine.metric(name) == before + 1


def test_time_waited_at_the_gateway_counts_into_ttft(shared_engine) -> None:
    late = 'chairlift_slo_events_total{class="interactive",objective="ttft",result="bad"'
    before = shared_engine.metric(late)
    headers = {
        "x-chairlift-internal-token": "internal secret",
        "x-chairlift-waited-ms": "5000",
    }
    assert shared_engine.complete("x", headers=headers).status_code == 200
    assert shared_engine.metric(late) == before + 1
