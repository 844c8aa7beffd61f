"""Whose each API key is, on Kubernetes: a watch on the ConfigMap that the pool's operator writes.

An `identity.TenantsSource`. A file mounted into the pod would be a minute late. What was known
stays while the API server is away, and when the ConfigMap is gone or broken.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from chairlift_gateway.identity import Keys, TenantsError, parse_tenants
from chairlift_gateway.kubernetes_watch import ApiAccess, KubernetesWatch
from chairlift_protocol.quota import TENANTS_KEY

logger = logging.getLogger("chairlift_gateway.kubernetes_tenants")

Json = dict[str, Any]


class KubernetesTenants:
    """name: of the ConfigMap, in the pool's namespace."""

    def __init__(self, access: ApiAccess, namespace: str, name: str) -> None:
        path = f"/api/v1/namespaces/{namespace}/configmaps"
        selector = {"fieldSelector": f"metadata.name={name}"}
        self._watch = KubernetesWatch(access, path, selector, "tenants")
        self._name = name
        self._keys: Keys | None = None

    @property
    def keys(self) -> Keys | None:
        """None before they were first read."""
        return self._keys

    async def watch(self) -> None:
        """Until cancelled."""
        await self._watch.follow(self._take)

    def _take(self, found: Mapping[str, Json]) -> None:
        data = (found.get(self._name) or {}).get("data") or {}
        if TENANTS_KEY not in data:
            logger.warning("ConfigMap %s holds no %s; keeping the last", self._name, TENANTS_KEY)
            return
        try:
            self._keys = parse_tenants(data[TENANTS_KEY].encode())
        except TenantsError as error:
            logger.warning("ConfigMap %s: %s; keeping the last tenants", self._name, error)
