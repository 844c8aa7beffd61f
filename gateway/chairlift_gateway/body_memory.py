"""How much memory the bodies of all requests may hold, from the first byte until nobody needs them
for a second try.

It knows no HTTP. `client_request` fills bodies, `relay` and `proxy` let them go.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, Self

from chairlift_gateway.openai_errors import busy

# As much as an engine's door. Beside the 60 to 150 MB that a gateway takes anyway, 512 MiB for its
# container is enough; its pod has no limit of its own. Of usual prompts these are thousands.
MAX_HELD_BYTES: Final = 256 * 1024 * 1024


class BodyMemory:
    """No tenant gets more than half. longest_bytes: of a body, which must fit into that half."""

    def __init__(self, longest_bytes: int, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_bytes = max(max_bytes, 2 * longest_bytes)
        self._by_tenant: Counter[str] = Counter()
        self.held_bytes = 0

    def body(self, tenant: str) -> HeldBody:
        return HeldBody(self, tenant)

    def hold(self, tenant: str, num_bytes: int) -> None:
        """Raise Refusal."""
        of_tenant_bytes = self._by_tenant[tenant] + num_bytes
        if self.held_bytes + num_bytes > self._max_bytes or 2 * of_tenant_bytes > self._max_bytes:
            raise busy()
        self.held_bytes += num_bytes
        self._by_tenant[tenant] = of_tenant_bytes

    def free(self, tenant: str, num_bytes: int) -> None:
        self.held_bytes -= num_bytes
        self._by_tenant[tenant] -= num_bytes
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


class HeldBody:
    """`raw` is whole once it was `sealed`, and empty again once it was dropped."""

    def __init__(self, memory: BodyMemory, tenant: str) -> None:
        self.raw = b""
        self.num_bytes = 0
        self._memory = memory
        self._tenant = tenant
        self._parts = bytearray()

    def add(self, part: bytes) -> None:
        """Raise Refusal where too much is held already."""
        self._memory.hold(self._tenant, len(part))
        self.num_bytes += len(part)
        self._parts += part

    def seal(self) -> None:
        self.raw = bytes(self._parts)
        self._parts = bytearray()

    def drop(self) -> None:
        self._memory.free(self._tenant, self.num_bytes)
        self.num_bytes, self.raw, self._parts = 0, b"", bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.drop()
