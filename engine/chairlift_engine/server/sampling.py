"""From a checked body to what each of its choices samples by. Pure; called by `order`."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import replace

from chairlift_engine.request import SamplingParams
from chairlift_engine.server.bodies import CompletionBody, GenerationBody
from chairlift_engine.server.errors import invalid

COMPLETION_TOKENS = 16  # OpenAI's default; a chat's is all the room there is
# Below this, logits divided by the temperature overflow, and the draw is the argmax anyway.
MIN_TEMPERATURE = 1e-4


def sampling_of(
    body: GenerationBody, room_tokens: int, eos_token_ids: frozenset[int]
) -> SamplingParams:
    """max_tokens is clamped to the room that the prompt leaves, in chat as in completions."""
    asked = body.max_completion_tokens or body.max_tokens
    if asked is None:
        asked = COMPLETION_TOKENS if isinstance(body, CompletionBody) else room_tokens
    min_tokens = body.min_tokens or 0
    if min_tokens > asked:
        raise invalid("min_tokens", f"{min_tokens} is more than the answer may have, {asked}")
    temperature = 1.0 if body.temperature is None else body.temperature
    stop_ids = frozenset(body.stop_token_ids or ())
    echoes = isinstance(body, CompletionBody) and body.echo
    return SamplingParams(
        max_tokens=min(asked, room_tokens),
        temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        stop_token_ids=stop_ids if body.ignore_eos else stop_ids | eos_token_ids,
        min_p=body.min_p or 0.0,
        min_tokens=min(min_tokens, room_tokens),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items()),
        num_logprobs=body.num_logprobs,
        num_prompt_logprobs=body.num_logprobs if echoes else None,
    )


def of_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """The first choice is what a request for one would get; the others differ, and repeat too."""
    if choice == 0:
        return sampling
    key = f"{sampling.seed} {choice}".encode()
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), signed=True)
    return replace(sampling, seed=seed)
