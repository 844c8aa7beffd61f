"""Whose each API key is, on Kubernetes: a watch on the ConfigMap that the pool's operator writes.

An `identity.TenantsSource`. A file mounted into the pod would be a minute late. What was known
stays while the API server is away, and when the ConfigMap is gone or broken.

Where there are too many keys for one, it says so, and others hold a part each: a gateway may watch
them by name alone, so one watch each. Each part is whole in itself: a key of one that was not seen
yet is not learnt, which is not the same as unknown.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from chairlift_gateway.identity import Caller, KeyBook, Keys, NotLearnt, TenantsError, parse_tenants
from chairlift_gateway.kubernetes_watch import ApiAccess, KubernetesWatch
from chairlift_protocol.quota import (
    NUM_SHARDS,
    SHARD_KEY,
    SHARDS_KEY,
    TENANTS_KEY,
    shard_mark,
    shard_name,
    shard_of,
)

logger = logging.getLogger("chairlift_gateway.kubernetes_tenants")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeyParts:
    """parts: by number, None for one that was not seen yet. before: what was known when the keys
    were parted, which holds for a part until it is seen."""

    parts: tuple[Keys | None, ...]
    before: Keys

    def find(self, key: bytes) -> Caller | None:
        """Raise NotLearnt."""
        digest = hashlib.sha256(key).hexdigest()
        part = self.parts[shard_of(digest)]
        if part is not None:
            return part.callers.get(digest)
        if (caller := self.before.callers.get(digest)) is None:
            raise NotLearnt
        return caller

    def with_part(self, number: int, keys: Keys) -> KeyParts:
        parts = (*self.parts[:number], keys, *self.parts[number + 1 :])
        return KeyParts(parts, Keys() if None not in parts else self.before)


class KubernetesTenants:
    """name: of the ConfigMap, in the pool's namespace."""

    def __init__(self, access: ApiAccess, namespace: str, name: str) -> None:
        self._access, self._name = access, name
        self._path = f"/api/v1/namespaces/{namespace}/configmaps"
        self._keys: Keys | KeyParts | None = None
        self._watching: list[asyncio.Task[None]] = []  # the parts

    @property
    def keys(self) -> KeyBook | None:
        """None before anything was read."""
        return self._keys

    async def watch(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            await self._follow(self._name, lambda data: self._take(data, tasks))

    async def _follow(self, name: str, take: Callable[[Json], None]) -> None:
        watch = KubernetesWatch(
            self._access, self._path, {"fieldSelector": f"metadata.name={name}"}, name
        )

        def read(found: Mapping[str, Json]) -> None:
            try:
                if name not in found:
                    raise TenantsError("is not there")
                take(found[name].get("data") or {})
            except TenantsError as error:
                logger.warning("ConfigMap %s: %s; keeping the last tenants", name, error)

        await watch.follow(read)

    def _take(self, data: Json, tasks: asyncio.TaskGroup) -> None:
        if SHARDS_KEY not in data:
            self._keys = _parsed(data)
            for task in self._watching:
                task.cancel()
            self._watching = []
        elif data[SHARDS_KEY] != str(NUM_SHARDS):
            raise TenantsError(f"{SHARDS_KEY} must be {NUM_SHARDS}, not {data[SHARDS_KEY]!r}")
        elif not self._watching:
            before = self._keys if isinstance(self._keys, Keys) else Keys()
            self._keys = KeyParts((None,) * NUM_SHARDS, before)
            self._watching = [
                tasks.create_task(self._follow_part(number)) for number in range(NUM_SHARDS)
            ]

    async def _follow_part(self, number: int) -> None:
        def take(data: Json) -> None:
            if data.get(SHARD_KEY) != shard_mark(number):
                raise TenantsError(f"is not part {shard_mark(number)} of the tenants")
            if isinstance(self._keys, KeyParts):
                self._keys = self._keys.with_part(number, _parsed(data))

        await self._follow(shard_name(self._name, number), take)


def _parsed(data: Json) -> Keys:
    """Raise TenantsError."""
    text = data.get(TENANTS_KEY)
    if not isinstance(text, str):
        raise TenantsError(f"holds no {TENANTS_KEY}")
    return parse_tenants(text.encode())
