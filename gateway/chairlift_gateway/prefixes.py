"""Which prompts begin alike, and how far: names of their first blocks, and where they part. Pure.

A replica's prefix cache is worth going back to. What requests have in common is a system prompt,
which all of them have, or a conversation, which is one's own. Only the latter tells where to go:
the former lies in every cache, and would gather everybody on one replica. So the name of a prompt
is that of its blocks up to the first at which prompts do not part into many.

Gateways name alike: names are digests of the text alone. `upstream` names, `routing` asks.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final
from zlib import crc32

BLOCK_BYTES: Final = 2048  # about 500 tokens; less is soon computed again
MAX_BLOCKS: Final = 64  # what all prompts of an agent have in common is longer than one thinks
# A block that so many different ones follow is no conversation.
PARTS_AT: Final = 8
MAX_REMEMBERED: Final = 8192

_PROMPT: Final = re.compile(rb'"(?:messages|prompt)"\s*:')


def prefix_names(tenant: str, body: bytes) -> tuple[int, ...]:
    """Of each whole block of the prompt, the first ones: what it and all before it consist of.

    Tenants share no cache. Fields that come before the prompt may differ, so they do not count.
    """
    found = _PROMPT.search(body)
    start = found.start() if found else 0
    num_blocks = min(MAX_BLOCKS, (len(body) - start) // BLOCK_BYTES)
    name = crc32(tenant.encode())
    names = []
    view = memoryview(body)
    for first in range(start, start + num_blocks * BLOCK_BYTES, BLOCK_BYTES):
        name = crc32(view[first : first + BLOCK_BYTES], name)
        names.append(name)
    return tuple(names)


class Partings:
    """At which blocks prompts part, as seen so far; the longest unseen are forgotten."""

    def __init__(self) -> None:
        self._followers: OrderedDict[int, set[int]] = OrderedDict()

    def own_name(self, names: Sequence[int]) -> int | None:
        """What a prompt is known by, noted as seen; None for one shorter than a block."""
        for name, follower in zip(names, names[1:], strict=False):
            if not self._parts(name, follower):
                return name
        return names[-1] if names else None

    def _parts(self, name: int, follower: int) -> bool:
        followers = self._followers.setdefault(name, set())
        self._followers.move_to_end(name)
        if len(self._followers) > MAX_REMEMBERED:
            self._followers.popitem(last=False)
        if len(followers) < PARTS_AT:
            followers.add(follower)
        return len(followers) >= PARTS_AT
