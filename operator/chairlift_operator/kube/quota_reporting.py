"""Writes the status of a pool's quotas: when something changed, and measurements now and then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from chairlift_operator.kube import names
from chairlift_operator.kube.api import Api, ApiError
from chairlift_operator.kube.paths import QUOTA
from chairlift_operator.kube.quota_status import LIMITED, LOWERED, from_json, to_json
from chairlift_operator.kube.settings import STATUS_S
from chairlift_operator.quota_status_model import TenantQuotaStatus

logger = logging.getLogger(__name__)

Json = dict[str, Any]


class QuotaReporter:
    """Of one pool's quotas, under one leadership."""

    def __init__(self, api: Api, now_s: Callable[[], float]) -> None:
        self._api, self._now_s = api, now_s
        self._written: dict[str, tuple[TenantQuotaStatus, float]] = {}  # by uid

    def written(self, quota: Json) -> TenantQuotaStatus:
        """As it is in the cluster."""
        known = self._written.get(quota["metadata"]["uid"])
        return known[0] if known is not None else from_json(quota.get("status"))

    async def write(self, quota: Json, status: TenantQuotaStatus) -> None:
        """A status that cannot be written is no reason to stop."""
        metadata, before = quota["metadata"], self.written(quota)
        _, at_s = self._written.get(metadata["uid"], (None, 0.0))
        is_due = self._now_s() - at_s >= STATUS_S and status != before
        if not is_due and _without_counts(before) == _without_counts(status):
            return
        namespace, name = metadata["namespace"], metadata["name"]
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.QUOTA_KIND,
            "metadata": {"name": name, "namespace": namespace},
            "status": to_json(status),
        }
        path = QUOTA.path(namespace, name, "status")
        try:
            await self._api.apply(path, body, names.STATUS_MANAGER)
        except ApiError as error:
            logger.warning("TenantQuota %s/%s: status not written: %s", namespace, name, error)
            return
        self._written[metadata["uid"]] = (status, self._now_s())

    def keep_only(self, uids: set[str]) -> None:
        for uid in self._written.keys() - uids:
            del self._written[uid]


def _without_counts(status: TenantQuotaStatus) -> TenantQuotaStatus:
    """What counts change all the time is left out."""
    told = [
        replace(c, message="") if c.type in (LIMITED, LOWERED) else c for c in status.conditions
    ]
    return TenantQuotaStatus(
        observed_generation=status.observed_generation,
        ready=status.ready,
        limited=status.limited,
        conditions=tuple(told),
    )
