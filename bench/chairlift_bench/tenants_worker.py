"""What `bench_tenants` measures, a process each: the operator's part that looks after tenants, or
the gateway's part that knows their keys and limits.

The gateway does what lines on its standard input ask, and answers each with a line.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
from typing import Any, Final, cast

import aiohttp

from chairlift_bench.tenants_api import NAMESPACE, POOL, tenant
from chairlift_gateway.identity import Identification
from chairlift_gateway.kubernetes_tenants import KubernetesTenants
from chairlift_gateway.kubernetes_watch import ApiAccess
from chairlift_gateway.openai_errors import Refusal
from chairlift_gateway.quota.connection import RedisAddress
from chairlift_gateway.quota.keeper import Keeper, OnRedisFailure, QuotaExceeded
from chairlift_gateway.quota.upkeep import open_keeper
from chairlift_operator.kube.access import Access
from chairlift_operator.kube.api import Api
from chairlift_operator.kube.objects import Stores
from chairlift_operator.kube.paths import CHILD_KINDS, CONFIG_MAP
from chairlift_operator.kube.settings import Settings
from chairlift_operator.kube.tenancy_start import start_tenancy
from chairlift_operator.kube.watching import Reflector, Store
from chairlift_protocol.wire import RequestClass

CHAT: Final = RequestClass.INTERACTIVE
POLL_S: Final = 0.01
NUM_AT_ONCE: Final = 32


class Lease:
    """Of a process that leads for as long as it lives."""

    term = 1

    def is_held(self) -> bool:
        return True


async def operate(server: str, redis_url: str) -> None:
    environment = {
        "POD_NAME": "bench", "POD_NAMESPACE": "system", "CHAIRLIFT_NAMESPACES": NAMESPACE,
    }  # fmt: skip
    settings = Settings.from_environment(environment)
    access = Access(server, ssl.create_default_context(), None)
    model = {"name": "tiny", "source": "cache://tiny"}
    pool = {
        "metadata": {"name": POOL, "namespace": NAMESPACE, "uid": "u"},
        "spec": {"model": model, "quotas": {"redis": {"url": redis_url}}},
    }
    stores = Stores(Store(), {kind.name: Store() for kind in CHILD_KINDS})
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        api = Api(session, lambda: access)
        maps = Reflector(api, CONFIG_MAP, stores.children[CONFIG_MAP.name], NAMESPACE)
        tasks.create_task(maps.run())
        start_tenancy(
            api, cast(Any, Lease()), stores, settings, {(NAMESPACE, POOL): pool},
            time.time, lambda key: None, tasks,
        )  # fmt: skip


class Gateway:
    def __init__(self, who: Identification, keeper: Keeper) -> None:
        self._who, self._keeper = who, keeper
        self._num_asked = 0

    async def until(self, key: str, name: str, concurrency: int) -> float:
        """When the key is the tenant's and its next request has these limits, as wall time."""
        while not (self._knows(key, name) and await self._limit(name) == concurrency):
            await asyncio.sleep(POLL_S)
        return time.time()

    async def play(self, num: int) -> int:
        """A request of each tenant; how many."""
        names = iter([tenant(number) for number in range(num)])

        async def client() -> None:
            for name in names:
                await self._limit(name)

        await asyncio.gather(*(client() for _ in range(NUM_AT_ONCE)))
        return num

    def _knows(self, key: str, name: str) -> bool:
        try:
            headers = [(b"authorization", f"Bearer {key}".encode())]
            return self._who.caller(headers, is_batch_path=False).tenant == name
        except Refusal:
            return False

    async def _limit(self, name: str) -> int | None:
        self._num_asked += 1
        try:
            grant = await self._keeper.reserve(name, CHAT, f"r{self._num_asked}", 10)
        except QuotaExceeded as error:
            return error.limits.concurrency
        self._keeper.settle(grant.lease, 10)
        return grant.limits.concurrency


async def serve(server: str, redis_url: str) -> None:
    access = ApiAccess(server, ssl.create_default_context(), lambda: None)
    tenants = KubernetesTenants(access, NAMESPACE, f"{POOL}-tenants")
    pool, mode = f"{NAMESPACE}/{POOL}", OnRedisFailure.LOCAL
    watching = asyncio.create_task(tenants.watch())
    loop = asyncio.get_running_loop()
    try:
        async with open_keeper(RedisAddress(redis_url), pool, mode) as keeper:
            gateway = Gateway(Identification(tenants, serves_anonymous=False), keeper)
            while line := await loop.run_in_executor(None, sys.stdin.readline):
                asked = json.loads(line)
                answer = await getattr(gateway, asked["do"])(*asked["with"])
                print(json.dumps(answer), flush=True)
    finally:
        watching.cancel()


if __name__ == "__main__":
    asyncio.run({"operator": operate, "gateway": serve}[sys.argv[1]](sys.argv[2], sys.argv[3]))
