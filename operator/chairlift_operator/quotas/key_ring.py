"""Whose each API key of a pool is, and how gateways are told: in one document, or in a fixed number
of parts where one ConfigMap could not hold them. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Final

from chairlift_operator.decisions import Condition, Truth
from chairlift_operator.quota_spec import TenantQuotaSpec
from chairlift_operator.quotas.key_secrets import KeyTrouble, SecretKeys
from chairlift_protocol.quota import NUM_SHARDS, shard_of

KEYS_MISSING: Final = "KeysMissing"
# A ConfigMap holds 1 MiB, and a key takes up to 190 bytes of it.
MOST_IN_ONE: Final = 5_000
# Spread by hash over the parts, of which none then gets near MOST_IN_ONE.
MOST_KEYS: Final = 50_000

Owner = tuple[str, str]  # tenant and class


class TenantKeys:
    """owners: by digest. in_doubt: tenants who may have other keys that could not be read. The
    documents are made once each, and only where they are asked for."""

    def __init__(self, owners: Mapping[str, Owner], in_doubt: frozenset[str] = frozenset()) -> None:
        self.owners, self.in_doubt = owners, in_doubt

    def keeping(self, known: Iterable[str]) -> TenantKeys:
        """With the keys that known documents give to tenants in doubt: what could not be read
        takes none. One that somebody broke gives none."""
        kept: dict[str, Owner] = {}
        for document in known:
            with suppress(ValueError):
                kept |= {d: owner for d, owner in _owners(document) if owner[0] in self.in_doubt}
        return TenantKeys({**self.owners, **kept})

    @property
    def need_parts(self) -> bool:
        return len(self.owners) > MOST_IN_ONE

    @cached_property
    def whole(self) -> str:
        """The gateways' file of tenants."""
        return _document(self.owners.items())

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The same, by `shard_of`: a changed key changes one of them."""
        parts: list[list[tuple[str, Owner]]] = [[] for _ in range(NUM_SHARDS)]
        for digest, owner in self.owners.items():
            parts[shard_of(digest)].append((digest, owner))
        return tuple(map(_document, parts))


def without_new(document: str, known: str) -> str:
    """Of a document, the keys that a known one gives to the same tenants. Raise ValueError where
    that is none."""
    before = {(digest, tenant) for digest, (tenant, _) in _owners(known)}
    return _document(
        (digest, owner) for digest, owner in _owners(document) if (digest, owner[0]) in before
    )


class KeyRing:
    """Keys as quotas bring them, the oldest first: each stays the first tenant's."""

    def __init__(self) -> None:
        self.owners: dict[str, Owner] = {}
        self.in_doubt: set[str] = set()

    def add(self, spec: TenantQuotaSpec, secrets: Mapping[str, SecretKeys | None]) -> Condition:
        """What is to be said of the keys."""
        troubles, unasked, num_keys = [], [], 0
        for source in spec.keys:
            read = secrets.get(source.secret)
            if read is None:
                unasked.append(source.secret)
                continue
            if read.is_unknown:
                self.in_doubt.add(spec.tenant)
            if read.trouble is not None:
                troubles.append(read.trouble)
            for digest in read.digests:
                known = self.owners.get(digest)
                if known is None and len(self.owners) < MOST_KEYS:
                    self.owners[digest] = (spec.tenant, source.request_class)
                    num_keys += 1
                elif known is None or known[0] != spec.tenant:
                    troubles.append(_left_out(source.secret, known is not None))
        return _keys_missing(spec, troubles, unasked, num_keys)


def _document(keys: Iterable[tuple[str, Owner]]) -> str:
    tenants: dict[str, list[dict[str, str]]] = {}
    for digest, (tenant, request_class) in sorted(keys):
        tenants.setdefault(tenant, []).append({"sha256": digest, "class": request_class})
    listed = [{"tenant": tenant, "keys": own} for tenant, own in sorted(tenants.items())]
    return json.dumps({"tenants": listed}, separators=(",", ":"))


def _owners(document: str) -> list[tuple[str, Owner]]:
    """Raise ValueError where it is none."""
    try:
        return [
            (key["sha256"], (each["tenant"], key["class"]))
            for each in json.loads(document)["tenants"]
            for key in each["keys"]
        ]
    except (KeyError, TypeError) as error:
        raise ValueError("no document of tenants") from error


def _left_out(secret: str, is_taken: bool) -> KeyTrouble:
    if is_taken:
        told = f"Secret {secret} holds a key of another tenant, which keeps it: make another key"
        return KeyTrouble("KeyTaken", told)
    told = f"Secret {secret}: the pool has {MOST_KEYS} keys, and no room for more: remove old ones"
    return KeyTrouble("TooManyKeys", told)


def _keys_missing(
    spec: TenantQuotaSpec, troubles: list[KeyTrouble], unasked: list[str], num_keys: int
) -> Condition:
    if troubles:
        told = "; ".join(trouble.message for trouble in troubles)
        return Condition(KEYS_MISSING, Truth.TRUE, troubles[0].reason, f"{told}.")
    if unasked:
        told = f"Secret {unasked[0]} has not been read yet."
        return Condition(KEYS_MISSING, Truth.UNKNOWN, "NotRead", told)
    if not spec.keys:
        told = "It names no Secrets: requests are known by a trusted header, or by no key."
        return Condition(KEYS_MISSING, Truth.FALSE, "NoneNamed", told)
    return Condition(KEYS_MISSING, Truth.FALSE, "AllRead", f"Gateways know {num_keys} keys.")
