"""Where a pool's replicas are on Kubernetes: a watch on the EndpointSlices of its Services.

An `endpoints.EndpointSource`. The last list is kept while no newer one comes: an API server that is
away takes no replica out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from chairlift_gateway.choice import Replica
from chairlift_gateway.kubernetes_watch import ApiAccess, KubernetesWatch
from chairlift_protocol.wire import RequestClass

Json = dict[str, Any]
POOL_LABEL: Final = "chairlift.dev/pool"
CLASS_LABEL: Final = "chairlift.dev/class"
PORT_NAME: Final = "http"


class KubernetesEndpoints:
    """pool: namespace/name of the InferencePool."""

    def __init__(self, access: ApiAccess, pool: str) -> None:
        namespace, _, name = pool.partition("/")
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        selector = {"labelSelector": f"{POOL_LABEL}={name}"}
        self._watch = KubernetesWatch(access, path, selector, "replicas")
        self._replicas: tuple[Replica, ...] = ()

    def latest(self) -> tuple[Replica, ...]:
        return self._replicas

    async def watch(self, publish: Callable[[tuple[Replica, ...]], None]) -> None:
        def take(slices: Mapping[str, Json]) -> None:
            self._replicas = replicas_of(slices.values())
            publish(self._replicas)

        await self._watch.follow(take)


def replicas_of(slices: Iterable[Json]) -> tuple[Replica, ...]:
    """Those that may get new work. A pod of two address families is listed once."""
    found: dict[str, Replica] = {}
    for item in sorted(slices, key=lambda item: str(item.get("addressType"))):
        labels = item["metadata"].get("labels") or {}
        port = {p.get("name"): p.get("port") for p in item.get("ports") or ()}.get(PORT_NAME)
        if labels.get(CLASS_LABEL) not in list(RequestClass) or port is None:
            continue
        for endpoint in item.get("endpoints") or ():
            if (endpoint.get("conditions") or {}).get("ready") is False:
                continue
            address = endpoint["addresses"][0]
            host = f"[{address}]" if ":" in address else address
            name = (endpoint.get("targetRef") or {}).get("name") or address
            request_class = RequestClass(labels[CLASS_LABEL])
            found.setdefault(name, Replica(name, f"http://{host}:{port}", request_class))
    return tuple(found[name] for name in sorted(found))
