"""What the public API answers, as schemas: for its description, and for tests to hold it to.

The answers themselves are written by `shapes` and `public`; nothing is validated while serving.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

FinishReason: TypeAlias = Literal["stop", "length"]


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PromptTokensDetails(Answer):
    cached_tokens: int = Field(ge=0)


class Usage(Answer):
    prompt_tokens: int = Field(ge=1)
    completion_tokens: int = Field(ge=1)
    total_tokens: int = Field(ge=2)
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Answer):
    """The first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    index: int = Field(ge=0)
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice] = Field(min_length=1)
    usage: Usage


class CompletionChunkChoice(Answer):
    index: int = Field(ge=0)
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionChunk(Answer):
    """usage: absent unless asked for, null until the last chunk, which has no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


class TopLogprob(Answer):
    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]
    refusal: None


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    index: int = Field(ge=0)
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice] = Field(min_length=1)
    usage: Usage


class ChatDelta(Answer):
    """role: in a choice's first chunk."""

    role: Literal["assistant"] | None = None
    content: str


class ChatChunkChoice(Answer):
    index: int = Field(ge=0)
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Error(Answer):
    message: str
    type: Literal["invalid_request_error", "server_error", "authentication_error"]
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    error: Error


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class Tokens(Answer):
    count: int = Field(ge=0)
    max_model_len: int
    tokens: list[int]


class Detokenized(Answer):
    prompt: str


class Alive(Answer):
    alive: bool


class Ready(Answer):
    """reason: why not."""

    ready: bool
    reason: str | None


class Load(Answer):
    num_running: int
    num_waiting: int
    waiting_prefill_tokens: int
    free_kv_tokens: int
    lend_share: float
    policy_generation: list[int] = Field(min_length=2, max_length=2)
    draining: bool
