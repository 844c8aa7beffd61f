"""A runner without a model: the same scheduler and server at modelled step times.

`T = a + b*decodes + c*prefill tokens + d*context tokens`, with multiplicative noise and the faults
of its profile. Used by tests, by `runtime.engine: simulator`, and wherever a pool is sized before
there is a GPU. Its text is a deterministic pseudo-text drawn from each prompt's hash. Imports no
torch.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Final

from chairlift_engine.clock import Clock
from chairlift_engine.request import Request, TokenLogprobs
from chairlift_engine.runner import Sampled, ScheduledChunk
from chairlift_engine.simulator_profile import Fault, FaultKind, Profile, ProfileFile

# Ids of larger vocabularies hold these 13 bytes too, so that any tokenizer can decode the text.
LETTERS: Final = [Sampled(byte) for byte in b"etaoin shrdlu"]
TEXT: Final = random.Random(0).choices(LETTERS, k=1 << 16)
LEAST_NOISE: Final = 0.1  # no step takes less than this share of its mean time
NUM_PLACES_KEPT: Final = 1024


class SimulatedCrash(RuntimeError):
    """The profile says that the engine fails here."""


class SimulatorRunner:
    """Sleeps for a step's modelled time on the given clock; deterministic by seed.

    file: where the profile comes from, when it may change while it is in use.
    """

    def __init__(
        self, profile: Profile, clock: Clock, seed: int = 0, file: ProfileFile | None = None
    ) -> None:
        self.profile = profile
        self._clock = clock
        self._random = random.Random(seed)
        self._file = file
        self._started_s = clock.now_s()
        self._num_steps = 0
        self._suffered: set[Fault] = set()
        self._places: dict[Request, int] = {}

    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[Sampled]:
        now_s = self._clock.now_s()
        if self._file is not None:
            self.profile = self._file.changed(now_s) or self.profile
        self._num_steps += 1
        factor, stall_s = self._suffer(now_s - self._started_s) if self.profile.faults else (1, 0)
        num_decodes = num_tokens = kv_tokens = 0
        sampled: list[Sampled] = []
        places, num_letters = self._places, len(TEXT)
        # Runs hundreds of thousands of times for an hour in virtual time: no property calls here.
        for request, start, chunk_tokens in chunks:
            end = start + chunk_tokens
            num_tokens += chunk_tokens
            kv_tokens += end
            sampling = request.sampling
            if chunk_tokens == 1 and start > 0:
                num_decodes += 1
            if sampling.num_prompt_logprobs is not None:
                _score_prompt(request, start, end, sampling.num_prompt_logprobs)
            if end == len(request.token_ids):
                place = places.get(request)
                if place is None:
                    place = self._place_in_text(request)
                letter = TEXT[(place + end) % num_letters]
                if sampling.num_logprobs is not None:
                    letter = Sampled(
                        letter.token_id, _certain(letter.token_id, sampling.num_logprobs)
                    )
                sampled.append(letter)
        mean_s = self.profile.step_s(num_decodes, num_tokens - num_decodes, kv_tokens) * factor
        noise = self._random.gauss(1.0, self.profile.noise) if self.profile.noise else 1.0
        self._clock.sleep(mean_s * max(noise, LEAST_NOISE) + stall_s)
        return sampled

    def _suffer(self, elapsed_s: float) -> tuple[float, float]:
        """How much slower this step is, and for how long it stalls; raises what ends it."""
        factor, stall_s = 1.0, 0.0
        for fault in self.profile.faults:
            if fault in self._suffered or not fault.is_due(elapsed_s, self._num_steps):
                continue
            if fault.kind is FaultKind.SLOW:
                factor *= fault.factor
                continue
            self._suffered.add(fault)  # once, also when the file is read again
            match fault.kind:
                case FaultKind.STALL:
                    stall_s += fault.duration_s
                case FaultKind.CRASH:
                    raise SimulatedCrash(f"simulated crash at step {self._num_steps}")
                case FaultKind.OOM:
                    raise MemoryError(f"simulated: out of memory at step {self._num_steps}")
        return factor, stall_s

    def _place_in_text(self, request: Request) -> int:
        """Where in TEXT this request's tokens are read, by their position: the prompt alone
        determines it."""
        if len(self._places) >= NUM_PLACES_KEPT:
            self._places.clear()
        prompt = request.token_ids[: min(request.num_prompt_tokens, 64)]
        place = self._places[request] = zlib.crc32(repr(prompt).encode())
        return place


def _score_prompt(request: Request, start: int, end: int, num_logprobs: int) -> None:
    for position in range(max(start, 1), min(end, request.num_prompt_tokens)):
        request.prompt_logprobs[position] = _certain(request.token_ids[position], num_logprobs)


def _certain(token_id: int, num_logprobs: int) -> TokenLogprobs:
    """What is determined has probability 1."""
    return TokenLogprobs(0.0, ((token_id, 0.0),)[:num_logprobs])
