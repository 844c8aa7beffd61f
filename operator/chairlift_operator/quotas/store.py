"""Redis as the operator needs it: a pool's limits kept there, and what its tenants used read back.

docs/protocol.md says what each key holds. Every failure is a `StoreError` with one sentence. A
store knows what it wrote, and looks for it each time: a Redis that lost its data has it again by
the next round.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import redis.exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig

from chairlift_operator.quotas.ledger import Counts
from chairlift_operator.quotas.rates import TOLD_S
from chairlift_protocol.quota import REVISION_FIELD, QuotaKeys

TIMEOUT_S: Final = 2.0  # of one answer, and of a connection
CALL_S: Final = 4.0  # of all that a pool's turn asks
# One Redis serves many pools: while it is away, not each of them waits to learn it.
PAUSE_S: Final = 2.0
# Longer than two rounds, so that one that is late does not end it.
IDLE_MS: Final = 15_000
RATE_MS: Final = round(TOLD_S * 1000)
COMPARE_EVERY_S: Final = 60.0
NUM_CONNECTIONS: Final = 8
# What an ACL user of the operator may do, on the pools' keys alone.
NEEDED_RIGHTS: Final = (
    "+hget", "+hmget", "+hset", "+hdel", "+hlen", "+hgetall", "+set", "+del", "+zcard",
    "+multi", "+exec", "+hello", "+auth",
)  # fmt: skip
_COUNTS: Final = ("used", "refused", "reserved")


class StoreError(RuntimeError):
    """The message says what Redis, or the way to it, lacks."""


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """ca: PEM of who signed the server's certificate; None for the system's authorities.
    password_source: where its user would mend a wrong password."""

    url: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca: str | None = field(default=None, repr=False)
    password_source: str = "passwordSecret"


class QuotaStore(Protocol):
    async def sync(
        self, pool: str, limits: Mapping[str, str], holders: Sequence[str], *, is_idle: bool,
        rates: Mapping[str, int],
    ) -> Mapping[str, Counts]:  # fmt: skip
        """Have the pool's limits be these, and say what the holders used. Raise StoreError.

        pool: namespace/name. is_idle: whether those that may borrow are refused no tokens for a
        while. rates: by holder, tokens a minute of those that may use fewer for a while.
        """
        ...

    async def forget(self, pool: str) -> None:
        """Remove a pool's limits. Raise StoreError."""
        ...

    async def close(self) -> None: ...


