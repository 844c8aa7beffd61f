"""As much of an API server as tenants need, for `bench_tenants`: objects in memory, lists, watches.

A process of its own, so that what it costs is not the operator's. It knows no schema and no rights;
`POST /fill?num=N` makes so many tenants, with a Secret each.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from typing import Any, Final

from aiohttp import web

Json = dict[str, Any]
NAMESPACE: Final = "team"
POOL: Final = "chat"
QUOTAS: Final = f"/apis/chairlift.dev/v1alpha1/namespaces/{NAMESPACE}/tenantquotas"
SECRETS: Final = f"/api/v1/namespaces/{NAMESPACE}/secrets"
CONFIG_MAPS: Final = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
KEYS_TYPE: Final = "chairlift.dev/api-keys"


def tenant(number: int) -> str:
    return f"tenant-{number:05}"


def key(number: int) -> str:
    return f"ck-{number:040}"


def secret(name: str, api_key: str) -> Json:
    data = {"key": base64.b64encode(api_key.encode()).decode()}
    return {"kind": "Secret", "metadata": {"name": name}, "type": KEYS_TYPE, "data": data}


def quota_spec(number: int, concurrency: int, *secrets: str) -> Json:
    """Everybody's limits are others, so that nothing is shared that is not by nature."""
    own = {"requestsPerMinute": 100 + number, "concurrency": concurrency, "burst": "20s"}
    return {
        "poolRef": {"name": POOL},
        "tenant": tenant(number),
        "keys": [{"secret": name} for name in secrets],
        "interactive": {"tokensPerMinute": 10_000 + number, **own},
        "batch": {"tokensPerMinute": 50_000 + number, **own},
    }


class Server:
    """num_writes: of statuses."""

    def __init__(self) -> None:
        self._objects: dict[str, Json] = {}
        self._version = 1
        self._watchers: set[tuple[str, str, asyncio.Queue[Json]]] = set()
        self._num_writes = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=4 << 20)
        app.router.add_post("/fill", self.fill)
        app.router.add_get("/writes", self.writes)
        app.router.add_get("/{path:.*}", self.get)
        app.router.add_patch("/{path:.*}", self.patch)
        return app

    async def fill(self, request: web.Request) -> web.Response:
        for number in range(int(request.query["num"])):
            name = tenant(number)
            if f"{QUOTAS}/{name}" in self._objects:
                continue
            spec = quota_spec(number, 8, f"{name}-keys")
            applied = {"kubectl.kubernetes.io/last-applied-configuration": json.dumps(spec)}
            metadata = {"name": name, "annotations": applied}
            self._put(f"{SECRETS}/{name}-keys", secret(f"{name}-keys", key(number)))
            body = {"kind": "TenantQuota", "metadata": metadata, "spec": spec}
            self._put(f"{QUOTAS}/{name}", body)
        return web.json_response({})

    async def writes(self, _: web.Request) -> web.Response:
        return web.json_response({"num_writes": self._num_writes})

    async def get(self, request: web.Request) -> web.StreamResponse:
        path, field = request.path, request.query.get("fieldSelector", "")
        if (found := self._objects.get(path)) is not None:
            return web.json_response(found)
        if path not in (QUOTAS, SECRETS, CONFIG_MAPS):
            return web.json_response({"message": "not found"}, status=404)
        if "watch" in request.query:
            return await self._watch(request, path, field)
        listed = [i for p, i in self._objects.items() if _is_of(p, path, field)]
        version = {"resourceVersion": str(self._version)}
        return web.json_response({"metadata": version, "items": listed})

    async def patch(self, request: web.Request) -> web.Response:
        body, path = await request.json(), request.path
        if path.endswith("/status"):
            self._num_writes += 1
            path = path.removesuffix("/status")
            body = {**self._objects[path], "status": body["status"]}
        return web.json_response(self._put(path, body))

    def _put(self, path: str, body: Json) -> Json:
        self._version += 1
        before = self._objects.get(path, {})
        known = before.get("metadata", {})
        is_other = before.get("spec") != body.get("spec")
        metadata = {
            **known,
            **body["metadata"],
            "namespace": NAMESPACE,
            "uid": known.get("uid", f"uid-{self._version}"),
            "generation": known.get("generation", 0) + is_other,
            "resourceVersion": str(self._version),
            "creationTimestamp": known.get("creationTimestamp", "2026-01-01T00:00:00Z"),
        }
        item = {**before, **body, "metadata": metadata}
        self._objects[path] = item
        kind = "MODIFIED" if before else "ADDED"
        for collection, field, events in self._watchers:
            if _is_of(path, collection, field):
                events.put_nowait({"type": kind, "object": item})
        return item

    async def _watch(self, request: web.Request, path: str, field: str) -> web.StreamResponse:
        """Of what is newer than the version that is asked for."""
        events: asyncio.Queue[Json] = asyncio.Queue()
        since = int(request.query["resourceVersion"])
        for where, item in self._objects.items():
            if _is_of(where, path, field) and int(item["metadata"]["resourceVersion"]) > since:
                events.put_nowait({"type": "MODIFIED", "object": item})
        watcher = (path, field, events)
        self._watchers.add(watcher)
        response = web.StreamResponse()
        try:
            await response.prepare(request)
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while True:
                    await response.write(json.dumps(await events.get()).encode() + b"\n")
        except TimeoutError:
            return response
        finally:
            self._watchers.discard(watcher)


def _is_of(path: str, collection: str, field: str) -> bool:
    where, _, name = path.rpartition("/")
    return where == collection and field in ("", f"metadata.name={name}")


if __name__ == "__main__":
    web.run_app(Server().app(), host="127.0.0.1", port=int(sys.argv[1]), print=lambda _: None)
