"""From a request's bytes to requests that the scheduler can take: checks, template, tokens, limits.

Everything here may take long for a long prompt, so it runs in a small thread pool beside the event
loop. Reads no headers and starts nothing.
"""

from __future__ import annotations

import reprlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from chairlift_engine.config import Capacity
from chairlift_engine.request import Request, SamplingParams
from chairlift_engine.server.bodies import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    TokenizeBody,
)
from chairlift_engine.server.body_reader import parse
from chairlift_engine.server.errors import ApiError, invalid
from chairlift_engine.server.origin import Origin
from chairlift_engine.tokenizer import ChatTemplateError, Tokenizer

COMPLETION_TOKENS = 16  # OpenAI's default; a chat's is all the room there is
# Below this, logits divided by the temperature overflow, and the draw is the argmax anyway.
MIN_TEMPERATURE = 1e-4


@dataclass(frozen=True, slots=True)
class Order:
    """What one HTTP request asks for; one choice per request in `requests`."""

    id: str
    requests: tuple[Request, ...]
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    ignored: list[str]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(r.num_prompt_tokens for r in self.requests)


class OrderTaker:
    """Knows the one model that this engine serves."""

    def __init__(
        self,
        model_name: str,
        tokenizer: Tokenizer,
        capacity: Capacity,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.model_name = model_name
        self.capacity = capacity
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids

    def completion(self, raw: bytes, origin: Origin) -> Order:
        body = parse(raw, CompletionBody)
        ignored = self._known(body)
        prompts = [
            self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompt
        ]
        return self._order("cmpl", body, prompts, origin, ignored)

    def chat(self, raw: bytes, origin: Origin) -> Order:
        body = parse(raw, ChatBody)
        ignored = self._known(body)
        return self._order("chatcmpl", body, [self._render(body.messages)], origin, ignored)

    def tokens(self, raw: bytes) -> tuple[list[int], list[str]]:
        """The token ids of a text or of a rendered chat, and the ignored names."""
        body = parse(raw, TokenizeBody)
        ignored = body.ignored()
        if body.model is not None:
            self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if body.messages is not None:
            return self._render(body.messages), ignored
        return self._tokenizer.encode(body.prompt or ""), ignored

    def _known(self, body: GenerationBody) -> list[str]:
        self._check_model(body.model)
        self._check_ids("stop_token_ids", body.stop_token_ids or ())
        return body.ignored()

    def _check_model(self, name: str) -> None:
        if name != self.model_name:
            raise ApiError(
                404,
                f"model: {name!r} is not served here; this engine serves {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def _check_ids(self, param: str, token_ids: Sequence[int]) -> None:
        vocab_size = self._tokenizer.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise invalid(
                    param,
                    f"token ids must lie in 0..{vocab_size - 1}, not {reprlib.repr(token_id)}",
                )

    def _render(self, messages: Sequence[Message]) -> list[int]:
        known = {"role", "content", "name"}
        dumped = [m.model_dump(include=known, exclude_none=True) for m in messages]
        try:
            return self._tokenizer.apply_chat_template(dumped)
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages") from None

    def _order(
        self,
        kind: str,
        body: GenerationBody,
        prompts: Sequence[list[int]],
        origin: Origin,
        ignored: list[str],
    ) -> Order:
        order_id = f"{kind}-{secrets.token_hex(16)}"
        param = "prompt" if kind == "cmpl" else "messages"
        for prompt in prompts:
            self._check_ids(param, prompt)
            self._check_length(param, len(prompt))
        options = body.stream_options
        return Order(
            id=order_id,
            requests=tuple(
                Request(
                    f"{order_id}-{index}",
                    prompt,
                    self._sampling(kind, body, len(prompt)),
                    origin.arrival_s,
                    origin.request_class,
                    origin.tenant,
                )
                for index, prompt in enumerate(prompts)
            ),
            stops=tuple(body.stop or ()),
            stream=bool(body.stream),
            include_usage=options is not None and bool(options.include_usage),
            ignored=ignored,
        )

    def _check_length(self, param: str, num_tokens: int) -> None:
        if num_tokens == 0:
            raise invalid(param, "must not be empty")
        longest_tokens = self.capacity.longest_prompt_tokens
        if num_tokens <= longest_tokens:
            return
        what = "This model's maximum context length is"
        if self.capacity.kv_tokens < self.capacity.model_length_tokens:
            what = "This engine's KV cache holds"
        raise ApiError(
            400,
            f"{what} {longest_tokens + 1} tokens, one of which is for the answer; the prompt has "
            f"{num_tokens} tokens, and at most {longest_tokens} fit",
            param=param,
            code="context_length_exceeded",
        )

    def _sampling(self, kind: str, body: GenerationBody, num_prompt_tokens: int) -> SamplingParams:
        """max_tokens is clamped to the room that the prompt leaves, in chat as in completions."""
        room_tokens = self.capacity.longest_prompt_tokens + 1 - num_prompt_tokens
        asked = body.max_completion_tokens or body.max_tokens
        if asked is None:
            asked = COMPLETION_TOKENS if kind == "cmpl" else room_tokens
        temperature = 1.0 if body.temperature is None else body.temperature
        stop_ids = frozenset(body.stop_token_ids or ())
        return SamplingParams(
            max_tokens=min(asked, room_tokens),
            temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(body.top_k or 0, 0),
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            stop_token_ids=stop_ids if body.ignore_eos else stop_ids | self._eos_token_ids,
        )
