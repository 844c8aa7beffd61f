"""The public API's description of itself, at /openapi.json and, to read, at /docs.

The handlers take raw bytes, so the schemas of bodies and answers are added here from the models
that `body_reader` and the tests use. Fields that are not built are described by the values that
they may have: those that ask for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from chairlift_engine.server.answers import Answer, ChatChunk, CompletionChunk, ErrorAnswer
from chairlift_engine.server.bodies import (
    HARMLESS,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)

Json = dict[str, Any]

BODIES: Final = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
_REF: Final = "#/components/schemas/{model}"
_RETRY_AFTER: Final[Json] = {
    "retry-after": {"description": "seconds", "schema": {"type": "integer", "minimum": 1}}
}
_REFUSALS: Final[dict[int | str, Json]] = {
    400: {"model": ErrorAnswer, "description": "A field, named in the message, must change"},
    404: {"model": ErrorAnswer, "description": "Another model is served here"},
    413: {"model": ErrorAnswer, "description": "The body is too large"},
    429: {
        "model": ErrorAnswer,
        "description": "The tenant has too many requests waiting",
        "headers": _RETRY_AFTER,
    },
    500: {"model": ErrorAnswer, "description": "The engine failed"},
    503: {
        "model": ErrorAnswer,
        "description": "Loading, draining, failed, or too much waits",
        "headers": _RETRY_AFTER,
    },
    504: {"model": ErrorAnswer, "description": "Not finished by the request's deadline"},
}


class DescribedApp(FastAPI):
    """`model_name`: what is served, once that is known."""

    def __init__(self, model_name: Callable[[], str | None]) -> None:
        super().__init__(
            title="Chairlift engine",
            version="1",
            description="OpenAI-compatible completions and chat of one model.",
            redoc_url=None,
        )
        self._model_name = model_name

    def openapi(self) -> Json:
        described = super().openapi()
        schemas = described.setdefault("components", {}).setdefault("schemas", {})
        _, defined = models_json_schema(
            [(model, "validation") for model in (*BODIES, CompletionChunk, ChatChunk)],
            ref_template=_REF,
        )
        schemas.update(defined["$defs"])
        for body in BODIES:
            _describe_others(schemas[body.__name__], body)
            if (name := self._model_name()) is not None:
                _name_model(schemas[body.__name__], name)
        return described


def generates(
    body: type[GenerationBody], answer: type[Answer], chunk: type[CompletionChunk | ChatChunk]
) -> Json:
    """A route's keywords: what it takes and gives."""
    whole_or_stream = {
        "model": answer,
        "description": "The whole answer; with stream: true, its chunks",
        "content": {"text/event-stream": {"schema": _event(chunk)}},
    }
    return {"openapi_extra": _takes(body), "responses": {200: whole_or_stream, **_REFUSALS}}


def tells_of(body: type[Body], answer: type[Answer]) -> Json:
    return {
        "openapi_extra": _takes(body),
        "responses": {200: {"model": answer, "description": "The answer"}, **_REFUSALS},
    }


def tells(answer: type[Answer], *, also_503: bool = False) -> Json:
    """A GET route's keywords. also_503: the same answer with that status says no."""
    refusal = {"model": answer, "description": "Not now"} if also_503 else _REFUSALS[503]
    return {"responses": {200: {"model": answer, "description": "The answer"}, 503: refusal}}


def exposes() -> Json:
    """The keywords of the Prometheus route."""
    text = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "response_class": PlainTextResponse,
        "responses": {200: {"description": "Metrics", "content": text}, 503: _REFUSALS[503]},
    }


def _takes(body: type[Body]) -> Json:
    content = {"application/json": {"schema": _ref(body)}}
    return {"requestBody": {"required": True, "content": content}}


def _event(chunk: type[Answer]) -> Json:
    """One server-sent event of a stream; a failure in the middle is an error, and the end."""
    parsed = {"anyOf": [_ref(chunk), _ref(ErrorAnswer)]}
    data = {
        "anyOf": [
            {"const": "[DONE]"},
            {"type": "string", "contentMediaType": "application/json", "contentSchema": parsed},
        ]
    }
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def _ref(model: type[BaseModel]) -> Json:
    return {"$ref": _REF.format(model=model.__name__)}


def _describe_others(schema: Json, body: type[Body]) -> None:
    properties = schema["properties"]
    for name, values in body.not_built.items():
        properties[name] = {"enum": list(values), "description": "Not supported by this engine."}
    for name in sorted(HARMLESS - properties.keys()):
        properties[name] = {"description": "Accepted, without effect on the answer."}


def _name_model(schema: Json, name: str) -> None:
    """Required or optional, it can only be this."""
    model = schema["properties"]["model"]
    for one in model.get("anyOf", [model]):
        if one.get("type") == "string":
            one["enum"] = [name]
