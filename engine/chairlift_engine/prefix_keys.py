"""Names for the KV of a token prefix: a SHA-256 chain over blocks, rooted in who may share them.

A cryptographic digest, so that nobody can craft a prompt that reads another's blocks. The root is
typed and length-prefixed: a tenant named like an adapter is still another root. Digests never leave
the process. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256

from chairlift_engine.request import Request

_ROOT, _BLOCK = b"R", b"B"
_TENANT, _ADAPTER = b"T", b"A"


@lru_cache(maxsize=1024)
def root_key(tenant: str | None, adapter: str | None = None) -> bytes:
    """tenant: None where the pool shares prefixes. adapter: name and load generation, if any."""
    parts = []
    for tag, value in ((_TENANT, tenant), (_ADAPTER, adapter)):
        if value is not None:
            # Header bytes that are no UTF-8 arrive as surrogates.
            encoded = value.encode("utf-8", "surrogatepass")
            parts.append(tag + len(encoded).to_bytes(8, "big") + encoded)
    return sha256(_ROOT + b"".join(parts)).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    return sha256(_BLOCK + parent + array("I", token_ids).tobytes()).digest()


def extend_keys(request: Request, root: bytes, num_blocks: int, block_tokens: int) -> list[bytes]:
    """The request's keys, of at least its first `num_blocks` blocks, which must be full."""
    keys = request.block_keys
    for index in range(len(keys), num_blocks):
        start = index * block_tokens
        token_ids = request.token_ids[start : start + block_tokens]
        keys.append(block_key(keys[-1] if keys else root, token_ids))
    return keys
