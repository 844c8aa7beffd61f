"""Logprobs as completions and as chat write them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from chairlift_engine.server.text_stream import Scored
from chairlift_engine.tokenizer import Tokenizer

Json = dict[str, Any]

# JSON has no infinity; what is below is as impossible.
LEAST = -9999.0


def completion_logprobs(scored: Sequence[Scored], tokenizer: Tokenizer) -> Json:
    """A token is always among its own likeliest here, as OpenAI has it."""
    return {
        "tokens": [_text(tokenizer.token_bytes(s.token_id)) for s in scored],
        "token_logprobs": [s.logprobs and _finite(s.logprobs.logprob) for s in scored],
        "top_logprobs": [
            s.logprobs
            and {
                _text(tokenizer.token_bytes(token_id)): _finite(logprob)
                for token_id, logprob in ((s.token_id, s.logprobs.logprob), *s.logprobs.top)
            }
            for s in scored
        ],
        "text_offset": [s.text_offset for s in scored],
    }


def chat_logprobs(scored: Sequence[Scored], tokenizer: Tokenizer) -> Json:
    def entry(token_id: int, logprob: float) -> Json:
        token = tokenizer.token_bytes(token_id)
        return {"token": _text(token), "bytes": list(token), "logprob": _finite(logprob)}

    def entries(pairs: Iterable[tuple[int, float]]) -> list[Json]:
        return [entry(*pair) for pair in pairs]

    content = [
        {**entry(s.token_id, s.logprobs.logprob), "top_logprobs": entries(s.logprobs.top)}
        for s in scored
        if s.logprobs is not None
    ]
    return {"content": content, "refusal": None}


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST  # also for what is no number


def _text(token: bytes) -> str:
    """A part of a character is spelled out, so that different parts stay different."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
