"""Paged KV accounting: which blocks are free, shared or worth keeping. No torch, no requests.

Block ids run from 1 to num_blocks; block 0 is never handed out, so that padding rows have somewhere
harmless to write (PagedAttention, SOSP'23, with the trash block of CUDA-graph runners).

A block that has a key holds the KV of a known prefix. Freed, it can still be taken again by that
key until its memory is needed: least recently used first, and of one request the tail before the
head, since a tail without its head is never found.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class OutOfBlocks(RuntimeError):
    """Asked for more blocks than are free: the scheduler checks first, so this is a bug."""


class BlockPool:
    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        # A stack: the block freed last is reused first, while it is still in the CPU's cache.
        self._empty = list(range(num_blocks, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, with a key; next victim first
        self._num_holders = [0] * (num_blocks + 1)
        self._key_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, the cached ones among them."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that can still be taken by their key."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def allocate(self, count: int) -> list[int]:
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks asked, {self.num_free} free")
        taken = []
        for _ in range(count):
            block = self._empty.pop() if self._empty else self._evict()
            self._num_holders[block] = 1
            taken.append(block)
        return taken

    def free(self, block_ids: Sequence[int]) -> None:
        """Let go of a request's blocks, in the order of its tokens."""
        for block in reversed(block_ids):
            assert block > 0 and self._num_holders[block] > 0, f"block {block} freed twice"
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if self._key_of[block] is None:
                self._empty.append(block)
            else:
                self._cached[block] = None

    def find(self, key: bytes) -> int | None:
        """The block that holds this prefix's KV; it stays only once `share` has taken it."""
        return self._block_of.get(key)

    def share(self, block_ids: Sequence[int]) -> None:
        """Hold blocks that were found, beside whoever else holds them."""
        for block in block_ids:
            if self._num_holders[block] == 0:
                del self._cached[block]
            self._num_holders[block] += 1

    def publish(self, block: int, key: bytes) -> None:
        """This held block's KV has been computed and is that of the key's prefix."""
        assert self._num_holders[block] > 0, f"block {block} published while free"
        if key not in self._block_of and self._key_of[block] is None:
            self._block_of[key] = block
            self._key_of[block] = key

    def num_held(self, block_ids: Iterable[int]) -> int:
        """How many of these somebody holds."""
        holders = self._num_holders
        return sum(1 for block in block_ids if holders[block])

    def num_freed_with(self, block_ids: Iterable[int]) -> int:
        """How many of these only one request holds, so that they are free when it leaves."""
        holders = self._num_holders
        return sum(1 for block in block_ids if holders[block] == 1)

    def free_list(self) -> frozenset[int]:
        """The free block ids themselves, for tests and for the drained-state check."""
        return frozenset((*self._empty, *self._cached))

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Walk everything, given what each request holds: AssertionError names what is wrong."""
        holders = Counter(block for block_ids in held for block in block_ids)
        assert holders[0] == 0, "block 0 is held"
        for block in range(1, self.num_blocks + 1):
            counted = self._num_holders[block]
            assert counted == holders[block], f"block {block}: {counted} != {holders[block]}"
        free = (*self._empty, *self._cached)
        assert len(set(free)) == len(free), "a block is free twice"
        assert sorted((*free, *holders)) == list(range(1, self.num_blocks + 1)), "a block is lost"
        keyed = {block: key for block, key in enumerate(self._key_of) if key is not None}
        assert {key: block for block, key in keyed.items()} == self._block_of, "a key is stale"
        assert not any(block in keyed for block in self._empty), "an empty block has a key"
        assert all(block in keyed for block in self._cached), "a cached block has no key"

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._key_of[block]
        assert key is not None
        del self._block_of[key]
        self._key_of[block] = None
        return block
