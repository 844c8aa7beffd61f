"""A gateway's quotas without a gateway: requests that are played, and a journal of what they used.

Started by `bench_quota`, which may kill it at any moment; it ends by itself when its share is done.
Its script reads a clock that the benchmark sets.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path
from typing import Final

from chairlift_gateway.quota.connection import RedisAddress
from chairlift_gateway.quota.keeper import (
    Grant,
    Keeper,
    OnRedisFailure,
    QuotaExceeded,
)
from chairlift_gateway.quota.law import Status
from chairlift_gateway.quota.leases import LEASE_MS
from chairlift_gateway.quota.script import SCRIPT
from chairlift_gateway.quota.upkeep import open_keeper
from chairlift_protocol.quota import QuotaKeys, default_holder, holder_of
from chairlift_protocol.wire import RequestClass

POOL: Final = "bench/quota"
CHAT: Final = RequestClass.INTERACTIVE
NUM_TENANTS: Final = 40
NUM_AT_ONCE: Final = 50
CLOCK: Final = QuotaKeys(POOL).limits.replace("limits", "clock_step_s")
LONG_SHARE: Final = 0.003  # of requests outlive several renewals
DUPLICATE_SHARE: Final = 0.05

_READ_CLOCK: Final = "local time = redis.call('TIME')"
_SET_CLOCK: Final = f"{_READ_CLOCK}\ntime[1] = time[1] + (redis.call('GET', '{CLOCK}') or 0)"
CLOCKED_SCRIPT: Final = SCRIPT.replace(_READ_CLOCK, _SET_CLOCK)


class Journal:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, *words: object) -> None:
        """Survives this process as soon as it returns."""
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


class Player:
    def __init__(self, keeper: Keeper, journal: Journal, name: str, num_requests: int) -> None:
        self._keeper = keeper
        self._journal = journal
        self._name = name
        self._left = iter(range(num_requests))
        self._random = random.Random(name)

    async def play(self) -> None:
        for number in self._left:
            await self._request(f"{self._name}-{number}")

    async def _request(self, name: str) -> None:
        tenant = f"t{self._random.randrange(NUM_TENANTS)}"
        cost = self._random.randrange(20, 400)
        self._journal("ask", name, holder_of(tenant, CHAT), cost)
        try:
            grant = await self._keeper.reserve(tenant, CHAT, name, cost)
        except QuotaExceeded:
            await asyncio.sleep(0.001)
            return
        where = "local" if grant.lease.num_unanswered else "in_redis"
        self._journal("grant", name, grant.lease.charge, where)
        self._maybe_again(grant, "reserve", grant.lease.charge, LEASE_MS)
        used = await self._run(grant)
        self._journal("settle", name, used)
        self._keeper.settle(grant.lease, used)
        self._maybe_again(grant, "settle", used, 0)

    async def _run(self, grant: Grant) -> int:
        """Some use more than was reserved; some engines die before they have used anything."""
        total = int(grant.lease.charge * self._random.choice((0.0, 0.5, 1.0, 1.0, 2.5)))
        is_long = self._random.random() < LONG_SHARE
        num_parts = self._random.randrange(60, 160) if is_long else 1
        for part in range(1, num_parts + 1):
            await asyncio.sleep(0.1 if is_long else self._random.random() * 0.15)
            seen = total * part // num_parts
            self._journal("seen", grant.lease.request_id, seen)
            grant.lease.num_used = seen
        return total

    def _maybe_again(self, grant: Grant, operation: str, *numbers: int) -> None:
        """The same command twice, as a client that retries would send it."""
        lease = grant.lease
        if grant.outcome.status is Status.ADMITTED and not lease.num_unanswered:
            if self._random.random() < DUPLICATE_SHARE:
                self._keeper.store.submit(
                    lease.holder, default_holder(CHAT), operation, lease.request_id, *numbers
                )


async def work(port: int, path: Path, name: str, num_requests: int) -> None:
    address = RedisAddress(f"redis://127.0.0.1:{port}/0")
    async with open_keeper(address, POOL, OnRedisFailure.LOCAL, CLOCKED_SCRIPT) as keeper:
        player = Player(keeper, Journal(path), name, num_requests)
        await asyncio.gather(*(player.play() for _ in range(NUM_AT_ONCE)))
        while keeper.leases.num_owed:
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(work(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
