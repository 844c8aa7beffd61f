"""The request bodies of the public API, field by field. Knows no tokenizer and no engine.

A documented field that would change the output and is not built is refused by name, unless it holds
the value that changes nothing. A name nobody knows is accepted and reported back (`Body.ignored`),
unless it is one of ours with a slip in it, which would change the answer in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os.path import commonprefix
from typing import Annotated, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from chairlift_engine.server.errors import invalid, unsupported
from chairlift_engine.server.field_values import (
    MAX_CHOICES,
    MAX_REQUESTS,
    Biases,
    Content,
    Likeliest,
    Mass,
    Penalty,
    Positive,
    Prompts,
    Repetition,
    Seed,
    Share,
    Stops,
    Temperature,
    Text,
)

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
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "modalities": (None, ["text"]),
    "priority": (None, 0),  # classes order requests, and inside a class arrival does
    "prompt_logprobs": (None,),  # echo with logprobs has them
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "use_beam_search": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
NOT_BUILT_OF_COMPLETIONS: Final = {**NOT_BUILT, "top_logprobs": (None, 0)}
NOT_BUILT_OF_CHAT: Final = {**NOT_BUILT, "echo": (None, False)}
NOT_BUILT_OF_MESSAGES: Final[Mapping[str, tuple[object, ...]]] = {
    "audio": (None,),
    "function_call": (None,),
    "refusal": (None,),
    "tool_call_id": (None,),
    "tool_calls": (None, []),
}

# A body may hold any number of names, and a look at each costs some 0.1 ms.
MAX_LOOKED_AT: Final = 16

# Shorter names that differ by a letter are other names: top_p, top_k, top_a.
SHORTEST_SLIP: Final = 6


def _same(value: object, other: object) -> bool:
    """Equal in JSON, where false is not 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _meant(name: str, known: Iterable[str]) -> str | None:
    """The known name that this one would be but for its case, its dashes or one slip."""
    return next((each for each in known if _is_slip(name, each)), None)


def _is_slip(name: str, known: str) -> bool:
    if name.replace("-", "").replace("_", "").lower() == known.replace("_", ""):
        return True
    if min(len(name), len(known)) < SHORTEST_SLIP:
        return False
    num_equal = len(commonprefix((name, known)))
    left, meant = name[num_equal:], known[num_equal:]
    num_equal = len(commonprefix((left[::-1], meant[::-1])))
    left, meant = left[: len(left) - num_equal], meant[: len(meant) - num_equal]
    is_swapped = len(left) == 2 and left == meant[::-1]
    return is_swapped or max(len(left), len(meant)) <= 1


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    not_built: ClassVar[Mapping[str, tuple[object, ...]]] = NOT_BUILT

    def ignored(self, prefix: str = "", num_before: int = 0) -> list[str]:
        """Names that nobody knows; raises ApiError for one that is known and not built, and for a
        slip among the first. num_before: of the same body's unknown names, how many came before."""
        names: list[str] = []
        for name, value in (self.model_extra or {}).items():
            if name in self.not_built:
                if not any(_same(value, nothing) for nothing in self.not_built[name]):
                    raise unsupported(prefix + name)
            elif name not in HARMLESS:
                if num_before + len(names) < MAX_LOOKED_AT:
                    self._refuse_slip(name, prefix)
                names.append(prefix + name)
        return names

    def _refuse_slip(self, name: str, prefix: str) -> None:
        if (meant := _meant(name, (*type(self).model_fields, *self.not_built))) is not None:
            raise invalid(prefix + name, f"is not a field here; did you mean {meant}?")


class StreamOptions(Body):
    not_built = {}
    include_usage: bool | None = None


class GenerationBody(Body):
    """What completions and chat have in common. null means the default everywhere."""

    model: Text
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: Mass | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: Biases | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stops | None = None
    stop_token_ids: list[int] | None = None
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens to report beside each; None: no logprobs."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ApiError for fields that do not go together."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "only goes with stream: true")

    def ignored(self, prefix: str = "", num_before: int = 0) -> list[str]:
        names = super().ignored(prefix, num_before)
        if self.stream_options is not None:
            names += self.stream_options.ignored("stream_options.", num_before + len(names))
        return names


class CompletionBody(GenerationBody):
    not_built = NOT_BUILT_OF_COMPLETIONS
    prompt: Prompts
    echo: bool | None = None
    logprobs: Likeliest | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        if len(self.prompt) * self.num_choices > MAX_REQUESTS:
            raise invalid(
                "n",
                f"{len(self.prompt)} prompts with {self.num_choices} choices each are more than "
                f"{MAX_REQUESTS} requests; send fewer at once",
            )


class Message(Body):
    not_built = NOT_BUILT_OF_MESSAGES
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Text | None = None


class ChatBody(GenerationBody):
    not_built = NOT_BUILT_OF_CHAT
    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None

    def ignored(self, prefix: str = "", num_before: int = 0) -> list[str]:
        names = super().ignored(prefix, num_before)
        for index, message in enumerate(self.messages):
            names += message.ignored(f"messages.{index}.", num_before + len(names))
        return names

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "only goes with logprobs: true")


class TokenizeBody(Body):
    """One of prompt and messages."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None


class DetokenizeBody(Body):
    model: Text | None = None
    tokens: list[int]


class UsageBody(Body):
    """Of a gateway. requests: by the ids that it gave them. end: they are to end now."""

    requests: list[Text]
    end: bool = False
