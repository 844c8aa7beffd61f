"""Static batching, done fairly: the baseline that continuous batching is compared with.

A batch is filled, or started short after a bounded wait; it is prefilled at once, padded to its
longest prompt; and it runs to the end of its longest member before the next one starts. A member
that has ended answers its client at once, but its row is computed on, as a static server computes
padding. There is no step budget here: that is what static batching lacks. Pure; called by
`scheduler.Scheduler` while the policy says "static".
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift_engine.request import Request, SamplingParams
from chairlift_engine.residency import Residency
from chairlift_engine.runner import ScheduledChunk
from chairlift_engine.yielding import grow

# How long the oldest request may wait for company while nothing runs.
FILL_WAIT_S = 0.25


class StaticBatching:
    """The batch in progress is what the residency has running, and the rows of those that ended."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._ended: list[ScheduledChunk] = []

    def plan(self, now_s: float) -> tuple[list[ScheduledChunk], list[ScheduledChunk]]:
        """Decodes and prefills of the next step, padding included."""
        if not self._residency.running:
            self._ended.clear()
            if self.fill_wait_left_s(now_s) == 0:
                self._fill(now_s)
        for request in tuple(self._residency.running):
            if request.is_decoding:
                grow(self._residency, request, now_s)  # may preempt, also one that has grown
        running = self._residency.running
        decodes = [
            ScheduledChunk(r, r.num_computed_tokens, 1)
            for r in running
            if r.is_decoding and self._has_room(r)
        ]
        return decodes + self._ended, self._prefills([r for r in running if not r.is_decoding])

    def fill_wait_left_s(self, now_s: float) -> float | None:
        """How long the requests that wait may still wait for company; None when none waits."""
        waiting = [r for queue in self._residency.waiting.values() for r in queue]
        if not waiting:
            return None
        if len(waiting) >= self._residency.policy.batch_size:
            return 0.0
        return max(0.0, min(r.arrival_s for r in waiting) + FILL_WAIT_S - now_s)

    def keep_rows(self, finished: Sequence[Request]) -> None:
        """Members have ended; their rows stay in the batch."""
        self._ended += [self._padding(r.num_tokens - 1, r.num_tokens) for r in finished]

    def _fill(self, now_s: float) -> None:
        """By arrival, whoever it is; without the prefix cache, which a static server has not."""
        residency = self._residency
        for request_class, waiting in residency.waiting.items():
            for request in sorted(waiting, key=lambda r: (r.arrival_s, r.number)):
                if not (residency.has_slot(request_class) and self._fits(request)):
                    return
                num_blocks = residency.blocks.blocks_for(request.num_tokens)
                residency.start(request, (), num_blocks, now_s)

    def _fits(self, request: Request) -> bool:
        """With its next token, and one block more for each neighbour."""
        num_blocks = self._residency.blocks.blocks_for(request.num_tokens + 1)
        return num_blocks + len(self._residency.running) <= self._residency.blocks.num_free

    def _has_room(self, request: Request) -> bool:
        num_slots = len(request.block_ids) * self._residency.blocks.block_tokens
        return num_slots >= request.num_tokens

    def _prefills(self, starting: list[Request]) -> list[ScheduledChunk]:
        longest = max((r.num_uncomputed_tokens for r in starting), default=0)
        chunks = []
        for request in starting:
            length = request.num_uncomputed_tokens
            chunks.append(ScheduledChunk(request, request.num_computed_tokens, length))
            if length < longest:
                chunks.append(self._padding(0, longest - length))
        return chunks

    def _padding(self, start: int, end: int) -> ScheduledChunk:
        """Rows that cost what real ones cost, write to the trash block and sample nothing."""
        nobody = Request("padding", [0] * (end + 1), SamplingParams(max_tokens=1), arrival_s=0.0)
        nobody.block_ids = [0] * self._residency.blocks.blocks_for(end)
        return ScheduledChunk(nobody, start, end - start)
