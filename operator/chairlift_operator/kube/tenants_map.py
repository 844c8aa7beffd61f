"""The ConfigMaps in which gateways find whose each API key is: written, and set right again.

One, or where it would be too large one that says so, and a fixed number of others that hold a part
each. Once parted keys stay so. Gateways watch them. ConfigMaps, because they hold hashes of long
random keys, and because an operator that may not list Secrets cannot give a gateway the right to
watch one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Iterator
from typing import Any

from chairlift_operator.kube import names
from chairlift_operator.kube.api import Api, ApiError
from chairlift_operator.kube.children import Owner, owned
from chairlift_operator.kube.objects import PoolObjects
from chairlift_operator.kube.owning import Foreign, check_name, check_ours
from chairlift_operator.kube.paths import CONFIG_MAP, path_of
from chairlift_operator.quotas.key_ring import TenantKeys, without_new
from chairlift_operator.spec import InferencePool
from chairlift_protocol.quota import NUM_SHARDS, SHARD_KEY, SHARDS_KEY, TENANTS_KEY, shard_mark

Json = dict[str, Any]
Data = dict[str, str]


class TenantsMap:
    """One pool's."""

    def __init__(self, objects: PoolObjects, api: Api, owner: Owner) -> None:
        self._objects, self._api, self._owner = objects, api, owner

    async def write(self, pool: InferencePool, keys: TenantKeys) -> None:
        """Raise ApiError, or Foreign where a ConfigMap is somebody else's; what can be written
        is."""
        keys = self._with_those_in_doubt(pool, keys)
        is_parted = keys.need_parts or self._is_parted(pool)
        await _each(self._put(pool, name, data) for name, data in _documents(pool, keys, is_parted))
        if is_parted:  # last, so that whoever reads it finds every part
            await self._put(pool, names.tenants(pool.name), {SHARDS_KEY: str(NUM_SHARDS)})

    async def take(self, pool: InferencePool, keys: TenantKeys) -> None:
        """Of what gateways know, what is not there any more; nothing is given. Raise as `write`
        does."""
        self._check_ours(names.tenants(pool.name))
        keys = self._with_those_in_doubt(pool, keys)
        documents = _documents(pool, keys, self._is_parted(pool))
        await _each(self._take(pool, name, data) for name, data in documents)

    async def remove(self, pool: InferencePool) -> None:
        """Of a pool that keeps no quotas any more. Raise as `write` does."""
        for name in (names.tenants(pool.name), *names.tenant_shards(pool.name)):
            live = self._check_ours(name)
            if live is not None:
                await self._api.delete(path_of(live), live["metadata"]["uid"])
                self._objects.forget(live)

    async def _take(self, pool: InferencePool, name: str, data: Data) -> None:
        known = _data(self._check_ours(name))
        if data.items() <= known.items() or TENANTS_KEY not in known:
            return
        try:
            kept = without_new(data[TENANTS_KEY], known[TENANTS_KEY])
        except ValueError:  # somebody broke it, so gateways keep what they knew before
            return
        await self._put(pool, name, {**data, TENANTS_KEY: kept})

    async def _put(self, pool: InferencePool, name: str, data: Data) -> None:
        live = self._check_ours(name)
        if live is not None and data.items() <= _data(live).items():
            return
        body = {
            "apiVersion": "v1",
            "kind": CONFIG_MAP.name,
            "metadata": {"name": name},
            "data": data,
        }
        manifest = owned(body, pool, self._owner)
        if live is None:
            await check_name(self._api, manifest, self._owner)
        self._objects.note(await self._api.apply(path_of(manifest), manifest, names.FIELD_MANAGER))

    def _check_ours(self, name: str) -> Json | None:
        """What is there. Raise Foreign."""
        live = self._live(name)
        if live is not None:
            check_ours(live, self._owner)
        return live

    def _with_those_in_doubt(self, pool: InferencePool, keys: TenantKeys) -> TenantKeys:
        """With the keys of tenants in doubt as gateways know them."""
        if not keys.in_doubt:
            return keys
        one = names.tenants(pool.name)
        holding = names.tenant_shards(pool.name) if self._is_parted(pool) else (one,)
        return keys.keeping(_data(self._live(name)).get(TENANTS_KEY, "") for name in holding)

    def _is_parted(self, pool: InferencePool) -> bool:
        return SHARDS_KEY in _data(self._live(names.tenants(pool.name)))

    def _live(self, name: str) -> Json | None:
        return self._objects.child(CONFIG_MAP.name, name)


async def _each(works: Iterable[Awaitable[None]]) -> None:
    """All of them, so that one part that cannot be written keeps no key of another in force; then
    raise the first error. A server that does not answer is asked no more."""
    first: ApiError | Foreign | None = None
    for work in works:
        try:
            await work
        except (ApiError, Foreign) as error:
            first = first or error
            if isinstance(error, ApiError) and error.status == 0:
                break
    if first is not None:
        raise first


def _documents(
    pool: InferencePool, keys: TenantKeys, is_parted: bool
) -> Iterator[tuple[str, Data]]:
    """What the ConfigMaps that hold keys shall hold, by name."""
    if not is_parted:
        yield names.tenants(pool.name), {TENANTS_KEY: keys.whole}
        return
    for number, part in enumerate(keys.parts):
        name = names.tenant_shards(pool.name)[number]
        yield name, {SHARD_KEY: shard_mark(number), TENANTS_KEY: part}


def _data(live: Json | None) -> Data:
    return (live or {}).get("data") or {}
