"""The request bodies of the public API, field by field. Knows no tokenizer and no engine.

A documented field that would change the output and is not built is refused by name, unless it holds
the value that changes nothing. A name nobody knows is accepted and reported back (`Body.ignored`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from chairlift_engine.server.errors import ApiError, unsupported

MAX_PROMPTS: Final = 1024
MAX_STOPS: Final = 4

Prompt: TypeAlias = str | list[int]

# Accepted, and without effect on the output.
HARMLESS: Final = frozenset(
    {
        "metadata",
        "parallel_tool_calls",  # without tools
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Not built: name and the values that ask for nothing.
NOT_BUILT: Final[Mapping[str, tuple[object, ...]]] = {
    "allowed_token_ids": (None,),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "modalities": (None, ["text"]),
    "presence_penalty": (None, 0),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "use_beam_search": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
NOT_BUILT_OF_MESSAGES: Final[Mapping[str, tuple[object, ...]]] = {
    "audio": (None,),
    "function_call": (None,),
    "refusal": (None,),
    "tool_call_id": (None,),
    "tool_calls": (None, []),
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
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"must hold at most {MAX_PROMPTS} prompts, not {len(value)}")
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


Text: TypeAlias = Annotated[str, AfterValidator(clean_text)]
Positive: TypeAlias = Annotated[int, Field(ge=1)]


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    not_built: ClassVar[Mapping[str, tuple[object, ...]]] = NOT_BUILT

    def ignored(self, prefix: str = "") -> list[str]:
        """Names that nobody knows; raises ApiError for one that is known and not built."""
        names: list[str] = []
        for name, value in (self.model_extra or {}).items():
            if name in self.not_built:
                if value not in self.not_built[name]:
                    raise unsupported(prefix + name)
            elif name not in HARMLESS:
                names.append(prefix + name)
        return names


class StreamOptions(Body):
    not_built = {}
    include_usage: bool | None = None


class GenerationBody(Body):
    """What completions and chat have in common. null means the default everywhere."""

    model: Text
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    n: Positive | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] | None = None
    stop_token_ids: list[int] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None

    def ignored(self, prefix: str = "") -> list[str]:
        names = super().ignored(prefix)
        if self.n is not None and self.n > 1:
            raise ApiError(
                400,
                f"n: {self.n} choices are not supported by this engine; send {self.n} requests",
                param="n",
                code="unsupported_parameter",
            )
        if self.stream_options is not None:
            if not self.stream:
                raise ApiError(
                    400, "stream_options: only goes with stream: true", param="stream_options"
                )
            names += self.stream_options.ignored("stream_options.")
        return names


class CompletionBody(GenerationBody):
    prompt: Annotated[list[Prompt], BeforeValidator(_prompts)]


class Message(Body):
    not_built = NOT_BUILT_OF_MESSAGES
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]
    name: Text | None = None


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1)]

    def ignored(self, prefix: str = "") -> list[str]:
        names = super().ignored(prefix)
        for index, message in enumerate(self.messages):
            names += message.ignored(f"messages.{index}.")
        return names


class TokenizeBody(Body):
    """One of prompt and messages."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
