"""One pool's objects as they are known now, read out of the stores; nothing is asked for here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chairlift_operator.kube import names
from chairlift_operator.kube.paths import CHILD_KINDS, DEPLOYMENT
from chairlift_operator.kube.pod_view import PodView, pod_view, ready_since_s
from chairlift_operator.kube.watching import PoolKey, Store
from chairlift_protocol.wire import RequestClass

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stores:
    """children: by the name of their kind."""

    pods: Store
    children: Mapping[str, Store]


@dataclass(frozen=True, slots=True)
class GatewayPod:
    name: str
    ip: str | None
    is_ready: bool
    ready_since_s: float = 0.0


class PoolObjects:
    def __init__(self, key: PoolKey, stores: Stores) -> None:
        self.key = key
        self._stores = stores

    @property
    def namespace(self) -> str:
        return self.key[0]

    @property
    def num_changes(self) -> int:
        """Of anything that is read here."""
        stores = (self._stores.pods, *self._stores.children.values())
        return sum(store.num_changes(self.key) for store in stores)

    def engines(self) -> list[PodView]:
        views = [pod_view(pod) for pod in self._stores.pods.of(self.key).values()]
        return sorted((view for view in views if view is not None), key=lambda view: view.name)

    def engines_of(self, request_class: RequestClass) -> list[PodView]:
        return [view for view in self.engines() if view.request_class is request_class]

    def gateways(self) -> list[GatewayPod]:
        found = []
        for pod in self._stores.pods.of(self.key).values():
            metadata, status = pod["metadata"], pod.get("status", {})
            is_gateway = metadata["labels"].get(names.ROLE_LABEL) == names.GATEWAY_ROLE
            if not is_gateway or metadata.get("deletionTimestamp"):
                continue
            ready = {c["type"]: c["status"] for c in status.get("conditions", ())}.get("Ready")
            since_s = ready_since_s(status)
            found.append(
                GatewayPod(metadata["name"], status.get("podIP"), ready == "True", since_s)
            )
        return found

    def child(self, kind: str, name: str) -> Json | None:
        return self._stores.children[kind].of(self.key).get(name)

    def children(self) -> list[Json]:
        return [
            item
            for kind in CHILD_KINDS
            for item in self._stores.children[kind.name].of(self.key).values()
        ]

    def deployment(self, request_class: RequestClass) -> Json | None:
        return self.child(DEPLOYMENT.name, names.engines(self.key[1], request_class))

    def was_never_open(self, request_class: RequestClass) -> bool:
        """Made closed, and no pod of it since: Kubernetes numbers what it once rolled out."""
        deployment = self.deployment(request_class)
        if deployment is None or not deployment["spec"].get("paused"):
            return False
        return names.ROLLED_OUT_ANNOTATION not in deployment["metadata"].get("annotations", {})

    def is_rolling(self, request_class: RequestClass) -> bool:
        """Some pods run what their Deployment does not say any more."""
        deployment = self.deployment(request_class)
        labels = deployment["metadata"].get("labels", {}) if deployment else {}
        revisions = {pod.revision for pod in self.engines_of(request_class) if pod.counts}
        return bool(revisions - {labels.get(names.REVISION_LABEL)})

    def replicas(self, request_class: RequestClass) -> int:
        """As the Deployment says; 0 without one."""
        deployment = self.deployment(request_class)
        return int(deployment["spec"].get("replicas", 1)) if deployment else 0

    def num_missing(self, request_class: RequestClass) -> int:
        """Pods that the Deployment wants and has not made yet."""
        active = sum(pod.counts for pod in self.engines_of(request_class))
        return max(0, self.replicas(request_class) - active)

    def num_held(self) -> int:
        """Places that engine pods take up, those that end and those to come included."""
        return len(self.engines()) + sum(self.num_missing(c) for c in RequestClass)

    def note(self, item: Json) -> None:
        """What a write of ours answered is known before the watch tells it."""
        self._stores.children[item["kind"]].put(item)

    def note_pod(self, pod: Json) -> None:
        self._stores.pods.put(pod)

    def forget(self, item: Json) -> None:
        self._stores.children[item["kind"]].drop(item)

    def note_replicas(self, request_class: RequestClass, scale: Json) -> None:
        deployment = self.deployment(request_class)
        if deployment is None:
            return
        version = scale["metadata"]["resourceVersion"]
        self.note(
            {
                **deployment,
                "metadata": {**deployment["metadata"], "resourceVersion": version},
                "spec": {**deployment["spec"], "replicas": scale["spec"].get("replicas", 0)},
            }
        )
