"""A node without a machine: binds pods, says that they run, ends them when they are deleted.

With it a control plane alone carries Deployments; engines and gateways are `fake_engine`'s, on
loopback addresses. Runs in a thread of its own, beside tests that wait.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import aiohttp

from chairlift_e2e.fake_engine import FakeEngine, FakeGateway, FakePod, address
from chairlift_operator.kube.access import read_access
from chairlift_operator.kube.api import Api, ApiError
from chairlift_operator.kube.paths import POD
from chairlift_operator.kube.status import timestamp
from chairlift_operator.kube.watching import SELECTOR

Json = dict[str, Any]
T = TypeVar("T")
NODE: Final = "fake"
MANAGER: Final = "fake-kubelet"
LOOK_S: Final = 0.2
BAD_IMAGE: Final = "does-not-start"
LONG_AGO_S: Final = 3600.0


class FakeNode:
    """refuses: pods (by name) that no node takes. holds: pods that start and are never ready."""

    def __init__(self) -> None:
        self.refuses: Callable[[str], bool] = lambda name: False
        self.holds: Callable[[str], bool] = lambda name: False
        self.pods: dict[str, FakePod] = {}  # by uid
        self.names: dict[str, str] = {}
        self._num_addresses = 1
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="node", daemon=True)
        self._running: Any = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._running = asyncio.run_coroutine_threadsafe(self._run(), self._loop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._running.cancel()
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

    async def _end(self) -> None:
        for pod in self.pods.values():
            await pod.stop()

    async def _run(self) -> None:
        async with aiohttp.ClientSession() as session:
            api = Api(session, read_access)
            while True:
                try:
                    listed = await api.list(POD.path(), SELECTOR)
                    await asyncio.gather(*(self._look(api, pod) for pod in listed.items))
                except ApiError:
                    pass  # the server is away, or the pod is: looked at again
                await asyncio.sleep(LOOK_S)

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
        fake = FakeEngine(ip) if is_engine else FakeGateway(ip)
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
            await api.patch(f"{path}/status", {"status": status}, MANAGER)


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
