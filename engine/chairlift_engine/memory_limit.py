"""What steps may carry after one has run out of memory. Pure; kept by `engine.Engine`.

Memory that was too little once may be enough later (a neighbour has left the device) or never, so a
limit is lifted after a while, and each further failure makes that while twice as long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

from chairlift_engine.config import Capacity
from chairlift_protocol.policy import Policy

FIRST_HOLD_S: Final = 60.0
LONGEST_HOLD_S: Final = 3600.0
KEPT_SHARE: Final = 0.75


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """In force until `until_s`; `hold_s` is how long that was when it was set."""

    batch_size: int
    step_tokens: int
    hold_s: float
    until_s: float

    @classmethod
    def after_failure(
        cls,
        before: Self | None,
        num_seqs: int,
        num_prefill_tokens: int,
        capacity: Capacity,
        now_s: float,
    ) -> Self:
        """Three quarters of what the failed step carried: sequences, and tokens if it prefilled;
        no more than the limit that was in force."""
        hold_s = FIRST_HOLD_S if before is None else min(before.hold_s * 2, LONGEST_HOLD_S)
        in_force = before if before is not None and now_s < before.until_s else None
        step_tokens = in_force.step_tokens if in_force else capacity.step_tokens
        batch_size = in_force.batch_size if in_force else capacity.batch_size
        if num_prefill_tokens > 0:
            kept_tokens = int((num_seqs + num_prefill_tokens) * KEPT_SHARE)
            step_tokens = min(step_tokens, max(capacity.block_tokens, kept_tokens))
        return cls(
            batch_size=min(batch_size, max(1, int(num_seqs * KEPT_SHARE))),
            step_tokens=step_tokens,
            hold_s=hold_s,
            until_s=now_s + hold_s,
        )

    def applied_to(self, policy: Policy) -> Policy:
        return replace(
            policy,
            batch_size=min(policy.batch_size, self.batch_size),
            step_tokens=min(policy.step_tokens, self.step_tokens),
        )


def is_out_of_memory(error: BaseException) -> bool:
    """torch's own type for a GPU is a RuntimeError, and its CPU allocator raises a plain one."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and any(sign in text for sign in ("out of memory", "can't allocate memory"))
    )
