"""Writes the status of a pool's quotas: when something changed, and measurements now and then.

So many in a turn, so that no change waits for thousands of them: what is news comes first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from chairlift_operator.kube import names
from chairlift_operator.kube.api import Api, ApiError
from chairlift_operator.kube.paths import QUOTA
from chairlift_operator.kube.quota_claims import QuotaClaims
from chairlift_operator.kube.quota_status import LIMITED, LOWERED, Standing, from_json, to_json
from chairlift_operator.kube.settings import STATUS_S
from chairlift_operator.quota_status_model import UNKNOWN, TenantQuotaStatus
from chairlift_operator.quotas.roster import Verdict

logger = logging.getLogger(__name__)

Json = dict[str, Any]
# In one turn. Of the second, those that were measured longest ago; each is written once a minute.
MOST_WRITES: Final = 100
MOST_MEASURED: Final = 80
MOST_LOOKS: Final = 1000

StatusOf = Callable[[str, Json, TenantQuotaStatus], TenantQuotaStatus]


class QuotaReporter:
    """Of one pool's quotas, under one leadership."""

    def __init__(self, api: Api, now_s: Callable[[], float], quotas: QuotaClaims) -> None:
        self._api, self._now_s, self._quotas = api, now_s, quotas
        self._written: dict[str, tuple[TenantQuotaStatus, float]] = {}  # by uid
        self._seen: tuple[object, ...] = ()  # what `_told` was compared with
        self._told: dict[str, tuple[int, Verdict]] = {}  # by name, what was looked at
        self._due: dict[str, None] = {}  # names of those that may have news, in order
        self.is_behind = False

    async def report(
        self,
        verdicts: Mapping[str, Verdict],
        standing: Standing | None,
        part: Iterable[str],
        status_of: StatusOf,
    ) -> None:
        """part: those that were measured in this turn. status_of: from name, object, and the status
        that it has. is_behind then says whether there is more news."""
        self._look(verdicts, standing)
        news, measured = [], []
        for name in (*islice(self._due, MOST_LOOKS), *part):
            item = self._quotas.item(name)
            before = self._before(item) if item is not None else None
            if item is None or before is None:  # the next turn finds it
                self._due.pop(name, None)
                continue
            status = status_of(name, item, before[0])
            if _is_news(before[0], status):
                self._due[name] = None
                news.append((name, item, status))
            else:
                self._due.pop(name, None)
                if _is_measured(before, status, self._now_s()):
                    measured.append((before[1], name, item, status))
        measured.sort(key=lambda each: each[:2])
        await self._write_all([*news, *(each[1:] for each in measured[:MOST_MEASURED])])

    def _look(self, verdicts: Mapping[str, Verdict], standing: Standing | None) -> None:
        """Of whom something else is to be said than when it was looked at last."""
        trouble = None if standing is None else (standing.redis, standing.tenants, standing.lowered)
        seen = self._quotas.num_edits, verdicts, trouble
        if self._seen == seen:
            return
        is_same_for_all = self._seen[2:] == (trouble,)
        told = {}
        for name, verdict in verdicts.items():
            item = self._quotas.item(name)
            if item is None:
                continue
            told[name] = _generation(item), verdict
            if not is_same_for_all or self._told.get(name) != told[name]:
                self._due[name] = None
        self._seen, self._told = seen, told
        uids = {item["metadata"]["uid"] for item in map(self._quotas.item, told) if item}
        for uid in self._written.keys() - uids:
            del self._written[uid]

    def _before(self, item: Json) -> tuple[TenantQuotaStatus, float]:
        """As it is in the cluster, and when it was written here."""
        uid = item["metadata"]["uid"]
        if uid not in self._written:
            self._written[uid] = from_json(item.get("status")), 0.0
        return self._written[uid]

    async def _write_all(self, found: list[tuple[str, Json, TenantQuotaStatus]]) -> None:
        """A status that cannot be written is no reason to stop; a server that is away is, and a
        quota that was edited meanwhile, which is to hold before others are talked of."""
        unique = {name: (item, status) for name, item, status in found}
        is_answered = True
        for number, (name, (item, status)) in enumerate(islice(unique.items(), MOST_WRITES)):
            if number and self._quotas.has_news:
                break
            try:
                await self._write(item, status)
            except ApiError as error:
                logger.warning("TenantQuota %s: status not written: %s", name, error)
                is_answered = error.status != 0
                if not is_answered:
                    break
            self._due.pop(name, None)
        self.is_behind = is_answered and bool(self._due)

    async def _write(self, quota: Json, status: TenantQuotaStatus) -> None:
        """Raise ApiError."""
        metadata = quota["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.QUOTA_KIND,
            "metadata": {"name": name, "namespace": namespace},
            "status": to_json(status),
        }
        path = QUOTA.path(namespace, name, "status")
        await self._api.apply(path, body, names.STATUS_MANAGER)
        self._written[metadata["uid"]] = (status, self._now_s())


def _generation(item: Json) -> int:
    return int(item["metadata"].get("generation", 0))


def _is_measured(
    before: tuple[TenantQuotaStatus, float], status: TenantQuotaStatus, now_s: float
) -> bool:
    """What a new leader does not know yet takes nothing away."""
    known, at_s = before
    return status.limited != UNKNOWN and status != known and now_s - at_s >= STATUS_S


def _is_news(before: TenantQuotaStatus, status: TenantQuotaStatus) -> bool:
    """What counts change all the time is left out, and what is not known yet."""
    is_known = status.limited != UNKNOWN
    return _in_words(before, is_known) != _in_words(status, is_known)


def _in_words(status: TenantQuotaStatus, with_limited: bool) -> TenantQuotaStatus:
    told = [
        replace(c, message="") if c.type in (LIMITED, LOWERED) else c for c in status.conditions
    ]
    return TenantQuotaStatus(
        observed_generation=status.observed_generation,
        ready=status.ready,
        limited=status.limited if with_limited else UNKNOWN,
        conditions=tuple(c for c in told if with_limited or c.type != LIMITED),
    )