class RedisStore:
    """One Redis, for all pools that name it."""

    def __init__(self, access: RedisAccess) -> None:
        self._client = _open_client(access)
        self._password_source = access.password_source
        self._written: dict[str, tuple[str, Mapping[str, str], float]] = {}
        self._failed: tuple[float, str] | None = None

    async def sync(
        self, pool: str, limits: Mapping[str, str], holders: Sequence[str], *, is_idle: bool,
        rates: Mapping[str, int],
    ) -> Mapping[str, Counts]:  # fmt: skip
        self._check_pause()
        try:
            async with asyncio.timeout(CALL_S):
                await self._keep(pool, limits)
                counts = await self._tell(QuotaKeys(pool), holders, rates, is_idle=is_idle)
        except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
            raise self._noted(error) from error
        self._failed = None
        return counts

    async def forget(self, pool: str) -> None:
        self._check_pause()
        keys = QuotaKeys(pool)
        try:
            async with asyncio.timeout(CALL_S):
                await self._client.delete(keys.limits, keys.idle)
        except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
            raise self._noted(error) from error
        self._written.pop(pool, None)

    async def close(self) -> None:
        await self._client.aclose()

    async def _keep(self, pool: str, limits: Mapping[str, str]) -> None:
        """Compared by the revision that was written; now and then field by field, since others may
        have written without a new one."""
        keys, now_s = QuotaKeys(pool), time.monotonic()
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hget(keys.limits, REVISION_FIELD)
        pipeline.hlen(keys.limits)
        revision, num_fields = await pipeline.execute()
        known, written, compared_s = self._written.get(pool, (None, None, 0.0))
        is_as_written = (known, written, len(limits) + 1) == (revision, limits, num_fields)
        if is_as_written and now_s - compared_s < COMPARE_EVERY_S:
            return
        held: dict[Any, Any] = await self._client.hgetall(keys.limits)
        held.pop(REVISION_FIELD, None)
        if held != limits or revision is None:
            revision = await self._write(keys, held, limits, revision)
        self._written[pool] = (revision, dict(limits), now_s)

    async def _write(
        self,
        keys: QuotaKeys,
        held: Mapping[str, str],
        limits: Mapping[str, str],
        revision: str | None,
    ) -> str:
        """All at once: gateways never see half of a change."""
        pipeline = self._client.pipeline(transaction=True)
        fresh = {name: text for name, text in limits.items() if held.get(name) != text}
        # By the clock, so that it does not come back to an earlier number when data was lost.
        number = max(int(time.time() * 1000), _number(revision) + 1)
        fields: dict[Any, Any] = {**fresh, REVISION_FIELD: str(number)}
        pipeline.hset(keys.limits, mapping=fields)
        if gone := sorted(held.keys() - limits.keys()):
            pipeline.hdel(keys.limits, *gone)
        await pipeline.execute()
        return str(number)

    async def _tell(
        self, keys: QuotaKeys, holders: Sequence[str], rates: Mapping[str, int], *, is_idle: bool
    ) -> dict[str, Counts]:
        """And read what the holders used. A rate that is told no more ends by itself."""
        pipeline = self._client.pipeline(transaction=False)
        if is_idle:
            pipeline.set(keys.idle, "1", px=IDLE_MS)
        else:
            pipeline.delete(keys.idle)
        for holder, rate in rates.items():
            pipeline.set(keys.rate(holder), rate, px=RATE_MS)
        for holder in holders:
            pipeline.hmget(keys.account(holder), _COUNTS)
            pipeline.zcard(keys.leases(holder))
        answers = (await pipeline.execute())[1 + len(rates) :]
        pairs = zip(answers[::2], answers[1::2], strict=True)
        return {
            holder: _counts(used, refused, reserved, int(num_running))
            for holder, ((used, refused, reserved), num_running) in zip(holders, pairs, strict=True)
        }

    def _check_pause(self) -> None:
        if self._failed is not None and time.monotonic() - self._failed[0] < PAUSE_S:
            raise StoreError(self._failed[1])

    def _noted(self, error: Exception) -> StoreError:
        told = _sentence(error, self._password_source)
        self._failed = (time.monotonic(), told)
        return StoreError(told)


def _counts(
    used: str | None, refused: str | None, reserved: str | None, num_running: int
) -> Counts:
    """A gateway of an earlier release keeps leases, and does not count what they hold."""
    is_counted = reserved is not None or not num_running
    num_reserved = _number(reserved) if is_counted else None
    return Counts(_number(used), _number(refused), num_running, num_reserved)


def _number(text: str | None) -> int:
    """A count that is not there is none yet."""
    return int(text) if text is not None and text.isdigit() else 0


def _sentence(error: Exception, password_source: str) -> str:
    if isinstance(error, redis.exceptions.AuthenticationError):
        return f"Redis does not know us ({error}): check quotas.redis.user and {password_source}"
    if isinstance(error, redis.exceptions.NoPermissionError):
        return f"Redis lets us not do it ({error}): give the user the rights in docs/protocol.md"
    if isinstance(error, TimeoutError | redis.exceptions.TimeoutError):
        return "Redis did not answer in time"
    if isinstance(error, redis.exceptions.ConnectionError | OSError):
        return f"Redis cannot be reached: {error}"
    return f"Redis refused: {error}"


def _open_client(access: RedisAccess) -> Redis:
    settings: dict[str, Any] = {
        "socket_timeout": TIMEOUT_S,
        "socket_connect_timeout": TIMEOUT_S,
        # The next round is the next try.
        "retry": Retry(NoBackoff(), 0),
        "decode_responses": True,
        "encoding_errors": "surrogateescape",  # what is no text can be removed all the same
        "max_connections": NUM_CONNECTIONS,
        "timeout": TIMEOUT_S,  # of waiting for one of them
        "driver_info": None,
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        "username": access.user,
        "password": access.password,
    }
    if access.ca is not None:
        settings["ssl_ca_data"] = access.ca
    return Redis.from_pool(BlockingConnectionPool.from_url(access.url, **settings))
