"""One pool's quotas under one leadership: from its TenantQuotas and their Secrets to Redis and the
gateways, and back to their status.

In this order, so that no tenant is ever without its limits: keys that are gone are taken from
gateways, limits go to Redis, and only then are new keys given.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from chairlift_operator.decisions import Condition
from chairlift_operator.kube import names
from chairlift_operator.kube.api import Api, ApiError
from chairlift_operator.kube.children import Owner
from chairlift_operator.kube.key_reading import KeyReader, SecretKey
from chairlift_operator.kube.objects import PoolObjects, Stores
from chairlift_operator.kube.owning import Foreign
from chairlift_operator.kube.quota_reporting import QuotaReporter
from chairlift_operator.kube.quota_seen import PoolSeen
from chairlift_operator.kube.quota_status import Standing, pool_condition, quota_status
from chairlift_operator.kube.redis_access import RedisStores
from chairlift_operator.kube.settings import Settings
from chairlift_operator.kube.spec_reading import SpecReader
from chairlift_operator.kube.tenants_map import TenantsMap
from chairlift_operator.kube.watching import PoolKey, Store
from chairlift_operator.parsing import SpecError
from chairlift_operator.quota_parsing import parse_quota
from chairlift_operator.quotas.ledger import Ledger, Use
from chairlift_operator.quotas.lowering import Lowering
from chairlift_operator.quotas.roster import Claim, Roster, Verdict, all_refused, roster_of
from chairlift_operator.quotas.store import QuotaStore, StoreError
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_quotas import Quotas
from chairlift_protocol.quota import holder_of
from chairlift_protocol.wire import RequestClass

logger = logging.getLogger(__name__)

Json = dict[str, Any]
Version = tuple[str, int]  # uid and generation of a quota: another one is another spec


@dataclass(frozen=True, slots=True)
class QuotaTools:
    """What the quotas of all pools share. quotas: TenantQuotas by pool. may_write: whether this
    operator leads, asked before anything goes to Redis; `api` asks by itself."""

    api: Api
    stores: Stores
    quotas: Store
    keys: KeyReader
    redis: RedisStores
    settings: Settings
    now_s: Callable[[], float]
    may_write: Callable[[], bool] = lambda: True


class PoolQuotas:
    """condition: for the pool's status; None where it has no quotas. weights: of its tenants; None
    before they are known.
    """

    def __init__(self, key: PoolKey, tools: QuotaTools) -> None:
        self.key = key
        self.condition: Condition | None = None
        self.weights: Mapping[str, float] | None = None
        self.seen: PoolSeen | None = None
        self._tools = tools
        self._objects = PoolObjects(key, tools.stores)
        self._reader = SpecReader()
        self._pool: InferencePool | None = None
        self._store: QuotaStore | None = None
        self._ledger = Ledger()
        self._lowering = Lowering()
        self._reporter = QuotaReporter(tools.api, tools.now_s)
        self._parsed: dict[Version, Claim] = {}

    @property
    def secrets(self) -> set[SecretKey]:
        """Those that its quotas name."""
        return {(self.key[0], name) for name in _secrets(self._parsed.values())}

    @property
    def has_news(self) -> bool:
        """Whether its quotas are others than at the last turn; a status of theirs is no news."""
        items = self._tools.quotas.of(self.key).values()
        return {_version(item) for item in items} != self._parsed.keys()

    async def turn(self, body: Json | None) -> bool:
        """body: the pool, None where there is none. False: nothing is left to be looked after."""
        items = dict(self._tools.quotas.of(self.key))  # as they are now: others may come meanwhile
        known = self._parsed.keys()
        claims = self._claims(items)
        fresh = _secrets(self._parsed[version] for version in self._parsed.keys() - known)
        pool = self._accepted(body)
        tenants = self._tenants(body) if pool is not None and body is not None else None
        if pool is None or pool.spec.quotas is None or tenants is None:
            self.condition, self.weights = None, {}
            await self._forget(pool, tenants)
            reason, told = _why_none(self.key[1], pool)
            await self._report(items, all_refused(claims, reason, told), None)
            return bool(items) or self._store is not None
        try:
            roster, standing = await self._enforce(pool, pool.spec.quotas, claims, fresh, tenants)
        except Foreign as error:
            logger.warning("%s/%s: its quotas are not looked after: %s", *self.key, error)
            return True
        self.condition, self.weights = pool_condition(standing), roster.weights
        await self._report(items, roster.verdicts, standing)
        return True

    def _accepted(self, body: Json | None) -> InferencePool | None:
        """As it was, while its spec cannot be followed."""
        if body is None:
            self._pool = None
            return None
        try:
            self._pool = self._reader.read(body)
        except SpecError:
            return self._pool
        return self._pool

    def _claims(self, items: Mapping[str, Json]) -> list[Claim]:
        """Each spec is parsed once."""
        known, self._parsed = self._parsed, {}
        for item in items.values():
            version = _version(item)
            self._parsed[version] = known.get(version) or _claim(item)
        return list(self._parsed.values())

    async def _enforce(
        self,
        pool: InferencePool,
        quotas: Quotas,
        claims: list[Claim],
        fresh: set[str],
        tenants: TenantsMap,
    ) -> tuple[Roster, Standing]:
        """fresh: Secrets that changed quotas name. Raise Foreign where the pool is another
        operator's."""
        named = _secrets(claims)
        secrets = await self._tools.keys.read(self.key[0], named, fresh)
        roster = roster_of(claims, secrets)
        standing = Standing(len(claims), quotas.on_redis_failure)
        unread = [name for name, read in secrets.items() if read is None]
        if unread:
            standing = replace(standing, tenants=f"Secret {unread[0]} could not be read yet")
        else:
            standing = await _written(tenants.take(pool, roster.tenants), standing)
        try:
            await self._sync(quotas, roster)
        except StoreError as error:
            self._tools.redis.failed(self.key)
            standing = replace(standing, redis=str(error))
        standing = replace(standing, lowered=self._lowering.classes)
        if standing.redis is None and standing.tenants is None:
            standing = await _written(tenants.write(pool, roster.tenants), standing)
        return roster, standing

    async def _sync(self, quotas: Quotas, roster: Roster) -> None:
        seen = self._fresh()
        is_idle = seen is not None and seen.is_idle
        strain = seen.strain if seen is not None else None
        rates = self._lowering.turn(roster, self._ledger, strain, self._tools.now_s())
        if not self._tools.may_write():
            raise StoreError("this operator does not lead, or not any more")
        self._store = await self._tools.redis.of(self.key, quotas.redis)
        counts = await self._store.sync(
            "/".join(self.key), roster.limits, roster.holders, is_idle=is_idle, rates=rates
        )
        self._ledger.note(self._tools.now_s(), counts)

    def _fresh(self) -> PoolSeen | None:
        """What is not fresh is not known."""
        seen = self.seen
        return seen if seen is not None and seen.is_fresh(self._tools.now_s()) else None

    def _tenants(self, body: Json) -> TenantsMap:
        owner = Owner(body["metadata"]["uid"], self._tools.settings.operator)
        return TenantsMap(self._objects, self._tools.api, owner)

    async def _forget(self, pool: InferencePool | None, tenants: TenantsMap | None) -> None:
        """A pool that is gone, or limits nobody any more, leaves no limits and no keys."""
        if self._store is None:
            return
        try:
            await self._store.forget("/".join(self.key))
            if pool is not None and tenants is not None:
                await tenants.remove(pool)
        except (StoreError, ApiError, Foreign) as error:
            logger.warning("%s/%s: its limits and keys are still kept: %s", *self.key, error)
            return
        self._store = None
        await self._tools.redis.drop(self.key)

    async def _report(
        self, items: Mapping[str, Json], verdicts: Mapping[str, Verdict], standing: Standing | None
    ) -> None:
        now_s = self._tools.now_s()
        for name, item in items.items():
            verdict = verdicts[name]
            use = {c: self._use(verdict.tenant, c, now_s) for c in RequestClass}
            status = quota_status(
                verdict,
                standing,
                use,
                self._slot_share([each.num_running for each in use.values()]),
                self._reporter.written(item),
                int(item["metadata"].get("generation", 0)),
                now_s,
            )
            await self._reporter.write(item, status)
        self._reporter.keep_only({item["metadata"]["uid"] for item in items.values()})

    def _use(self, tenant: str | None, request_class: RequestClass, now_s: float) -> Use:
        if tenant is None:
            return Use()
        holder = holder_of(tenant, request_class)
        return replace(self._ledger.use(holder, now_s), lowered_to=self._lowering.rate(holder))

    def _slot_share(self, num_running: list[int | None]) -> float | None:
        known = [number for number in num_running if number is not None]
        seen = self._fresh()
        num_slots = seen.num_slots if seen is not None else None
        if len(known) < len(num_running) or not num_slots:
            return None
        return min(1.0, sum(known) / num_slots)


