"""The JSON of the two answers, whole and in chunks: completions and chat. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from chairlift_engine.server.logprob_shapes import chat_logprobs, completion_logprobs
from chairlift_engine.server.text_stream import Scored
from chairlift_engine.tokenizer import Tokenizer
from chairlift_protocol.wire import USAGE_COMMENT

Json = dict[str, Any]

DONE_FRAME = b"data: [DONE]\n\n"


class Choice(NamedTuple):
    """logprobs: in the shape's own JSON, or None."""

    text: str
    finish_reason: str | None
    logprobs: Json | None


class Shape(Protocol):
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> Json | None:
        """A choice's first delta, before its first text."""
        ...

    def delta(self, index: int, choice: Choice) -> Json: ...

    def whole(self, index: int, choice: Choice) -> Json: ...

    def logprobs(self, scored: Sequence[Scored], tokenizer: Tokenizer) -> Json: ...


class CompletionShape:
    whole_object = chunk_object = "text_completion"

    def opening(self, index: int) -> Json | None:
        return None

    def delta(self, index: int, choice: Choice) -> Json:
        return {
            "index": index,
            "text": choice.text,
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
        }

    def whole(self, index: int, choice: Choice) -> Json:
        return self.delta(index, choice)

    def logprobs(self, scored: Sequence[Scored], tokenizer: Tokenizer) -> Json:
        return completion_logprobs(scored, tokenizer)


class ChatShape:
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> Json | None:
        return self._choice(index, {"role": "assistant", "content": ""}, Choice("", None, None))

    def delta(self, index: int, choice: Choice) -> Json:
        return self._choice(index, {"content": choice.text}, choice)

    def whole(self, index: int, choice: Choice) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
        }

    def logprobs(self, scored: Sequence[Scored], tokenizer: Tokenizer) -> Json:
        return chat_logprobs(scored, tokenizer)

    def _choice(self, index: int, delta: Json, choice: Choice) -> Json:
        return {
            "index": index,
            "delta": delta,
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
        }


class Document:
    """The members that a whole answer and each of its chunks share."""

    def __init__(self, order_id: str, model_name: str, shape: Shape) -> None:
        self.shape = shape
        self._id = order_id
        self._model_name = model_name
        self._created = int(time.time())

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        listed = [self.shape.whole(index, choice) for index, choice in enumerate(choices)]
        return {**self._head(self.shape.whole_object, listed), "usage": usage}

    def chunk(self, choices: list[Json], **usage: Json | None) -> bytes:
        """One server-sent event; `usage` only where the client asked for it."""
        return frame({**self._head(self.shape.chunk_object, choices), **usage})

    def _head(self, object_name: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": object_name,
            "created": self._created,
            "model": self._model_name,
            "choices": choices,
        }


def usage_of(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> Json:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def tokens_used(num_prompt_tokens: int, num_output_tokens: int) -> Json:
    """As gateways are told."""
    return {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_output_tokens}


def usage_comment(num_prompt_tokens: int, num_output_tokens: int) -> bytes:
    """In a stream; clients skip comments."""
    told = tokens_used(num_prompt_tokens, num_output_tokens)
    return USAGE_COMMENT + json.dumps(told, separators=(",", ":")).encode() + b"\n\n"


def frame(body: Json) -> bytes:
    # ASCII only: some clients take U+2028 for the end of a line.
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
