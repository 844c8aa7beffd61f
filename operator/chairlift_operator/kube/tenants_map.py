"""The ConfigMap in which gateways find whose each API key is: written, and set right again.

Gateways watch it. A ConfigMap, because it holds hashes of long random keys, and because an operator
that may not list Secrets cannot give a gateway the right to watch one.
"""

from __future__ import annotations

import json
from typing import Any, Final

from chairlift_operator.kube import names
from chairlift_operator.kube.api import Api
from chairlift_operator.kube.children import Owner, owned
from chairlift_operator.kube.objects import PoolObjects
from chairlift_operator.kube.owning import check_name, check_ours
from chairlift_operator.kube.paths import CONFIG_MAP, path_of
from chairlift_operator.spec import InferencePool
from chairlift_protocol.quota import TENANTS_KEY

Json = dict[str, Any]
EMPTY: Final = '{"tenants":[]}'


class TenantsMap:
    """One pool's."""

    def __init__(self, objects: PoolObjects, api: Api, owner: Owner) -> None:
        self._objects, self._api, self._owner = objects, api, owner

    async def write(self, pool: InferencePool, document: str) -> None:
        """Raise ApiError, or Foreign where the ConfigMap is somebody else's."""
        live = self._live(pool)
        if live is not None and (live.get("data") or {}) == {TENANTS_KEY: document}:
            check_ours(live, self._owner)
            return
        metadata = {"name": names.tenants(pool.name)}
        data = {TENANTS_KEY: document}
        body = {"apiVersion": "v1", "kind": CONFIG_MAP.name, "metadata": metadata, "data": data}
        manifest = owned(body, pool, self._owner)
        if live is None:
            await check_name(self._api, manifest, self._owner)
        else:
            check_ours(live, self._owner)
        self._objects.note(await self._api.apply(path_of(manifest), manifest, names.FIELD_MANAGER))

    async def take(self, pool: InferencePool, document: str) -> None:
        """Of what gateways know, what the document does not have any more; nothing is given. Raise
        as `write` does."""
        live = self._live(pool)
        if live is None:
            return
        known = _keys((live.get("data") or {}).get(TENANTS_KEY, EMPTY))
        kept = []
        for tenant in json.loads(document)["tenants"]:
            keys = [key for key in tenant["keys"] if (tenant["tenant"], key["sha256"]) in known]
            if keys:
                kept.append({**tenant, "keys": keys})
        await self.write(pool, json.dumps({"tenants": kept}, separators=(",", ":")))

    async def remove(self, pool: InferencePool) -> None:
        """Of a pool that keeps no quotas any more. Raise as `write` does."""
        live = self._live(pool)
        if live is not None:
            check_ours(live, self._owner)
            await self._api.delete(path_of(live), live["metadata"]["uid"])
            self._objects.forget(live)

    def _live(self, pool: InferencePool) -> Json | None:
        return self._objects.child(CONFIG_MAP.name, names.tenants(pool.name))


def _keys(document: str) -> set[tuple[str, str]]:
    """Tenant and digest of each; none of what somebody else wrote there."""
    try:
        listed = json.loads(document)["tenants"]
        return {(each["tenant"], key["sha256"]) for each in listed for key in each["keys"]}
    except (ValueError, KeyError, TypeError):
        return set()
