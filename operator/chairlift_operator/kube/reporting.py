"""Writes a pool's status and Events: when something changed, and measurements now and then."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import Any, Final

from chairlift_operator.kube import names
from chairlift_operator.kube.api import Api, ApiError
from chairlift_operator.kube.pacing import is_due
from chairlift_operator.kube.paths import EVENT, POOL
from chairlift_operator.kube.settings import SEEN_AGAIN_S, STATUS_S
from chairlift_operator.kube.status import differs, measures_differ, timestamp, to_json
from chairlift_operator.status_model import PoolStatus

logger = logging.getLogger(__name__)

Json = dict[str, Any]
_LONGEST_NOTE: Final = 1000
_WARNINGS: Final = frozenset({"WriteRefused"})


class Reporter:
    """before: the status as it is in the cluster. Used by one leadership.

    latest: what shall be there; written: what is. They differ while only measurements do.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        pool: str,
        uid: str,
        before: PoolStatus,
        now_s: Callable[[], float],
    ) -> None:
        self._api = api
        self._namespace, self._pool, self._uid = namespace, pool, uid
        self._now_s = now_s
        self._written_at_s = now_s()
        self.written = before
        self.latest = before

    async def write(self, status: PoolStatus) -> None:
        self.latest = status
        age_s = self._now_s() - self._written_at_s
        is_news = differs(self.written, status)
        is_news = is_news or (age_s >= STATUS_S and measures_differ(self.written, status))
        if not is_news and (status == self.written or not self._is_old()):
            return
        path = POOL.path(self._namespace, self._pool, "status")
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"name": self._pool, "namespace": self._namespace},
            "status": to_json(status),
        }
        await self._api.apply(path, body, names.STATUS_MANAGER)
        self._written_at_s = self._now_s()
        self.written = status

    def _is_old(self) -> bool:
        key = (self._namespace, self._pool)
        return is_due(key, self._written_at_s, self._now_s(), SEEN_AGAIN_S)

    async def event(self, reason: str, note: str) -> None:
        """An Event is for people: one that cannot be written is no reason to stop."""
        at = timestamp(self._now_s())
        body: Json = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{self._pool}.{uuid.uuid4().hex[:16]}",
                "namespace": self._namespace,
            },
            "involvedObject": {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": self._pool,
                "namespace": self._namespace,
                "uid": self._uid,
            },
            "reason": reason,
            "message": note[:_LONGEST_NOTE],
            "type": "Warning" if reason in _WARNINGS else "Normal",
            "source": {"component": names.OPERATOR_NAME},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        try:
            await self._api.create(EVENT.path(self._namespace), body, names.FIELD_MANAGER)
        except ApiError as error:
            logger.info("%s/%s: event not written: %s", self._namespace, self._pool, error)


def event_reason(field: str) -> str:
    """Of a decision that changes this field."""
    return field[:1].upper() + field[1:] + "Set"
