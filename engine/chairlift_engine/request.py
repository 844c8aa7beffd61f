"""One request's state, from arrival to its last token. No torch, no I/O, no clock of its own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from chairlift_protocol.wire import RequestClass


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token, or the server found a stop string
    LENGTH = "length"  # max_tokens or the model's length
    ABORT = "abort"  # the client left, or the server gave up
    ERROR = "error"  # the forward pass failed


class Phase(StrEnum):
    """Where a request is. Set by `residency.Residency` only."""

    WAITING = "waiting"  # holds nothing
    PREFILL = "prefill"  # holds a slot and blocks; tokens of it are yet to be computed
    DECODE = "decode"  # every step computes its last token and yields the next
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick tokens and when to end. temperature 0 is greedy; top_k 0 means all.

    seed: with the output position it determines each draw, so that a seeded request repeats
        whatever runs beside it and after any preemption.
    stop_token_ids: ends the request; the end-of-sequence ids belong here unless ignored.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()


class Request:
    """Mutable; owned by the scheduler from `add` until it finishes or is aborted.

    token_ids holds prompt and output; KV exists for the first num_computed_tokens of them.
    number: order of arrival at this engine; arrival_s may be earlier, at the gateway.
    num_final_tokens: prompt and longest possible answer.
    num_charged_tokens: of these its tenant has been charged; computing them again is free.
    num_cached_tokens: of the prompt, found in the prefix cache at the first start.
    block_keys: prefix keys of its first full blocks, as far as somebody needed them.
    holds_seat: batch work in a guaranteed seat, which no interactive request takes.
    is_protected: has blocks for its longest possible answer and yields to nobody.
    """

    __slots__ = (
        "arrival_s",
        "block_ids",
        "block_keys",
        "first_scheduled_s",
        "first_token_s",
        "holds_seat",
        "id",
        "is_protected",
        "last_token_s",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_computed_tokens",
        "num_final_tokens",
        "num_preemptions",
        "num_prefill_chunks",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_times_passed",
        "number",
        "phase",
        "request_class",
        "sampling",
        "tenant",
        "token_ids",
        "waiting_since_s",
        "yielded_in_step",
    )

    def __init__(
        self,
        id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        arrival_s: float,
        request_class: RequestClass = RequestClass.INTERACTIVE,
        tenant: str = "anonymous",
    ) -> None:
        self.id = id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.sampling = sampling
        self.request_class = request_class
        self.tenant = tenant
        self.arrival_s = arrival_s
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.block_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.num_times_passed = 0
        self.phase = Phase.WAITING
        self.number = 0
        self.waiting_since_s = arrival_s
        self.num_final_tokens = len(prompt_token_ids) + sampling.max_tokens
        self.num_charged_tokens = 0
        self.num_cached_tokens = 0
        self.num_prefill_chunks = 0
        self.block_keys: list[bytes] = []
        self.num_published_blocks = 0
        self.holds_seat = False
        self.is_protected = False
        self.yielded_in_step = -1

    def __repr__(self) -> str:
        return (
            f"Request({self.id!r}, {self.request_class}, {self.num_computed_tokens} computed of "
            f"{self.num_prompt_tokens}+{self.num_output_tokens})"
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """One token to compute and it is the last: the next step yields another token.

        False while waiting, prefilling, or recomputing after a preemption.
        """
        return self.num_uncomputed_tokens == 1 and self.num_computed_tokens > 0
