"""A node without a machine: binds pods, says that they run, ends them when they are deleted.

With it a control plane alone carries Deployments; engines and gateways are `fake_engine`'s, on
loopback addresses. Runs in a thread of its own, beside tests that wait.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import aiohttp

from chairlift_e2e.fake_engine import FakeEngine, FakeGateway, FakePod, address
from chairlift_operator.kube.access import read_access
from chairlift_operator.kube.api import Api, ApiError
from chairlift_operator.kube.paths import POD
from chairlift_operator.kube.status import timestamp
from chairlift_operator.kube.watching import Reflector, Store

Json = dict[str, Any]
T = TypeVar("T")
NODE: Final = "fake"
MANAGER: Final = "fake-kubelet"
LOOK_S: Final = 0.2  # between two rounds
NUM_AT_A_TIME: Final = 20
BAD_IMAGE: Final = "does-not-start"
LONG_AGO_S: Final = 3600.0


class FakeNode:
    """refuses: pods (by name) that no node takes. holds: pods that start and are never ready.

    look_s: how long one round of looks at all pods may take. expositions: what engines and
    gateways show as metrics, instead of what they count.
    """

    def __init__(
        self,
        look_s: float = 0.0,
        expositions: tuple[str, str] | None = None,
    ) -> None:
        self._look_s = look_s
        self._expositions = expositions or (None, None)
        self._store = Store()
        self.refuses: Callable[[str], bool] = lambda name: False
        self.holds: Callable[[str], bool] = lambda name: False
        self.pods: dict[str, FakePod] = {}  # by uid
        self.names: dict[str, str] = {}
        self._num_addresses = 1
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="node", daemon=True)
        self._running: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._running = self._on_loop(self._begin())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._on_loop(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def engine(self, name: str) -> FakeEngine:
        """Of the pod of this name."""
        uid = next(uid for uid, known in self.names.items() if known == name)
        pod = self.pods[uid]
        assert isinstance(pod, FakeEngine)
        return pod

    def engines(self) -> dict[str, FakeEngine]:
        """Of all pods that run, by name."""
        return {
            self.names[uid]: pod
            for uid, pod in dict(self.pods).items()
            if isinstance(pod, FakeEngine)
        }

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    async def _begin(self) -> asyncio.Task[None]:
        self._session = aiohttp.ClientSession()
        return asyncio.create_task(self._run())

    async def _end(self) -> None:
        """The session first: it waits for its connections, and a cancelled watch would leave its
        own half closed behind."""
        assert self._running is not None and self._session is not None
        await self._session.close()
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        for pod in self.pods.values():
            await pod.stop()

    async def _run(self) -> None:
        assert self._session is not None
        api = Api(self._session, read_access)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Reflector(api, POD, self._store).run())
            while True:
                with suppress(ApiError):  # the server is away: looked at again
                    await self._look_at_all(api)
                await asyncio.sleep(LOOK_S)

    async def _look_at_all(self, api: Api) -> None:
        """Some at a time, all over look_s: pods answer meanwhile."""
        pods = self._store.all()
        for start in range(0, len(pods), NUM_AT_A_TIME):
            some = pods[start : start + NUM_AT_A_TIME]
            await asyncio.gather(*(self._look(api, pod) for pod in some))
            await asyncio.sleep(self._look_s * len(some) / len(pods))

    async def _look(self, api: Api, pod: Json) -> None:
        try:
            await self._tend(api, pod)
        except ApiError as error:
            if not error.is_missing and not error.is_conflict:
                raise

    async def _tend(self, api: Api, pod: Json) -> None:
        metadata = pod["metadata"]
        name, uid = metadata["name"], metadata["uid"]
        path = POD.path(metadata["namespace"], name)
        fake = self.pods.get(uid)
        if metadata.get("deletionTimestamp"):
            await self._finish(api, path, uid, fake)
        elif self.refuses(name):
            await self._set_status(api, path, pod, _unschedulable())
        elif not pod["spec"].get("nodeName"):
            target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
            body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
            await api.create(f"{path}/binding", {**body, "target": target}, MANAGER)
        elif pod["spec"]["containers"][0]["image"].startswith(BAD_IMAGE):
            await self._set_status(api, path, pod, _crashed())
        else:
            fake = fake or await self._start(pod)
            is_ready = not self.holds(name) and not getattr(fake, "is_draining", False)
            await self._set_status(api, path, pod, _running(fake.ip, is_ready))

    async def _start(self, pod: Json) -> FakePod:
        metadata = pod["metadata"]
        self._num_addresses += 1
        ip = address(self._num_addresses)
        is_engine = metadata["labels"]["chairlift.dev/role"] == "engine"
        engine, gateway = self._expositions
        fake = FakeEngine(ip, engine) if is_engine else FakeGateway(ip, gateway)
        await fake.start()
        self.pods[metadata["uid"]], self.names[metadata["uid"]] = fake, metadata["name"]
        return fake

    async def _finish(self, api: Api, path: str, uid: str, fake: FakePod | None) -> None:
        """As SIGTERM does: requests in flight first."""
        if isinstance(fake, FakeEngine) and fake.num_in_flight:
            return
        if fake is not None:
            await fake.stop()
            del self.pods[uid]
        await api.delete(path, uid, grace_s=0)

    async def _set_status(self, api: Api, path: str, pod: Json, status: Json) -> None:
        before = pod.get("status", {})
        known = {c["type"]: c for c in before.get("conditions", ())}
        for condition in status["conditions"]:
            same = known.get(condition["type"], {}).get("status") == condition["status"]
            since = known[condition["type"]]["lastTransitionTime"] if same else None
            condition.setdefault("lastTransitionTime", since or timestamp(time.time()))
        told = {key: before.get(key) for key in status}
        if _steady(told) != _steady(status):
            self._store.put(await api.patch(f"{path}/status", {"status": status}, MANAGER))


def _running(ip: str, is_ready: bool) -> Json:
    return {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": str(is_ready)},
        ],
    }


def _unschedulable() -> Json:
    """Since so long ago that nobody waits any more."""
    return {
        "phase": "Pending",
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
                "lastTransitionTime": timestamp(time.time() - LONG_AGO_S),
            }
        ],
    }


def _crashed() -> Json:
    ended = {"exitCode": 2, "message": "model.source: no such file"}
    return {
        "phase": "Running",
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "False"},
        ],
        "containerStatuses": [
            {
                "name": "engine",
                "image": BAD_IMAGE,
                "imageID": "",
                "ready": False,
                "restartCount": 4,
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {"terminated": ended},
            }
        ],
    }


def _steady(status: Json) -> Json:
    """Without what the server fills in and the times that only say when we looked."""
    conditions = [
        {k: v for k, v in c.items() if k in ("type", "status")}
        for c in status["conditions"] or ()
        if c["type"] in ("PodScheduled", "Ready")
    ]
    kept = {k: v for k, v in status.items() if k not in ("conditions", "containerStatuses")}
    return {**kept, "conditions": sorted(conditions, key=lambda c: str(c["type"]))}
