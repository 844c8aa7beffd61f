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
from chairlift_engine.request import Request
from chairlift_engine.runner import ScheduledChunk
from chairlift_engine.simulator_profile import Fault, FaultKind, Profile, ProfileFile

# Ids of larger vocabularies hold these 13 bytes too, so that any tokenizer can decode the text.
TEXT: Final = bytes(random.Random(0).choices(b"etaoin shrdlu", k=1 << 16))
LEAST_NOISE: Final = 0.1  # no step takes less than this share of its mean time
NUM_PLACES_KEPT: Final = 4096


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
        self._places: dict[str, int] = {}

    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[int]:
        now_s = self._clock.now_s()
        if self._file is not None:
            self.profile = self._file.changed(now_s) or self.profile
        self._num_steps += 1
        factor, stall_s = self._suffer(now_s - self._started_s) if self.profile.faults else (1, 0)
        num_decodes = num_tokens = kv_tokens = 0
        sampled: list[int] = []
        places = self._places
        # Runs hundreds of thousands of times for an hour in virtual time: no property calls here.
        for request, start, chunk_tokens in chunks:
            end = start + chunk_tokens
            num_tokens += chunk_tokens
            kv_tokens += end
            if chunk_tokens == 1 and start > 0:
                num_decodes += 1
            if end == len(request.token_ids):
                place = places.get(request.id)
                if place is None or end == request.num_prompt_tokens:  # an id may come again
                    place = self._place_in_text(request)
                num_output = end - request.num_prompt_tokens
                sampled.append(TEXT[(place + num_output) % len(TEXT)])
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
        """Where in TEXT this request's tokens are read: its prompt alone determines it."""
        if len(self._places) >= NUM_PLACES_KEPT:
            self._places.clear()
        prompt = request.token_ids[: min(request.num_prompt_tokens, 64)]
        place = self._places[request.id] = zlib.crc32(repr(prompt).encode())
        return place
