"""A runner without a model: the same scheduler and server at modelled step times.

`T = a + b*decodes + c*prefill tokens + d*context tokens`, with multiplicative noise. Used by tests,
by `runtime.engine: simulator`, and wherever a pool is sized before there is a GPU. Its text is a
deterministic pseudo-text drawn from each prompt's hash. Imports no torch.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, Self

from chairlift_engine.clock import Clock
from chairlift_engine.request import TokenLogprobs
from chairlift_engine.runner import Sampled, ScheduledChunk

LETTERS: Final = b"etaoin shrdlu"


class ProfileError(ValueError):
    """A simulator profile that cannot be understood; the message says what it takes."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Step-time coefficients in ms, relative noise (standard deviation) and load time in s."""

    a_ms: float = 8.0
    b_ms: float = 0.06
    c_ms: float = 0.045
    d_ms: float = 5e-5
    noise: float = 0.04
    load_s: float = 0.0

    def scaled(self, factor: float) -> Self:
        return type(self)(
            self.a_ms * factor,
            self.b_ms * factor,
            self.c_ms * factor,
            self.d_ms * factor,
            self.noise,
            self.load_s,
        )

    def step_s(self, num_decode_seqs: int, num_prefill_tokens: int, kv_tokens: int) -> float:
        """Mean time of a step, without noise."""
        return 1e-3 * (
            self.a_ms
            + self.b_ms * num_decode_seqs
            + self.c_ms * num_prefill_tokens
            + self.d_ms * kv_tokens
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """A profile's name, or a JSON object of some of this class's fields."""
        if (factor := _FACTORS.get(text)) is not None:
            return cls().scaled(factor)
        names = [f.name for f in fields(cls)]
        try:
            values = json.loads(text)
        except json.JSONDecodeError:
            values = None
        if not isinstance(values, dict):
            raise ProfileError(
                f"simulator profile {text!r}: use one of {', '.join(_FACTORS)}, or a JSON object "
                f"of {', '.join(names)}"
            )
        for name, value in values.items():
            if name not in names:
                raise ProfileError(
                    f"simulator profile: unknown field {name!r}; it takes {', '.join(names)}"
                )
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ProfileError(f"simulator profile: {name} must be 0 or more, not {value!r}")
        return cls(**values)


_FACTORS: Final = {"reference": 1.0, "fast": 0.45, "slow": 1.6}


class SimulatorRunner:
    """Sleeps for a step's modelled time on the given clock; deterministic by seed."""

    def __init__(self, profile: Profile, clock: Clock, seed: int = 0) -> None:
        self.profile = profile
        self._clock = clock
        self._random = random.Random(seed)

    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[Sampled]:
        num_decodes = sum(1 for c in chunks if c.num_tokens == 1 and c.start > 0)
        mean_s = self.profile.step_s(
            num_decode_seqs=num_decodes,
            num_prefill_tokens=sum(c.num_tokens for c in chunks) - num_decodes,
            kv_tokens=sum(c.end for c in chunks),
        )
        noise = self._random.gauss(1.0, self.profile.noise) if self.profile.noise else 1.0
        self._clock.sleep(mean_s * max(noise, 0.1))
        for chunk in chunks:
            _score_prompt(chunk)
        return [_sampled(c) for c in chunks if c.samples]


def _sampled(chunk: ScheduledChunk) -> Sampled:
    token_id = pseudo_token(chunk)
    num_logprobs = chunk.request.sampling.num_logprobs
    return Sampled(token_id, None if num_logprobs is None else _certain(token_id, num_logprobs))


def _score_prompt(chunk: ScheduledChunk) -> None:
    request, count = chunk.request, chunk.request.sampling.num_prompt_logprobs
    if count is not None:
        for position in range(max(chunk.start, 1), min(chunk.end, request.num_prompt_tokens)):
            request.prompt_logprobs[position] = _certain(request.token_ids[position], count)


def _certain(token_id: int, num_logprobs: int) -> TokenLogprobs:
    """What is determined has probability 1."""
    return TokenLogprobs(0.0, ((token_id, 0.0),)[:num_logprobs])


def pseudo_token(chunk: ScheduledChunk) -> int:
    """The next letter of a text that the prompt alone determines (byte-level token ids).

    Ids of larger vocabularies hold these 13 too, so that any tokenizer can decode the text.
    """
    request = chunk.request
    prompt = request.token_ids[: min(request.num_prompt_tokens, 64)]
    key = f"{prompt}{request.num_output_tokens}".encode()
    return LETTERS[zlib.crc32(key) % len(LETTERS)]
