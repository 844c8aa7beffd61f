"""The server against its own description: what it allows never breaks it, what it forbids fails."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from chairlift_engine.server.bodies import HARMLESS, ChatBody, CompletionBody

OPERATIONS = {
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/v1/models": "GET",
    "/health/live": "GET",
    "/health/ready": "GET",
    "/load": "GET",
    "/metrics": "GET",
}
# A schema cannot say that a prompt fits the model or that a token is in its vocabulary, so what it
# allows may be refused all the same.
NOT_PROMISED = [positive_data_acceptance]


@pytest.fixture(scope="module")
def description(shared_engine) -> Any:
    return schemathesis.openapi.from_url(f"{shared_engine.url}/openapi.json")


def test_every_path_is_described(description) -> None:
    described = {o.ok().path: o.ok().method.upper() for o in description.get_all_operations()}
    assert described == OPERATIONS


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", [path for path, method in OPERATIONS.items() if method == "POST"])
def test_whatever_body_comes_is_answered_as_described(description, path, mode) -> None:
    statuses: set[int] = set()

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(description[path]["POST"].as_strategy(generation_mode=mode))
    def holds(case) -> None:
        response = case.call_and_validate(excluded_checks=NOT_PROMISED)
        statuses.add(response.status_code)

    holds()
    assert 200 in statuses if mode is GenerationMode.POSITIVE else 400 in statuses


@pytest.mark.parametrize("path", [path for path, method in OPERATIONS.items() if method == "GET"])
def test_what_is_read_is_answered_as_described(description, path) -> None:
    description[path]["GET"].Case().call_and_validate()


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "abc", "echo": True, "logprobs": 2}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "abc"}],
                "logprobs": True,
                "top_logprobs": 2,
                "n": 2,
                "stream_options": {"include_usage": True},
            },
        ),
    ],
)
def test_each_event_of_a_stream_is_as_described(description, path, asked) -> None:
    body = {"model": "echo", "stream": True, **asked}
    case = description[path]["POST"].Case(body=body, media_type="application/json")
    assert case.call_and_validate().text.endswith("data: [DONE]\n\n")


def test_every_field_is_described(shared_engine) -> None:
    described = shared_engine.client.get("/openapi.json").json()
    for body in (CompletionBody, ChatBody):
        schema = described["components"]["schemas"][body.__name__]
        names = {*body.model_fields, *body.not_built, *HARMLESS}
        assert names == schema["properties"].keys()
        assert schema["properties"]["model"]["enum"] == ["echo"]


def test_the_description_can_be_read_as_a_page(shared_engine) -> None:
    page = shared_engine.client.get("/docs")
    assert page.status_code == 200 and "/openapi.json" in page.text
