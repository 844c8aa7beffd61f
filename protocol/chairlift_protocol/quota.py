"""What operator and gateways agree on in Redis: names of keys, and a tenant's limits.

All keys of a pool carry one hash tag, so that a script that takes several of them runs on Redis
Cluster. docs/protocol.md says what each key holds and who writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from chairlift_protocol.wire import RequestClass

# A tenant is a name in headers, keys of Redis and labels of metrics, so it is short and plain.
TENANT_PATTERN: Final = re.compile(r"[a-z0-9](?:[-a-z0-9._]{0,61}[a-z0-9])?")
ANONYMOUS: Final = "anonymous"
# Takes the place of every tenant that has no limits of its own. No tenant can have this name.
DEFAULT_TENANT: Final = "*"
# Field of the limits' hash that changes whenever any other field does.
REVISION_FIELD: Final = "#"

# Where gateways on Kubernetes find their file of tenants, in the ConfigMap that is theirs.
TENANTS_KEY: Final = "tenants.json"
# Instead of it, where one object cannot hold them all: how many others do, each part by its digest.
SHARDS_KEY: Final = "shards"
NUM_SHARDS: Final = 16
# In each of those, beside TENANTS_KEY: which part it is.
SHARD_KEY: Final = "shard"

MAX_TOKENS_PER_MINUTE: Final = 1_000_000_000
MAX_REQUESTS_PER_MINUTE: Final = 1_000_000
MAX_CONCURRENCY: Final = 100_000
MAX_BURST_MS: Final = 600_000
DEFAULT_BURST_MS: Final = 30_000
# As many as the fullest bucket holds: no request counts as more, and nobody owes more.
MAX_TOKENS: Final = MAX_TOKENS_PER_MINUTE * MAX_BURST_MS // 60_000


class LimitsError(ValueError):
    """Limits that cannot be understood; the message names the field and what it takes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one tenant in one class; None is no limit.

    burst_ms: how much of tokens and requests may come at once, as time of their rates.
    may_borrow: tokens do not bind while the pool is idle; what is owed then has a bound.
    lowered_from: the tokens per minute that were set, while fewer are in force; only the script
    says so.
    """

    tokens_per_minute: int | None = None
    requests_per_minute: int | None = None
    concurrency: int | None = None
    burst_ms: int = DEFAULT_BURST_MS
    may_borrow: bool = False
    lowered_from: int | None = None

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Raise LimitsError. Unknown fields are those of a newer writer, and ignored."""
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise LimitsError(f"limits: not JSON: {error}") from error
        if not isinstance(body, Mapping):
            raise LimitsError("limits: must be a JSON object")
        return cls(
            _whole(body, "tokens_per_minute", 0, MAX_TOKENS_PER_MINUTE),
            _whole(body, "requests_per_minute", 0, MAX_REQUESTS_PER_MINUTE),
            _whole(body, "concurrency", 0, MAX_CONCURRENCY),
            _whole(body, "burst_ms", 1, MAX_BURST_MS) or DEFAULT_BURST_MS,
            body.get("when_idle") == "borrow",
            _whole(body, "lowered_from", 0, MAX_TOKENS_PER_MINUTE),
        )

    def to_json(self) -> str:
        bounds = {
            "tokens_per_minute": self.tokens_per_minute,
            "requests_per_minute": self.requests_per_minute,
            "concurrency": self.concurrency,
        }
        when_idle = "borrow" if self.may_borrow else "refuse"
        stated = {name: bound for name, bound in bounds.items() if bound is not None}
        body = {**stated, "burst_ms": self.burst_ms, "when_idle": when_idle}
        return json.dumps(body, separators=(",", ":"))

    @property
    def admits_nobody(self) -> bool:
        """Now and later. Those that may only borrow their tokens wait for an idle pool instead."""
        has_no_tokens = self.tokens_per_minute == 0 and not self.may_borrow
        return has_no_tokens or self.requests_per_minute == 0 or self.concurrency == 0


@dataclass(frozen=True, slots=True)
class QuotaKeys:
    """The keys of one pool; `pool` is namespace/name."""

    pool: str

    @property
    def limits(self) -> str:
        return self._key("limits")

    @property
    def idle(self) -> str:
        return self._key("idle")

    @property
    def leasing(self) -> str:
        return self._key("leasing")

    @property
    def gateways(self) -> str:
        return self._key("gateways")

    def account(self, holder: str) -> str:
        return self._key(f"t:{holder}")

    def rate(self, holder: str) -> str:
        return self._key(f"t:{holder}:rate")

    def leases(self, holder: str) -> str:
        return self._key(f"t:{holder}:leases")

    def late(self, holder: str) -> str:
        return self._key(f"t:{holder}:late")

    def _key(self, name: str) -> str:
        return f"chairlift:{{{self.pool}}}:{name}"


def bounded_tokens(num_tokens: int) -> int:
    """What a request counts as, whatever is said of it."""
    return max(0, min(MAX_TOKENS, num_tokens))


def holder_of(tenant: str, request_class: RequestClass) -> str:
    """Who holds an account: a tenant in a class. Also the field of its limits."""
    return f"{tenant}/{request_class.value}"


def default_holder(request_class: RequestClass) -> str:
    return holder_of(DEFAULT_TENANT, request_class)


def shard_of(digest: str) -> int:
    """Which part a key belongs to for ever, by its SHA-256 in hex."""
    return int(digest[:4], 16) % NUM_SHARDS


def shard_mark(number: int) -> str:
    return f"{number}/{NUM_SHARDS}"


def shard_name(tenants: str, number: int) -> str:
    """The ConfigMap of one part; tenants: the name of the one that says that there are parts."""
    return f"{tenants}-{number}"


def _whole(body: Mapping[str, Any], name: str, minimum: int, maximum: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise LimitsError(f"{name}: must be a whole number from {minimum} to {maximum}")
    return value
