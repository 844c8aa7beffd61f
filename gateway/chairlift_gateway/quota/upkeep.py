"""What keeps quotas right beside the requests: renewals, debts to Redis, ended leases, and limits.

Each gateway does all of it: a lease that a killed gateway left is swept by any other. While Redis
is away it probes; once it is back, what runs is entered there again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

from redis.asyncio import Redis

from chairlift_gateway.quota.connection import (
    CONNECT_TIMEOUT_S,
    TIMEOUT_S,
    RedisAddress,
    open_client,
)
from chairlift_gateway.quota.keeper import Keeper, OnRedisFailure
from chairlift_gateway.quota.leases import LEASE_MS, Lease
from chairlift_gateway.quota.local_law import UNLEARNT
from chairlift_gateway.quota.script import SCRIPT
from chairlift_gateway.quota.store import REDIS_ERRORS, RedisFailure, Store, said
from chairlift_protocol.quota import (
    REVISION_FIELD,
    Limits,
    LimitsError,
    QuotaKeys,
    default_holder,
)
from chairlift_protocol.wire import RequestClass

ROUND_S: Final = 2.0
SWEPT_A_ROUND: Final = 200
# A gateway not heard of for so long has no share any more.
GATEWAY_MS: Final = 10_000
LIMITS_A_PAGE: Final = 500
LAST_WORDS_S: Final = 1.0

logger = logging.getLogger("chairlift_gateway.quota")


class Upkeep:
    def __init__(self, keeper: Keeper, client: Redis, keys: QuotaKeys) -> None:
        self._keeper = keeper
        self._client = client
        self._keys = keys
        self._name = secrets.token_hex(8)
        self._revision: bytes | None = None
        self._is_held = False  # whether Redis had limits for everybody when they were loaded
        self._said: str | None = None

    async def probe(self) -> bool:
        """Whether Redis carries out the script, and holds this pool's limits; why not is said."""
        holder = default_holder(RequestClass.INTERACTIVE)
        call = self._keeper.store.submit(holder, holder, "sweep")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S + TIMEOUT_S):
                await call.future
            self._revision = None
            await self._learn()
            if not self._is_held:
                self._keeper.stays_without(f"it does not hold the limits of {self._keys.pool}")
                return False
        except RedisFailure as error:
            self._keeper.stays_without(str(error))
            return False
        except REDIS_ERRORS as error:
            self._keeper.stays_without(said(error))
            return False
        except Exception as error:
            self._note(error)
            return False
        self._keeper.breaker.close()
        logger.info("quotas are kept in Redis")
        self._renew(all_of_them=True)
        return True

    async def run(self) -> None:
        """Until cancelled."""
        breaker = self._keeper.breaker
        while True:
            if breaker.is_open:
                await asyncio.sleep(breaker.next_pause_s())
                await self.probe()
                continue
            await self._round()
            with suppress(TimeoutError):
                async with asyncio.timeout(ROUND_S):
                    await self._keeper.opened()

    async def end(self) -> None:
        """Give up the share, and settle what can still be settled."""
        self._pay()
        with suppress(*REDIS_ERRORS):
            await self._client.zrem(self._keys.gateways, self._name)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._keeper.store.emptied()
        self._keeper.store.close()

    async def _round(self) -> None:
        try:
            self._pay()
            self._renew()
            for holder in await self._learn():
                fallback = "*/" + holder.rpartition("/")[2]
                self._keeper.store.submit(holder, fallback, "sweep")
        except REDIS_ERRORS as error:
            self._keeper.failed(said(error))
        except Exception as error:
            self._note(error)
        else:
            self._said = None

    def _note(self, error: Exception) -> None:
        """Once, however often: what one round could not do, the next may."""
        why = said(error)
        if why != self._said:
            logger.error("a round of quotas failed and is tried again: %s", why, exc_info=error)
        self._said = why

    async def _learn(self) -> list[str]:
        """How many gateways there are, limits that changed, and whose leases are to be swept."""
        seconds, microseconds = await self._client.time()
        now_ms = seconds * 1000 + microseconds // 1000
        keys, pipeline = self._keys, self._client.pipeline(transaction=False)
        pipeline.zadd(keys.gateways, {self._name: now_ms})
        pipeline.pexpire(keys.gateways, 6 * GATEWAY_MS)
        pipeline.zremrangebyscore(keys.gateways, "-inf", now_ms - GATEWAY_MS)
        pipeline.zcard(keys.gateways)
        pipeline.hget(keys.limits, REVISION_FIELD)
        pipeline.zrangebyscore(keys.leasing, "-inf", now_ms, start=0, num=SWEPT_A_ROUND)
        *_, num_gateways, revision, due = await pipeline.execute()
        self._keeper.num_gateways = max(1, num_gateways)
        if revision is None or revision != self._revision:
            await self._load_limits()
            self._revision = revision
        return [holder for name in due if (holder := _text(name)) is not None]

    async def _load_limits(self) -> None:
        """What cannot be read leaves its holder with the last limits known of it."""
        limits: dict[str, Limits] = {}
        unread: set[str] = set()
        parsed: dict[bytes, Limits] = {}  # many tenants have the same ones
        pages = self._client.hscan_iter(self._keys.limits, count=LIMITS_A_PAGE)
        async for name, text in pages:
            holder = _text(name)
            if holder is None or holder == REVISION_FIELD:
                continue
            try:
                if text not in parsed:
                    parsed[text] = Limits.from_json(text)
                limits[holder] = parsed[text]
            except LimitsError as error:
                limits[holder] = self._keeper.limits.get(holder, UNLEARNT)
                unread.add(holder)
                if holder not in self._keeper.unread:
                    logger.warning("the limits of %s in Redis cannot be read: %s", holder, error)
        # Redis may have lost them; then the last ones known are the best there are.
        self._is_held = default_holder(RequestClass.INTERACTIVE) in limits
        if self._is_held:
            self._keeper.limits, self._keeper.unread = limits, unread

    def _renew(self, *, all_of_them: bool = False) -> None:
        now_s = time.monotonic()
        for leases in self._keeper.leases.due(now_s, all_of_them=all_of_them):
            arguments: list[Any] = [LEASE_MS]
            for lease in leases:
                lease.renewed_at_s = now_s
                lease.num_unanswered += 1
                arguments += (lease.request_id, lease.charge, lease.num_used)
            first = leases[0]
            call = self._keeper.store.submit(first.holder, first.fallback, "renew", *arguments)
            call.future.add_done_callback(partial(_renewed, leases))

    def _pay(self) -> None:
        for settlement in self._keeper.leases.pay(time.monotonic()):
            self._keeper.hand_over(settlement)


def _text(name: bytes) -> str | None:
    """None for what no gateway and no operator has written."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return None


def _renewed(leases: list[Lease], future: asyncio.Future[Any]) -> None:
    if not future.cancelled() and future.exception() is None:
        for lease in leases:
            lease.num_unanswered -= 1


@asynccontextmanager
async def open_keeper(
    address: RedisAddress, pool: str, mode: OnRedisFailure, script: str = SCRIPT
) -> AsyncIterator[Keeper]:
    """A keeper that is kept up; Redis need not be there."""
    keeper, client, keys = Keeper(mode), open_client(address), QuotaKeys(pool)
    store = Store(client, keys, keeper.failed, keeper.breaker.succeeded, script)
    keeper.use(store)
    upkeep = Upkeep(keeper, client, keys)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(store.work())
            await upkeep.probe()
            upkeeping = tasks.create_task(upkeep.run())
            try:
                yield keeper
            finally:
                upkeeping.cancel()
                await upkeep.end()
    finally:
        await client.aclose()
