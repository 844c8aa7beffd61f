"""What is fixed when an engine starts. Live values are in `chairlift_protocol.policy`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_WAITING: Final = 1024  # requests of one class that an engine lets queue, unless it is told


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bounds that memory was reserved for; a live policy moves inside them.

    num_blocks counts usable KV blocks, without the block that padding writes to. share_prefixes:
    one tenant's prompts may be found in the prefix cache by the others.
    """

    batch_size: int
    step_tokens: int
    num_blocks: int
    block_tokens: int
    model_length_tokens: int
    share_prefixes: bool = False

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_tokens

    @property
    def longest_prompt_tokens(self) -> int:
        """Longest prompt that can still produce one token."""
        return min(self.kv_tokens, self.model_length_tokens) - 1
