"""The parts put together: TenantQuotas from a watch, to a Redis that nobody listens at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from chairlift_e2e.fake_kube import FakeKube
from chairlift_operator.decisions import Truth
from chairlift_operator.kube.api import ApiError, Listed, WatchEvent
from chairlift_operator.kube.paths import QUOTA
from chairlift_operator.kube.settings import Settings
from chairlift_operator.kube.tenancy_start import start_tenancy
from chairlift_operator.kube.watching import PoolKey

Json = dict[str, Any]
KEY = ("team", "chat")
POOL: Json = {
    "metadata": {"name": "chat", "namespace": "team", "uid": "u"},
    "spec": {
        "model": {"name": "tiny", "source": "cache://tiny"},
        "quotas": {"redis": {"url": "redis://127.0.0.1:1/0"}},
    },
}


def _quota(name: str, pool: str = "chat", version: int = 1) -> Json:
    metadata = {"name": name, "namespace": "team", "uid": name, "resourceVersion": str(version)}
    spec = {"poolRef": {"name": pool}, "tenant": name}
    return {"metadata": metadata, "spec": spec, "kind": "TenantQuota"}


class WatchedKube(FakeKube):
    """Lists quotas, then tells of those put into the queue. is_known: whether there is the CRD."""

    def __init__(self, *quotas: Json) -> None:
        super().__init__()
        self.events: asyncio.Queue[WatchEvent] = asyncio.Queue()
        self.is_known = True
        self.asked: list[tuple[str, str]] = []
        for quota in quotas:
            self.add(quota)

    def add(self, quota: Json) -> None:
        self.objects[QUOTA.path("team", quota["metadata"]["name"])] = quota

    async def list(self, path: str, selector: str = "") -> Listed:
        self.asked.append((path, selector))
        if not self.is_known:
            raise ApiError(404, "the server could not find the requested resource")
        found = [item for item in self.objects.values() if item["kind"] == "TenantQuota"]
        return Listed([dict(item) for item in found], "5")

    async def watch(self, path: str, selector: str, version: str) -> AsyncIterator[WatchEvent]:
        while True:
            yield await self.events.get()


class Lease:
    term = 3

    def is_held(self) -> bool:
        return True


class Started:
    def __init__(self, kube: WatchedKube, settings: Settings, tasks: asyncio.TaskGroup) -> None:
        self.kube = kube
        self.woken: list[PoolKey] = []
        self.tenancy = start_tenancy(
            cast(Any, kube), cast(Any, Lease()), kube.stores, settings, {KEY: POOL},
            lambda: 1_800_000_000.0, self.woken.append, tasks,
        )  # fmt: skip

    async def until(self, probe: Callable[[], Any]) -> None:
        async with asyncio.timeout(10):
            while not probe():
                await asyncio.sleep(0.01)

    def reason(self, name: str, kind: str) -> str | None:
        status = self.kube.objects[QUOTA.path("team", name)].get("status", {})
        found = {c["type"]: c["reason"] for c in status.get("conditions", ())}
        return found.get(kind)


Body = Callable[[Started], Any]


@pytest.fixture
def run_started(settings: Settings) -> Callable[[WatchedKube, Body], None]:
    async def main(kube: WatchedKube, body: Body) -> None:
        async with asyncio.TaskGroup() as tasks:
            before = set(asyncio.all_tasks())
            await body(Started(kube, settings, tasks))
            for task in asyncio.all_tasks() - before:
                task.cancel()

    return lambda kube, body: asyncio.run(main(kube, body))


def test_a_redis_that_nobody_listens_at_is_said_of_pool_and_quota(run_started: Any) -> None:
    async def body(started: Started) -> None:
        await started.until(lambda: started.reason("acme", "RedisReachable") == "RedisUnreachable")
        await started.until(lambda: started.woken == [KEY])
        condition = started.tenancy.condition(KEY)
        assert condition is not None and "cannot be reached" in condition.message
        assert started.kube.asked == [("/apis/chairlift.dev/v1alpha1/tenantquotas", "")]

    run_started(WatchedKube(_quota("acme")), body)


def test_a_quota_of_a_pool_that_is_not_there_is_told_so_as_it_comes(run_started: Any) -> None:
    async def body(started: Started) -> None:
        await started.until(lambda: started.kube.asked)
        lost = _quota("lost", pool="other", version=9)
        started.kube.add(lost)
        started.kube.events.put_nowait(WatchEvent("ADDED", dict(lost)))
        await started.until(lambda: started.reason("lost", "Accepted") == "PoolNotFound")

    run_started(WatchedKube(), body)


def test_a_quota_that_no_schema_looked_at_is_refused_and_stops_nobody(run_started: Any) -> None:
    async def body(started: Started) -> None:
        await started.until(lambda: started.reason("odd", "Accepted") == "Refused")
        await started.until(lambda: started.reason("acme", "RedisReachable") == "RedisUnreachable")

    run_started(WatchedKube({**_quota("odd"), "spec": {"poolRef": []}}, _quota("acme")), body)


def test_without_the_crd_nothing_is_concluded(run_started: Any) -> None:
    async def body(started: Started) -> None:
        started.kube.is_known = False
        await started.until(lambda: started.kube.asked)
        told = started.tenancy.condition(KEY)
        assert told is not None and (told.status, told.reason) == (Truth.UNKNOWN, "NotListed")
        assert started.tenancy.condition(("team", "other")) is None
        assert started.kube.writes == []
        started.kube.is_known = True
        await started.until(lambda: started.tenancy.condition(KEY) != told)

    kube = WatchedKube()
    kube.is_known = False
    run_started(kube, body)
