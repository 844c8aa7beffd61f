"""Who leads: a Lease that one holder renews, checked before every write.

Another holder's renewals are timed by our own clock, from when we saw them: clocks differ. The term
of a leadership is one more than that of any before, so engines refuse a deposed leader's policies.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from chairlift_operator.kube import names
from chairlift_operator.kube.api import Api, ApiError
from chairlift_operator.kube.paths import LEASE
from chairlift_operator.kube.pod_view import unix_s
from chairlift_operator.kube.settings import DEADLINE_S, LEASE_S, RENEW_S

logger = logging.getLogger(__name__)

Json = dict[str, Any]


class Lease:
    """`is_held` may be trusted until the next await: it is false before anybody else can lead.

    term: while it is held, of this leadership; else the latest that was seen.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        identity: str,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._path = LEASE.path(namespace, name)
        self._folder = LEASE.path(namespace)
        self._name, self._namespace = name, namespace
        self._identity = identity
        self._now_s = now_s
        self._renewed_at_s: float | None = None
        self._seen: tuple[str, float] = ("", now_s())
        self.term = 0

    def is_held(self) -> bool:
        return self._renewed_at_s is not None and self._now_s() - self._renewed_at_s < DEADLINE_S

    async def run(self) -> None:
        """Try to lead, or to go on leading, until cancelled."""
        while True:
            was_held = self.is_held()
            try:
                await self.step()
            except ApiError as error:
                logger.warning("lease: %s", error)
            if self.is_held() is not was_held:
                state = f"leading, term {self.term}" if self.is_held() else "not leading"
                logger.info("%s is %s", self._identity, state)
            await asyncio.sleep(RENEW_S if self.is_held() else RENEW_S / 2)

    async def step(self) -> None:
        """Renew what is ours, take what nobody holds."""
        started_s = self._now_s()
        lease = await self._api.find(self._path)
        if lease is None:
            if self._renewed_at_s is not None or not self._was_anothers():
                await self._written(self._create(), started_s)
            return
        spec = lease["spec"]
        if self._renewed_at_s is None:  # else it is ours to say
            self.term = max(self.term, int(spec.get("leaseTransitions") or 0))
        if spec.get("holderIdentity") == self._identity:
            # A process of this name led before: it is a new leadership all the same.
            is_new = self._renewed_at_s is None
            await self._written(self._replace(lease, is_new), started_s)
        elif self._is_free(lease):
            await self._written(self._replace(lease, is_new=True), started_s)
        else:
            self._renewed_at_s = None

    async def release(self) -> None:
        """Let a standby lead at once."""
        if not self.is_held():
            return
        self._renewed_at_s = None
        lease = await self._api.find(self._path)
        if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
            lease["spec"]["holderIdentity"] = ""
            await self._api.replace(self._path, lease, names.LEASE_MANAGER)

    def _was_anothers(self) -> bool:
        """So lately that its holder may not know yet that somebody deleted it."""
        version, since_s = self._seen
        return bool(version) and self._now_s() - since_s <= LEASE_S

    def _is_free(self, lease: Json) -> bool:
        spec = lease["spec"]
        if not spec.get("holderIdentity"):
            return True
        version = lease["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = (version, self._now_s())
        return self._now_s() - self._seen[1] > float(spec.get("leaseDurationSeconds", LEASE_S))

    async def _written(self, writing: Awaitable[Json], started_s: float) -> None:
        try:
            lease = await writing
        except ApiError as error:
            if not error.is_conflict:  # somebody else was quicker
                raise
            self._renewed_at_s = None
            return
        self.term = lease["spec"]["leaseTransitions"]
        self._renewed_at_s = started_s

    async def _create(self) -> Json:
        # Not from 0: where a Lease was deleted, engines remember the terms of the one before.
        term = max(_minutes(time.time()), self.term + 1)
        spec = {**self._ours(), "acquireTime": _now(), "leaseTransitions": term}
        metadata = {"name": self._name, "namespace": self._namespace}
        manifest = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }
        return await self._api.create(self._folder, manifest, names.LEASE_MANAGER)

    async def _replace(self, lease: Json, is_new: bool) -> Json:
        spec = {**lease["spec"], **self._ours(), "leaseTransitions": self.term}
        if is_new:
            spec["acquireTime"] = spec["renewTime"]
            spec["leaseTransitions"] = max(_term_before(lease), self.term) + 1
        return await self._api.replace(self._path, {**lease, "spec": spec}, names.LEASE_MANAGER)

    def _ours(self) -> Json:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(LEASE_S),
            "renewTime": _now(),
        }


def _term_before(lease: Json) -> int:
    """Of the last leadership; where somebody wrote a lower number by hand, the time is above it."""
    term = int(lease["spec"].get("leaseTransitions") or 0)
    least = _minutes(unix_s(lease["metadata"].get("creationTimestamp")))
    return term if term >= least else _minutes(time.time())


def _minutes(since_1970_s: float) -> int:
    """They outrun any number of handovers."""
    return int(since_1970_s / 60)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
