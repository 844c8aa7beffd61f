"""From a request's bytes to requests that the scheduler can take: checks, template, tokens, limits.

Everything here may take long for a long prompt, so it runs in a small thread pool beside the event
loop. Reads no headers and starts nothing.
"""

from __future__ import annotations

import codecs
import math
import reprlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from chairlift_engine.config import Capacity
from chairlift_engine.request import Request
from chairlift_engine.server.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    Message,
    TokenizeBody,
)
from chairlift_engine.server.body_reader import parse
from chairlift_engine.server.errors import ApiError, invalid
from chairlift_engine.server.origin import Origin
from chairlift_engine.server.sampling import of_choice, sampling_of
from chairlift_engine.server.text_stream import Echo
from chairlift_engine.tokenizer import ChatTemplateError, Tokenizer

# Read in any case, in context lengths: to see by how much a prompt is too long, it must be counted.
CONTEXTS_READ: Final = 2
# Of a body with ids, in other fields than those: more than anybody sends.
COMMAS_ELSEWHERE: Final = 1000


@dataclass(frozen=True, slots=True)
class Order:
    """What one HTTP request asks for; one choice per request in `requests`.

    num_choices: of each prompt; those of one prompt stand together.
    echoes: by prompt; empty when none is to be repeated.
    """

    id: str
    requests: tuple[Request, ...]
    num_choices: int
    echoes: tuple[Echo, ...]
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    ignored: list[str]

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices share it."""
        return sum(r.num_prompt_tokens for r in self.requests[:: self.num_choices])

    @property
    def num_cached_tokens(self) -> int:
        return sum(r.num_cached_tokens for r in self.requests[:: self.num_choices])

    @property
    def wants_logprobs(self) -> bool:
        return self.requests[0].sampling.num_logprobs is not None

    def echo_of(self, index: int) -> Echo | None:
        return self.echoes[index // self.num_choices] if self.echoes else None


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
            self._encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompt
        ]
        order = self._order(body, prompts, origin, ignored)
        return replace(order, echoes=self._echoes(body, prompts)) if body.echo else order

    def chat(self, raw: bytes, origin: Origin) -> Order:
        body = parse(raw, ChatBody)
        ignored = self._known(body)
        return self._order(body, [self._render(body.messages)], origin, ignored)

    def tokens(self, raw: bytes) -> tuple[list[int], list[str]]:
        """The token ids of a text or of a rendered chat, and the ignored names."""
        body = parse(raw, TokenizeBody)
        ignored = body.ignored()
        if body.model is not None:
            self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if body.messages is not None:
            param, tokens = "messages", self._render(body.messages)
        else:
            param, tokens = "prompt", self._encode(body.prompt or "")
        self._check_read(param, f"{len(tokens)} tokens", len(tokens))
        return tokens, ignored

    def text(self, raw: bytes) -> tuple[str, list[str]]:
        """The text of token ids, special ones by name, and the ignored names."""
        # By their commas, since parsing millions of ids holds up the steps.
        num_ids = raw.count(b",") - COMMAS_ELSEWHERE
        self._check_read("tokens", f"more than {num_ids} ids", num_ids)
        body = parse(raw, DetokenizeBody)
        ignored = body.ignored()
        if body.model is not None:
            self._check_model(body.model)
        self._check_read("tokens", f"{len(body.tokens)} ids", len(body.tokens))
        self._check_ids("tokens", body.tokens)
        return self._tokenizer.decode(body.tokens, specials=True), ignored

    def _known(self, body: GenerationBody) -> list[str]:
        self._check_model(body.model)
        self._check_ids("stop_token_ids", body.stop_token_ids or ())
        self._check_ids("logit_bias", [int(token) for token in body.logit_bias or ()])
        body.check()
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

    def _encode(self, prompt: str) -> list[int]:
        self._check_texts("prompt", [prompt])
        return self._tokenizer.encode(prompt)

    def _render(self, messages: Sequence[Message]) -> list[int]:
        self._check_texts("messages", [f"{m.name or ''}{m.content}" for m in messages])
        known = {"role", "content", "name"}
        dumped = [m.model_dump(include=known, exclude_none=True) for m in messages]
        try:
            return self._tokenizer.apply_chat_template(dumped)
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages") from None

    def _echoes(self, body: CompletionBody, prompts: Sequence[list[int]]) -> tuple[Echo, ...]:
        given = zip(body.prompt, prompts, strict=True)
        texts = [p if isinstance(p, str) else self._tokenizer.decode(ids) for p, ids in given]
        if body.num_logprobs is None:
            return tuple(Echo(text, ()) for text in texts)
        return tuple(
            Echo(text, _text_offsets(text, [self._tokenizer.token_bytes(i) for i in ids]))
            for text, ids in zip(texts, prompts, strict=True)
        )

    def _order(
        self,
        body: GenerationBody,
        prompts: Sequence[list[int]],
        origin: Origin,
        ignored: list[str],
    ) -> Order:
        kind, param = ("chatcmpl", "messages")
        if isinstance(body, CompletionBody):
            kind, param = ("cmpl", "prompt")
        order_id = f"{kind}-{secrets.token_hex(16)}"
        for prompt in prompts:
            self._check_ids(param, prompt)
            self._check_length(param, len(prompt))
        options = body.stream_options
        return Order(
            id=order_id,
            requests=tuple(
                request
                for index, prompt in enumerate(prompts)
                for request in self._choices(f"{order_id}-{index}", body, prompt, origin)
            ),
            num_choices=body.num_choices,
            echoes=(),
            stops=tuple(body.stop or ()),
            stream=bool(body.stream),
            include_usage=options is not None and bool(options.include_usage),
            ignored=ignored,
        )

    def _choices(
        self, id: str, body: GenerationBody, prompt: list[int], origin: Origin
    ) -> list[Request]:
        room_tokens = self.capacity.longest_prompt_tokens + 1 - len(prompt)
        sampling = sampling_of(body, room_tokens, self._eos_token_ids)
        return [
            Request(
                f"{id}-{choice}",
                prompt,
                of_choice(sampling, choice),
                origin.arrival_s,
                origin.request_class,
                origin.tenant,
            )
            for choice in range(body.num_choices)
        ]

    def _check_texts(self, param: str, texts: Sequence[str]) -> None:
        """Before they are turned into tokens, which takes long where they are long or many."""
        longest = self._tokenizer.longest_token_characters
        least_tokens = sum(max(1, math.ceil(len(text) / longest)) for text in texts)
        num_characters = sum(map(len, texts))
        has = f"{num_characters} characters, which are at least {least_tokens} tokens"
        self._check_read(param, has, least_tokens)

    def _check_read(self, param: str, has: str, num_tokens: int) -> None:
        context_tokens = self.capacity.model_length_tokens
        most_tokens = CONTEXTS_READ * context_tokens
        if num_tokens > most_tokens:
            raise invalid(
                param,
                f"has {has}; at most {most_tokens} are read, {CONTEXTS_READ} times this model's "
                f"maximum context length of {context_tokens}",
                code="context_length_exceeded",
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


def _text_offsets(text: str, tokens: Sequence[bytes]) -> tuple[int, ...]:
    """Characters of the text that are complete before each of its tokens.

    Tokens that are not in the text, like one for its beginning, take no room.
    """
    raw, num_bytes, num_characters = text.encode(), 0, 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    offsets: list[int] = []
    for token in tokens:
        offsets.append(num_characters)
        if num_bytes == 0 and not raw.startswith(token):
            token = token.removeprefix(b" ")  # SentencePiece begins every text with a space
        if raw.startswith(token, num_bytes):
            num_bytes += len(token)
            num_characters += len(decoder.decode(token))
    return tuple(offsets)
