"""Paged KV accounting: which blocks are free. No torch, no knowledge of requests.

Block ids run from 1 to num_blocks; block 0 is never handed out, so that padding rows have somewhere
harmless to write (PagedAttention, SOSP'23, with the trash block of CUDA-graph runners).
"""

from __future__ import annotations


class OutOfBlocks(RuntimeError):
    """Asked for more blocks than are free: the scheduler checks first, so this is a bug."""


class BlockPool:
    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        # A stack: the block freed last is reused first, while it is still in the CPU's cache.
        self._free = list(range(num_blocks, 0, -1))
        self._is_free = bytearray(b"\x01" * (num_blocks + 1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def allocate(self, count: int) -> list[int]:
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks asked, {len(self._free)} free")
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        for block in taken:
            self._is_free[block] = 0
        return taken

    def free(self, block_ids: list[int]) -> None:
        for block in block_ids:
            assert block > 0 and not self._is_free[block], f"block {block} freed twice"
            self._is_free[block] = 1
        self._free.extend(reversed(block_ids))

    def free_list(self) -> frozenset[int]:
        """The free block ids themselves, for tests and for the drained-state check."""
        return frozenset(self._free)
