"""The values that request bodies are made of: what each may be, in words and for the API's schema.

Knows no tokenizer; what is wrong is said in a sentence, which `body_reader` prefixes with the
field's name.
"""

from __future__ import annotations

import re
import reprlib
from typing import Annotated, Any, Final, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

MAX_REQUESTS: Final = 1024  # prompts times choices
MAX_STOPS: Final = 4
MAX_CHOICES: Final = 128  # of one prompt
MAX_LOGPROBS: Final = 20
MAX_BIASES: Final = 1024

Prompt: TypeAlias = str | list[int]

TOKEN_ID: Final = re.compile(r"[0-9]{1,10}")

# What the validators below take, for the server's own description of itself.
_TOKENS: Final = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_LINE: Final = {"type": "string", "minLength": 1}
PROMPT_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [
        _LINE,
        {"type": "array", "minItems": 1, "maxItems": MAX_REQUESTS, "items": _LINE},
        _TOKENS,
        {"type": "array", "minItems": 1, "maxItems": MAX_REQUESTS, "items": _TOKENS},
    ]
}
STOP_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [_LINE, {"type": "array", "maxItems": MAX_STOPS, "items": _LINE}]
}
CONTENT_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
        },
    ]
}


def clean_text(text: str) -> str:
    """Text that a tokenizer and a template can take."""
    if "\0" in text:
        raise ValueError("must not hold NUL characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must not hold unpaired surrogates") from None
    return text


def _prompts(value: object) -> list[Prompt]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, or token ids (a list, or lists)")
    if not value:
        raise ValueError("must not be empty")
    if all(type(item) is int for item in value):
        value = [value]
    if len(value) > MAX_REQUESTS:
        raise ValueError(f"must hold at most {MAX_REQUESTS} prompts, not {len(value)}")
    return [_prompt(item) for item in value]


def _prompt(item: object) -> Prompt:
    if isinstance(item, str):
        clean_text(item)
    elif not isinstance(item, list) or not all(type(token) is int for token in item):
        raise ValueError("must be a string, a list of strings, or token ids (a list, or lists)")
    if not item:
        raise ValueError("must not be empty")
    return item


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"must hold at most {MAX_STOPS} strings, not {len(stops)}")
    if "" in stops:
        raise ValueError("must not hold an empty string")
    return [clean_text(stop) for stop in stops]


def _content(value: object) -> str:
    """A message's text; several text parts are lines of it."""
    if isinstance(value, str):
        return clean_text(value)
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of text parts")
    texts: list[str] = []
    for part in value:
        if not isinstance(part, dict):
            raise ValueError("must be a string or a list of text parts")
        if part.get("type") != "text":
            raise ValueError(
                f"parts of type {part.get('type')!r} are not supported by this engine; send text"
            )
        if not isinstance(part.get("text"), str):
            raise ValueError("each text part must hold its string as 'text'")
        texts.append(clean_text(part["text"]))
    return "\n".join(texts)


def _biases(value: object) -> object:
    """What is no object of numbers is refused by the field's own type."""
    if isinstance(value, dict):
        if len(value) > MAX_BIASES:
            raise ValueError(f"must hold at most {MAX_BIASES} tokens, not {len(value)}")
        for key in value:
            if not TOKEN_ID.fullmatch(key):
                raise ValueError(f"must have token ids as keys, not {reprlib.repr(key)}")
    return value


Text: TypeAlias = Annotated[str, AfterValidator(clean_text)]
Positive: TypeAlias = Annotated[int, Field(ge=1)]
Likeliest: TypeAlias = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias: TypeAlias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Temperature: TypeAlias = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Mass: TypeAlias = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Repetition: TypeAlias = Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)]
Seed: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Prompts: TypeAlias = Annotated[
    list[Prompt], BeforeValidator(_prompts), WithJsonSchema(PROMPT_SCHEMA)
]
Stops: TypeAlias = Annotated[list[str], BeforeValidator(_stops), WithJsonSchema(STOP_SCHEMA)]
Content: TypeAlias = Annotated[str, BeforeValidator(_content), WithJsonSchema(CONTENT_SCHEMA)]
Biases: TypeAlias = Annotated[dict[str, Bias], BeforeValidator(_biases)]
