"""Where a pool's replicas are on Kubernetes: a watch on the EndpointSlices of its Services.

An `endpoints.EndpointSource`. A watch that ends or fails is begun again, and the last list is kept
meanwhile: an API server that is away takes no replica out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import aiohttp

from chairlift_gateway.choice import Replica
from chairlift_gateway.endpoints import EndpointsError
from chairlift_protocol.wire import RequestClass

logger = logging.getLogger("chairlift_gateway.kubernetes_endpoints")

Json = dict[str, Any]
POOL_LABEL: Final = "chairlift.dev/pool"
CLASS_LABEL: Final = "chairlift.dev/class"
PORT_NAME: Final = "http"
ACCOUNT_DIR: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# The server ends a watch before we take its silence for a broken one.
WATCH_S: Final = 300
SILENCE_S: Final = WATCH_S + 30.0
REQUEST_S: Final = 20.0
PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0


class _WatchFailed(RuntimeError):
    """Begin again with a new list."""


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """token: asked before each request, since service accounts' tokens are renewed."""

    server: str
    tls: ssl.SSLContext
    token: Callable[[], str | None]

    @classmethod
    def in_cluster(
        cls, folder: Path = ACCOUNT_DIR, environment: Mapping[str, str] = os.environ
    ) -> Self:
        """Raise EndpointsError outside of a pod."""
        try:
            host = environment["KUBERNETES_SERVICE_HOST"]
            port = environment["KUBERNETES_SERVICE_PORT"]
            tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
            (folder / "token").read_text()
        except (KeyError, OSError) as error:
            raise EndpointsError(
                f"only works in a pod with a service account: {error} is missing"
            ) from error
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}", tls, lambda: (folder / "token").read_text().strip())


class KubernetesEndpoints:
    """pool: namespace/name of the InferencePool."""

    def __init__(self, access: ApiAccess, pool: str) -> None:
        namespace, _, self._name = pool.partition("/")
        self._access = access
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._slices: dict[str, Json] = {}
        self._replicas: tuple[Replica, ...] = ()

    def latest(self) -> tuple[Replica, ...]:
        return self._replicas

    async def watch(self, publish: Callable[[tuple[Replica, ...]], None]) -> None:
        pause_s = PAUSE_S
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    async for _ in self._follow(session):
                        self._replicas = replicas_of(self._slices.values())
                        publish(self._replicas)
                        pause_s = PAUSE_S
                except (_WatchFailed, aiohttp.ClientError, TimeoutError, ValueError) as error:
                    logger.warning(
                        "watching replicas: %s; keeping the last %d",
                        error or type(error).__name__,
                        len(self._replicas),
                    )
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _follow(self, session: aiohttp.ClientSession) -> AsyncIterator[None]:
        """List, then watch from there; yields whenever the slices are other ones."""
        listed = await self._list(session)
        self._slices = {item["metadata"]["name"]: item for item in listed.get("items") or []}
        yield
        version = listed["metadata"]["resourceVersion"]
        while True:
            async for event in self._events(session, version):
                item = event["object"]
                if event["type"] == "ERROR":
                    raise _WatchFailed(item.get("message", "the watch failed"))
                version = item["metadata"]["resourceVersion"]
                if event["type"] == "BOOKMARK":
                    continue
                if event["type"] == "DELETED":
                    self._slices.pop(item["metadata"]["name"], None)
                else:
                    self._slices[item["metadata"]["name"]] = item
                yield

    async def _list(self, session: aiohttp.ClientSession) -> Json:
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        async with self._get(session, {}, timeout) as response:
            await _check(response)
            body: Json = await response.json()
            return body

    async def _events(self, session: aiohttp.ClientSession, version: str) -> AsyncIterator[Json]:
        params = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        timeout = aiohttp.ClientTimeout(sock_connect=REQUEST_S, sock_read=SILENCE_S)
        async with self._get(session, params, timeout) as response:
            await _check(response)
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line:
                        yield json.loads(line)

    def _get(self, session: aiohttp.ClientSession, params: Mapping[str, str], timeout: Any) -> Any:
        token = self._access.token()
        return session.get(
            self._access.server + self._path,
            params={"labelSelector": f"{POOL_LABEL}={self._name}", **params},
            headers={"Authorization": f"Bearer {token}"} if token else {},
            ssl=self._access.tls,
            timeout=timeout,
        )


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


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise _WatchFailed(f"the API server answered {response.status}: {await response.text()}")
