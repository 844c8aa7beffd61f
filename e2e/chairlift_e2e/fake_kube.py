"""A cluster in a dictionary: an API that keeps objects, and the least of its controllers.

Far from the real one, but quick: for tests of what the operator does with answers. `settle` is one
pass of all controllers: pods are made, become ready, and end.
"""

from __future__ import annotations

import base64
import copy
from typing import Any, Final

from chairlift_e2e.fake_engine import FakeEngine, FakeGateway, FakePod, address
from chairlift_operator.kube.api import ApiError
from chairlift_operator.kube.merging import merged
from chairlift_operator.kube.objects import Stores
from chairlift_operator.kube.paths import CHILD_KINDS, POD
from chairlift_operator.kube.pod_view import pod_view
from chairlift_operator.kube.watching import Store

Json = dict[str, Any]
SUBRESOURCES: Final = ("scale", "status")


class FakeKube:
    """Has the methods of `kube.api.Api`. writes: (verb, path, manager) of each, in order.

    holds: names of pods that never become ready. refuses: what is said to a write, by path.
    hides: the status with which a read is answered, by path.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self.writes: list[tuple[str, str, str]] = []
        self.stores = Stores(Store(), {kind.name: Store() for kind in CHILD_KINDS})
        self.pods: dict[str, FakePod] = {}
        self.holds: set[str] = set()
        self.refuses: dict[str, str] = {}
        self.hides: dict[str, int] = {}
        self.bad_images: set[str] = set()
        self._version = 100
        self._num_made = self._num_started = 0

    async def get(self, path: str) -> Json:
        found = await self.find(path)
        if found is None:
            raise ApiError(404, f"GET {path}: not found")
        return found

    async def find(self, path: str) -> Json | None:
        if path in self.hides:
            raise ApiError(self.hides[path], f"GET {path}: not read")
        return copy.deepcopy(self.objects.get(path))

    async def create(self, path: str, manifest: Json, manager: str) -> Json:
        path = f"{path}/{manifest['metadata']['name']}"
        self._check("POST", path)
        if path in self.objects:
            raise ApiError(409, f"POST {path}: exists")
        return self._written("POST", path, manifest, manager)

    async def apply(self, path: str, manifest: Json, manager: str) -> Json:
        base, _, sub = path.rpartition("/")
        if sub in SUBRESOURCES:
            path = base
        self._check("PATCH", path)
        before = self.objects.get(path, {"kind": manifest["kind"]})
        if sub == "status":  # one manager has all of it: what it does not say is gone
            before = {**before, "status": {}}
        elif manifest["kind"] == "ConfigMap":
            before = {**before, "data": {}}
        return self._written("APPLY", path, merged(before, manifest), manager)

    async def patch(self, path: str, body: Json, manager: str) -> Json:
        self._check("PATCH", path)
        base, _, sub = path.rpartition("/")
        path = base if sub in SUBRESOURCES else path
        if path not in self.objects:
            raise ApiError(404, f"PATCH {path}: not found")
        return self._written("PATCH", path, merged(self.objects[path], body), manager)

    async def delete(self, path: str, uid: str = "", grace_s: int | None = None) -> None:
        self.writes.append(("DELETE", path, ""))
        if "/pods/" in path:
            self._end(self.objects[path])
        else:
            self._drop(path)

    def deployment(self, name: str) -> Json:
        return next(o for p, o in self.objects.items() if p.endswith(f"/deployments/{name}"))

    def engines(self, prefix: str = "") -> dict[str, FakeEngine]:
        """Of the pods that are not being ended, by name."""
        found = {}
        for path, item in self.objects.items():
            metadata = item["metadata"]
            pod = self.pods.get(metadata["name"])
            is_alive = "/pods/" in path and "deletionTimestamp" not in metadata
            if is_alive and isinstance(pod, FakeEngine) and metadata["name"].startswith(prefix):
                found[metadata["name"]] = pod
        return found

    def gateway(self) -> FakeGateway:
        """The first that was made."""
        return next(pod for pod in self.pods.values() if isinstance(pod, FakeGateway))

    async def settle(self) -> None:
        """Pods that end are gone, Deployments have what they ask for, pods are as their image."""
        for path, item in list(self.objects.items()):
            if "/pods/" in path and "deletionTimestamp" in item["metadata"]:
                await self._finish(path, item["metadata"]["name"])
        for path, item in list(self.objects.items()):
            if "/deployments/" in path:
                self._deploy(item)
        for path, item in list(self.objects.items()):
            if "/pods/" in path and "deletionTimestamp" not in item["metadata"]:
                await self._run(path, item)

    async def close(self) -> None:
        for pod in self.pods.values():
            await pod.stop()

    def _check(self, verb: str, path: str) -> None:
        if path in self.refuses:
            raise ApiError(422, f"{verb} {path}: {self.refuses[path]}")

    def _written(self, verb: str, path: str, body: Json, manager: str) -> Json:
        self._version += 1
        item = copy.deepcopy(body)
        for key, text in item.pop("stringData", {}).items():
            item.setdefault("data", {})[key] = base64.b64encode(text.encode()).decode()
        metadata = item["metadata"]
        metadata.setdefault("uid", f"uid-{path}")
        before = self.objects.get(path, {})
        changed = before.get("spec") != item.get("spec")
        metadata["generation"] = before.get("metadata", {}).get("generation", 0) + changed
        metadata["resourceVersion"] = str(self._version)
        self.objects[path] = item
        if manager:
            self.writes.append((verb, path, manager))
        self._tell(item)
        return copy.deepcopy(item)

    def _tell(self, item: Json) -> None:
        if item["kind"] == "Pod":
            self.stores.pods.put(copy.deepcopy(item))
        elif item["kind"] in self.stores.children:
            self.stores.children[item["kind"]].put(copy.deepcopy(item))

    def _drop(self, path: str) -> None:
        item = self.objects.pop(path)
        store = self.stores.pods if item["kind"] == "Pod" else None
        store = store or self.stores.children.get(item["kind"])
        if store is not None:
            store.drop(item)

    def _end(self, pod: Json) -> None:
        path = POD.path(pod["metadata"]["namespace"], pod["metadata"]["name"])
        gone = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
        self._written("", path, merged(pod, gone), "")

    async def _finish(self, path: str, name: str) -> None:
        fake = self.pods.pop(name, None)
        if isinstance(fake, FakeEngine) and fake.num_in_flight:
            self.pods[name] = fake
            return
        if fake is not None:
            await fake.stop()
        self._drop(path)

    def _deploy(self, deployment: Json) -> None:
        spec, metadata = deployment["spec"], deployment["metadata"]
        spec.setdefault("replicas", 1)
        own = [p for p in self._pods_of(deployment) if "deletionTimestamp" not in p["metadata"]]
        for victim in sorted(own, key=_rank)[: max(0, len(own) - spec["replicas"])]:
            self._end(victim)
        if spec.get("paused") or len(own) > spec["replicas"]:
            return
        metadata.setdefault("annotations", {})["deployment.kubernetes.io/revision"] = "1"
        surge, gone = _rolling(spec)
        labels = spec["template"]["metadata"]["labels"]
        fresh = [p for p in own if p["metadata"]["labels"] | _MARKED == labels | _MARKED]
        old = [p for p in own if p not in fresh]
        room = spec["replicas"] + surge - len(own)
        wanted = min(spec["replicas"] - len(fresh), room)
        for _ in range(wanted if old else spec["replicas"] - len(own)):
            self._make(metadata, spec["template"])
        starting = sum(not _rank(p)[2] for p in fresh) + max(0, wanted)
        may_go = len(own) - (spec["replicas"] - gone) - starting
        candidates = sorted(old, key=_rank)[:1]
        if may_go > 0 and candidates:
            num_ready = sum(_rank(p)[2] for p in own)
            if not _rank(candidates[0])[2] or num_ready > spec["replicas"] - gone:
                self._end(candidates[0])

    def _pods_of(self, deployment: Json) -> list[Json]:
        selector = deployment["spec"]["selector"]["matchLabels"].items()
        return [
            item
            for path, item in self.objects.items()
            if "/pods/" in path and selector <= item["metadata"]["labels"].items()
        ]

    def _make(self, owner: Json, template: Json) -> None:
        self._num_made += 1
        name, namespace = f"{owner['name']}-{self._num_made}", owner["namespace"]
        metadata = {**copy.deepcopy(template["metadata"]), "name": name, "namespace": namespace}
        minute, second = divmod(self._num_made, 60)
        pod = {
            "kind": "Pod",
            "metadata": {
                **metadata,
                "creationTimestamp": f"2026-01-01T00:{minute:02}:{second:02}Z",
            },
            "spec": copy.deepcopy(template["spec"]),
            "status": {"phase": "Pending"},
        }
        self._written("", POD.path(namespace, name), pod, "")

    async def _run(self, path: str, pod: Json) -> None:
        name = pod["metadata"]["name"]
        if pod["spec"]["containers"][0]["image"] in self.bad_images:
            waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
            last = {"terminated": {"exitCode": 2, "message": "no such model"}}
            state = {"state": waiting, "lastState": last, "restartCount": 3}
            status: Json = {"phase": "Running", "containerStatuses": [state]}
        else:
            fake = self.pods.get(name) or await self._start(name, pod)
            is_ready = name not in self.holds and not getattr(fake, "is_draining", False)
            ready = {"type": "Ready", "status": str(is_ready)}
            status = {"phase": "Running", "podIP": fake.ip, "conditions": [ready]}
        told = {"spec": {**pod["spec"], "nodeName": "fake"}, "status": status}
        if pod["spec"] != told["spec"] or pod["status"] != status:
            self._written("", path, {**pod, **told}, "")

    async def _start(self, name: str, pod: Json) -> FakePod:
        self._num_started += 1
        ip = address(self._num_started)
        is_engine = pod["metadata"]["labels"]["chairlift.dev/role"] == "engine"
        fake = FakeEngine(ip) if is_engine else FakeGateway(ip)
        await fake.start()
        self.pods[name] = fake
        return fake


_MARKED: Final = {"chairlift.dev/serving": "either"}


def _rank(pod: Json) -> tuple[bool, bool, bool, int]:
    """The order in which a ReplicaSet takes pods away; True last for one that is none of a pool."""
    view = pod_view(pod)
    return view.deletion_rank if view is not None else (True, True, True, 0)


def _rolling(spec: Json) -> tuple[int, int]:
    rolling = spec.get("strategy", {}).get("rollingUpdate", {})
    return int(rolling.get("maxSurge", 1)), int(rolling.get("maxUnavailable", 0))
