"""How gateways are told whose each key is: in one document, and in parts."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_gateway.identity import parse_tenants
from chairlift_operator.quota_spec import KeySource, PoolRef, TenantQuotaSpec
from chairlift_operator.quotas.key_ring import (
    MOST_IN_ONE,
    MOST_KEYS,
    KeyRing,
    Owner,
    TenantKeys,
    without_new,
)
from chairlift_operator.quotas.key_secrets import SecretKeys
from chairlift_protocol.quota import NUM_SHARDS, shard_of

MAP_BYTES = 1 << 20


def _digest(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


digests = st.integers(0, 40).map(_digest)
owners = st.tuples(st.sampled_from(["acme", "beta"]), st.sampled_from(["interactive", "batch"]))
books = st.dictionaries(digests, owners)


def _read(document: str) -> dict[str, Owner]:
    callers = parse_tenants(document.encode()).callers
    return {digest: (each.tenant, each.request_class.value) for digest, each in callers.items()}


@given(books)
def test_each_key_is_in_the_part_that_a_gateway_looks_into(book: dict[str, Owner]) -> None:
    keys = TenantKeys(book)
    parts = [_read(part) for part in keys.parts]
    assert len(parts) == NUM_SHARDS
    for number, part in enumerate(parts):
        assert {shard_of(digest) for digest in part} <= {number}
    assert {digest: owner for part in parts for digest, owner in part.items()} == book
    assert _read(keys.whole) == book


@given(books, digests, owners)
def test_a_changed_key_changes_no_other_part(
    book: dict[str, Owner], digest: str, owner: Owner
) -> None:
    before, after = TenantKeys(book).parts, TenantKeys({**book, digest: owner}).parts
    changed = {number for number in range(NUM_SHARDS) if before[number] != after[number]}
    assert changed == ({shard_of(digest)} if book.get(digest) != owner else set())


@given(books, books)
def test_taking_gives_nobody_a_key(before: dict[str, Owner], after: dict[str, Owner]) -> None:
    left = _read(without_new(TenantKeys(after).whole, TenantKeys(before).whole))
    assert left == {
        digest: owner
        for digest, owner in after.items()
        if digest in before and before[digest][0] == owner[0]
    }


@given(books, books)
def test_whoever_is_in_doubt_keeps_what_is_known_and_nobody_else_does(
    known: dict[str, Owner], read: dict[str, Owner]
) -> None:
    keys = TenantKeys(read, frozenset({"acme"})).keeping([TenantKeys(known).whole, "broken"])
    kept = {digest: owner for digest, owner in known.items() if owner[0] == "acme"}
    assert keys.owners == {**read, **kept}


@pytest.mark.parametrize("known", ["broken", "{}", '{"tenants": [1]}', "[]"])
def test_a_document_that_is_none_is_said(known: str) -> None:
    with pytest.raises(ValueError):
        without_new(TenantKeys({}).whole, known)


def test_full_documents_of_the_longest_names_fit_their_configmaps() -> None:
    book = {_digest(n): (f"{n:063}", "interactive") for n in range(MOST_KEYS)}
    keys = TenantKeys(book)
    assert keys.need_parts and max(map(len, keys.parts)) < MAP_BYTES
    one = TenantKeys(dict(list(book.items())[:MOST_IN_ONE]))
    assert not one.need_parts and len(one.whole) < MAP_BYTES


def test_a_pool_that_is_full_takes_no_more_keys_and_says_so() -> None:
    ring = KeyRing()
    every = tuple(map(_digest, range(MOST_KEYS + 1)))
    secrets: dict[str, SecretKeys | None] = {
        "many": SecretKeys(every[:-1]), "more": SecretKeys(every[-2:])
    }  # fmt: skip
    spec = TenantQuotaSpec(PoolRef("chat"), "acme", (KeySource("many"),))
    assert ring.add(spec, secrets).reason == "AllRead"
    more = TenantQuotaSpec(PoolRef("chat"), "acme", (KeySource("more"),))
    told = ring.add(more, secrets)
    assert told.reason == "TooManyKeys" and f"{MOST_KEYS} keys" in told.message
    assert len(ring.owners) == MOST_KEYS
