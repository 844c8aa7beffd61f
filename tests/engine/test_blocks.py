"""Which block is free, shared or kept: nothing is lost, and nothing stale is found."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_engine.blocks import BlockPool, OutOfBlocks
from chairlift_engine.prefix_keys import block_key, root_key


def keys(count: int, root: int = 0) -> list[bytes]:
    return [bytes([root, index]) for index in range(count)]


def published(pool: BlockPool, names: Sequence[bytes]) -> list[int]:
    blocks = pool.allocate(len(names))
    for block, key in zip(blocks, names, strict=True):
        pool.publish(block, key)
    return blocks


def test_freed_blocks_are_found_until_their_memory_is_needed() -> None:
    pool = BlockPool(4, 16)
    names = keys(3)
    blocks = published(pool, names)
    pool.free(blocks)
    assert pool.num_free == 4 and pool.num_cached == 3
    assert [pool.find(key) for key in names] == blocks
    pool.allocate(2)  # the empty one and a tail
    assert [pool.find(key) for key in names] == [*blocks[:2], None]


def test_tails_are_evicted_before_heads_and_the_longest_unused_first() -> None:
    pool = BlockPool(4, 16)
    first, second = keys(2, 1), keys(2, 2)
    for names in (first, second):
        pool.free(published(pool, names))
    evicted = []
    for _ in range(4):
        pool.allocate(1)
        evicted += [k for k in (*first, *second) if pool.find(k) is None and k not in evicted]
    assert evicted == [first[1], first[0], second[1], second[0]]


def test_a_block_that_was_shared_is_freed_by_its_last_holder() -> None:
    pool = BlockPool(2, 16)
    blocks = published(pool, keys(1))
    pool.share(blocks)
    pool.free(blocks)
    assert pool.num_free == 1
    pool.free(blocks)
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_the_key_of_an_evicted_block_is_gone_before_its_memory_is_used_again() -> None:
    pool = BlockPool(1, 16)
    pool.free(published(pool, keys(1)))
    (block,) = pool.allocate(1)
    assert pool.find(keys(1)[0]) is None
    pool.free([block])
    assert pool.num_cached == 0


def test_a_prefix_computed_twice_is_kept_once() -> None:
    pool = BlockPool(2, 16)
    first, second = published(pool, keys(1)), published(pool, keys(1))
    pool.free(second)
    pool.free(first)
    assert pool.num_cached == 1 and pool.find(keys(1)[0]) == first[0]


def test_asking_for_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(3, 16)
    held = pool.allocate(1)
    with pytest.raises(OutOfBlocks, match="3 blocks asked, 2 free"):
        pool.allocate(3)
    pool.check([held])
    assert pool.num_free == 2


operations = st.one_of(
    st.tuples(st.just("allocate"), st.integers(0, 6)),
    st.tuples(st.just("publish"), st.integers(0, 20), st.integers(0, 9)),
    st.tuples(st.just("find"), st.integers(0, 9)),
    st.tuples(st.just("free"), st.integers(0, 20)),
)


@given(st.integers(1, 12), st.lists(operations, max_size=60))
def test_whatever_happens_free_cached_and_held_blocks_are_all_there_are(
    num_blocks: int, acts: Sequence[tuple[str, int] | tuple[str, int, int]]
) -> None:
    pool = BlockPool(num_blocks, 16)
    held: list[list[int]] = []
    for act in acts:
        match act:
            case ("allocate", count) if count <= pool.num_free:
                held.append(pool.allocate(count))
            case ("publish", index, key) if held and held[index % len(held)]:
                pool.publish(held[index % len(held)][0], keys(10)[key])
            case ("find", key):
                found = pool.find(keys(10)[key])
                if found is not None:
                    pool.share([found])
                    held.append([found])
            case ("free", index) if held:
                pool.free(held.pop(index % len(held)))
        pool.check(held)
        num_held = len({block for block_ids in held for block in block_ids})
        assert pool.num_free + num_held == num_blocks


# -- keys ------------------------------------------------------------------------------------------


def test_roots_are_typed_so_that_no_tenant_can_be_named_like_an_adapter() -> None:
    names = [None, "", "a", "b", "ab", "a\x00b", "A", "T", "\udcff"]
    roots = {root_key(tenant, adapter) for tenant in names for adapter in names}
    assert len(roots) == len(names) ** 2


@given(
    st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4), max_size=4),
    st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4), max_size=4),
)
def test_two_chains_are_equal_only_where_all_tokens_so_far_are(
    first: list[list[int]], second: list[list[int]]
) -> None:
    chains = []
    for blocks in (first, second):
        chain = [root_key("acme")]
        for tokens in blocks:
            chain.append(block_key(chain[-1], tokens))
        chains.append(chain)
    for length, (one, other) in enumerate(zip(*chains, strict=False)):
        assert (one == other) == (first[:length] == second[:length])


def test_keys_are_cryptographic_digests_which_nobody_can_craft_a_second_prompt_for() -> None:
    expected = sha256(b"B" + root_key("acme") + struct.pack("=4I", 1, 2, 3, 2**32 - 1)).digest()
    assert block_key(root_key("acme"), [1, 2, 3, 2**32 - 1]) == expected