def _version(item: Json) -> Version:
    return item["metadata"]["uid"], int(item["metadata"].get("generation", 0))


def _secrets(claims: Iterable[Claim]) -> set[str]:
    specs = [claim.spec for claim in claims if claim.spec is not None]
    return {source.secret for spec in specs for source in spec.keys}


def _claim(item: Json) -> Claim:
    metadata = item["metadata"]
    document = {
        "apiVersion": names.API_VERSION,
        "kind": names.QUOTA_KIND,
        "metadata": {name: metadata[name] for name in ("name", "namespace")},
        "spec": item.get("spec"),
    }
    created = str(metadata.get("creationTimestamp", ""))
    try:
        return Claim(metadata["name"], created, parse_quota(document).spec)
    except SpecError as error:
        return Claim(metadata["name"], created, None, " ".join(error.problems))


def _why_none(name: str, pool: InferencePool | None) -> tuple[str, str]:
    if pool is None:
        told = f"There is no InferencePool {name} here whose spec can be followed: make it"
        return "PoolNotFound", told
    return "QuotasOff", f"InferencePool {name} keeps no quotas: add spec.quotas.redis.url to it"


async def _written(work: Awaitable[None], standing: Standing) -> Standing:
    """Raise Foreign where the pool is another operator's."""
    try:
        await work
    except ApiError as error:
        return replace(standing, tenants=str(error))
    except Foreign as error:
        if error.is_operator:
            raise
        return replace(standing, tenants=str(error))
    return standing
