"""Objects of one kind in the cluster of this pod: listed, then watched, listed again.

A watch that ends or fails is begun again by whoever follows. Knows no kind but by its path;
`kubernetes_endpoints` and `kubernetes_tenants` follow what they need.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import aiohttp

logger = logging.getLogger("chairlift_gateway.kubernetes_watch")

Json = dict[str, Any]
ACCOUNT_DIR: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# The server ends a watch before we take its silence for a broken one.
WATCH_S: Final = 300
SILENCE_S: Final = WATCH_S + 30.0
REQUEST_S: Final = 20.0
PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0


class NotInCluster(ValueError):
    """No pod with a service account; the message says what is missing."""


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
        """Raise NotInCluster outside of a pod."""
        try:
            host = environment["KUBERNETES_SERVICE_HOST"]
            port = environment["KUBERNETES_SERVICE_PORT"]
            tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
            (folder / "token").read_text()
        except (KeyError, OSError) as error:
            raise NotInCluster(
                f"only works in a pod with a service account: {error} is missing"
            ) from error
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}", tls, lambda: (folder / "token").read_text().strip())


class KubernetesWatch:
    """what: for the log. selector: parameters of the query that name the objects."""

    def __init__(
        self, access: ApiAccess, path: str, selector: Mapping[str, str], what: str
    ) -> None:
        self._access, self._path = access, path
        self._selector, self._what = selector, what
        self._objects: dict[str, Json] = {}

    async def follow(self, take: Callable[[Mapping[str, Json]], None]) -> None:
        """Hand over the objects by name, whenever they are others, until cancelled. What was known
        stays while the API server is away."""
        pause_s = PAUSE_S
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    async for _ in self._follow(session):
                        take(self._objects)
                        pause_s = PAUSE_S
                except (_WatchFailed, aiohttp.ClientError, TimeoutError, ValueError) as error:
                    why = error or type(error).__name__
                    logger.warning("watching %s: %s; keeping the last ones", self._what, why)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _follow(self, session: aiohttp.ClientSession) -> AsyncIterator[None]:
        """List, then watch from there; yields whenever the objects are other ones."""
        listed = await self._list(session)
        self._objects = {item["metadata"]["name"]: item for item in listed.get("items") or []}
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
                    self._objects.pop(item["metadata"]["name"], None)
                else:
                    self._objects[item["metadata"]["name"]] = item
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
            params={**self._selector, **params},
            headers={"Authorization": f"Bearer {token}"} if token else {},
            ssl=self._access.tls,
            timeout=timeout,
        )


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise _WatchFailed(f"the API server answered {response.status}: {await response.text()}")
