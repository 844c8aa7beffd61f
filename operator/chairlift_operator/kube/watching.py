"""Objects of one kind, kept as the API server has them: listed, then watched, listed again.

Only what carries our labels is asked for: Kopf would be sent every pod of the cluster. A watch that
ends, breaks or falls silent costs a second; what was known stays until it is known better.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

from chairlift_operator.kube import names
from chairlift_operator.kube.api import Api, ApiError, WatchEvent
from chairlift_operator.kube.paths import Kind

logger = logging.getLogger(__name__)

Json = dict[str, Any]
PoolKey = tuple[str, str]  # namespace, name
Edition = tuple[str, int, Json]  # uid, generation, annotations
SELECTOR: Final = f"{names.MANAGED_BY_LABEL}={names.MANAGED_BY},{names.POOL_LABEL}"
_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0


class Store:
    """Objects by pool, then by name. on_change: told of the pool whose object changed.

    key_of: an object's pool; by its label, unless told otherwise.
    """

    def __init__(
        self,
        on_change: Callable[[PoolKey], None] = lambda key: None,
        key_of: Callable[[Json], PoolKey] | None = None,
    ) -> None:
        self._key_of = key_of or _key
        self._pools: dict[PoolKey, dict[str, Json]] = defaultdict(dict)
        self._places: dict[tuple[str, str], PoolKey] = {}  # by namespace and name
        self._num_changes: dict[PoolKey, int] = defaultdict(int)
        self._num_edits: dict[PoolKey, int] = defaultdict(int)
        self._on_change = on_change

    def of(self, key: PoolKey) -> dict[str, Json]:
        return self._pools.get(key, {})

    def all(self) -> list[Json]:
        return [item for known in self._pools.values() for item in known.values()]

    def keys(self) -> list[PoolKey]:
        return list(self._pools)

    def num_changes(self, key: PoolKey) -> int:
        """As long as it stays, so does everything that is kept of this pool."""
        return self._num_changes.get(key, 0)

    def num_edits(self, key: PoolKey) -> int:
        """Of what people write: as long as it stays, only statuses and labels changed."""
        return self._num_edits.get(key, 0)

    def put(self, item: Json) -> None:
        """What is older than what is known is not put: our own writes come back first."""
        key, name = self._key_of(item), item["metadata"]["name"]
        place = self._places.get((key[0], name), key)
        known = self.of(place).get(name)
        if known is not None and _version(known) > _version(item) and _uid(known) == _uid(item):
            return
        if known is not None and place != key:  # somebody gave it another pool's label
            self.drop(known)
        item["metadata"].pop("managedFields", None)
        self._pools[key][name] = interned(item)
        self._places[key[0], name] = key
        self._changed(key, is_edit=known is None or edition(known) != edition(item))

    def drop(self, item: Json) -> None:
        namespace, name = item["metadata"]["namespace"], item["metadata"]["name"]
        key = self._places.pop((namespace, name), None)
        if key is not None:
            del self._pools[key][name]
            if not self._pools[key]:
                del self._pools[key]
            self._changed(key, is_edit=True)

    def replace(self, items: list[Json], namespace: str | None) -> None:
        """All there is, of one namespace or of every one."""
        listed = {(self._key_of(item), item["metadata"]["name"]) for item in items}
        for item in self.all():
            key = self._key_of(item)
            is_ours = namespace is None or key[0] == namespace
            if is_ours and (key, item["metadata"]["name"]) not in listed:
                self.drop(item)
        for item in items:
            self.put(item)

    def _changed(self, key: PoolKey, *, is_edit: bool) -> None:
        self._num_changes[key] += 1
        self._num_edits[key] += is_edit
        self._on_change(key)


class Reflector:
    """Keeps a store; one namespace, or all of them for None. selector: of labels."""

    def __init__(
        self,
        api: Api,
        kind: Kind,
        store: Store,
        namespace: str | None = None,
        selector: str = SELECTOR,
    ) -> None:
        self._selector = selector
        self._api = api
        self._kind = kind
        self._path = kind.path(namespace)
        self._namespace = namespace
        self._store = store
        self.is_synced = asyncio.Event()

    async def run(self) -> None:
        pause_s = _PAUSE_S
        while True:
            try:
                await self._follow()
                pause_s = _PAUSE_S
            except ApiError as error:
                if not error.is_gone:
                    logger.warning("watching %s: %s", self._kind.plural, error)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _follow(self) -> None:
        listed = await self._api.list(self._path, self._selector)
        for item in listed.items:  # items of a list do not say what they are
            item["kind"] = self._kind.name
        self._store.replace(listed.items, self._namespace)
        self.is_synced.set()
        version = listed.resource_version
        while True:
            async for event in self._api.watch(self._path, self._selector, version):
                version = event.object["metadata"]["resourceVersion"]
                self._take(event)

    def _take(self, event: WatchEvent) -> None:
        if event.type in ("ADDED", "MODIFIED"):
            self._store.put(event.object)
        elif event.type == "DELETED":
            self._store.drop(event.object)


def interned(value: Any) -> Any:
    """A copy in which equal words are one: each object is parsed by itself, and all say the same.

    Halves what the objects of a thousand pools take.
    """
    if isinstance(value, dict):
        return {sys.intern(name): interned(part) for name, part in value.items()}
    if isinstance(value, list):
        return [interned(part) for part in value]
    return sys.intern(value) if type(value) is str else value


def edition(item: Json) -> Edition:
    """Another one has another spec, or somebody annotated it, which is how objects are touched."""
    metadata = item["metadata"]
    return _uid(item), int(metadata.get("generation", 0)), metadata.get("annotations", {})


def _key(item: Json) -> PoolKey:
    metadata = item["metadata"]
    return metadata["namespace"], metadata["labels"][names.POOL_LABEL]


def _version(item: Json) -> int:
    """etcd's revisions: whole numbers that grow."""
    return int(item["metadata"]["resourceVersion"])


def _uid(item: Json) -> str:
    return str(item["metadata"].get("uid", ""))
