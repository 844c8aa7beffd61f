"""The seam between scheduling and arithmetic: what a step asks of a model.

Implemented by `torch_runner.TorchRunner` (real models) and `simulator.SimulatorRunner` (modelled
step times). The engine is handed one and never knows which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from chairlift_engine.request import Request, TokenLogprobs


class ScheduledChunk(NamedTuple):
    """`num_tokens` of a request's tokens from `start` on, to be computed in this step.

    request.block_ids covers positions [0, start + num_tokens). A chunk that reaches the request's
    last token yields one sampled token.
    """

    request: Request
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        return self.start + self.num_tokens == len(self.request.token_ids)


class Sampled(NamedTuple):
    """logprobs only where the request's `sampling` asks for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class Runner(Protocol):
    """Computes one step. Called from the engine's thread only."""

    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[Sampled]:
        """Write KV for every chunk and return one token per chunk that samples, in order.

        Decodes (one-token chunks) come first in `chunks`. Must not change the requests, but for
        filling in `Request.prompt_logprobs` where it is asked for.
        """
        ...
