"""One pool's quotas under one leadership: from its TenantQuotas and their Secrets to Redis and the
gateways, and back to their status.

In this order, so that no tenant is ever without its limits: keys that are gone are taken from
gateways, limits go to Redis, and only then are new keys given.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from chairlift_operator.decisions import Condition
from chairlift_operator.kube.api import Api, ApiError
from chairlift_operator.kube.children import Owner
from chairlift_operator.kube.key_reading import KeyReader, Reading, SecretKey
from chairlift_operator.kube.objects import PoolObjects, Stores
from chairlift_operator.kube.owning import Foreign
from chairlift_operator.kube.quota_claims import QuotaClaims
from chairlift_operator.kube.quota_reporting import QuotaReporter
from chairlift_operator.kube.quota_seen import PoolSeen
from chairlift_operator.kube.quota_status import Standing, pool_condition, quota_status
from chairlift_operator.kube.redis_access import RedisStores
from chairlift_operator.kube.settings import Settings
from chairlift_operator.kube.spec_reading import SpecReader
from chairlift_operator.kube.tenants_map import TenantsMap
from chairlift_operator.kube.watching import PoolKey, Store
from chairlift_operator.parsing import SpecError
from chairlift_operator.quota_status_model import TenantQuotaStatus
from chairlift_operator.quotas.ledger import Ledger, Use
from chairlift_operator.quotas.lowering import Lowering
from chairlift_operator.quotas.roster import Roster, Verdict, all_refused, roster_of
from chairlift_operator.quotas.store import QuotaStore, StoreError
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_quotas import Quotas
from chairlift_protocol.quota import holder_of
from chairlift_protocol.wire import RequestClass

logger = logging.getLogger(__name__)

Json = dict[str, Any]
# A changed Secret, which nobody tells of, and a Redis that lost its data are found within this.
ROUND_S: Final = 4.0
# What so many use is read back in a turn, of more in turn: two commands for each class.
MEASURED_A_TURN: Final = 500


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
    before they are known. is_behind: after a turn, whether the next is not to wait for its time.
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
        self._claims = QuotaClaims(key, tools.quotas)
        self._reporter = QuotaReporter(tools.api, tools.now_s, self._claims)
        self._roster: tuple[tuple[int, int], Roster] | None = None
        self._next_part = 0
        self.is_behind = False

    @property
    def secrets(self) -> frozenset[SecretKey]:
        """Those that its quotas name."""
        return self._claims.secret_keys

    @property
    def has_news(self) -> bool:
        """Whether its quotas are others than at the last turn; a status of theirs is no news."""
        return self._claims.has_news

    async def turn(self, body: Json | None) -> bool:
        """body: the pool, None where there is none. False: nothing is left to be looked after."""
        fresh = self._claims.take()
        self.is_behind = False
        pool = self._accepted(body)
        tenants = self._tenants(body) if pool is not None and body is not None else None
        if pool is None or pool.spec.quotas is None or tenants is None:
            self.condition, self.weights = None, {}
            await self._forget(pool, tenants)
            reason, told = _why_none(self.key[1], pool)
            await self._report(all_refused(self._claims.all, reason, told), None, ())
            return bool(self._claims.all) or self._store is not None
        try:
            roster, standing, part = await self._enforce(pool, pool.spec.quotas, fresh, tenants)
        except Foreign as error:
            logger.warning("%s/%s: its quotas are not looked after: %s", *self.key, error)
            return True
        self.condition, self.weights = pool_condition(standing), roster.weights
        await self._report(roster.verdicts, standing, part)
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

    async def _enforce(
        self, pool: InferencePool, quotas: Quotas, fresh: frozenset[str], tenants: TenantsMap
    ) -> tuple[Roster, Standing, Sequence[str]]:
        """fresh: Secrets that changed quotas name. Returns, too, which quotas were measured. Raise
        Foreign where the pool is another operator's."""
        reading = await self._tools.keys.read(self.key[0], self._claims.secrets, fresh)
        self.is_behind = reading.is_cut
        roster = self._roster_of(reading)
        part = self._part_of(roster)
        standing = Standing(len(roster.verdicts), quotas.on_redis_failure)
        unread = next((name for name, read in reading.secrets.items() if read is None), None)
        if unread is not None:
            standing = replace(standing, tenants=f"Secret {unread} could not be read yet")
        else:
            standing = await _written(tenants.take(pool, roster.keys), standing)
        try:
            await self._sync(quotas, roster, part)
        except StoreError as error:
            self._tools.redis.failed(self.key)
            standing = replace(standing, redis=str(error))
        standing = replace(standing, lowered=self._lowering.classes)
        if standing.redis is None and standing.tenants is None:
            standing = await _written(tenants.write(pool, roster.keys), standing)
        return roster, standing, part

    def _roster_of(self, reading: Reading) -> Roster:
        """Made anew only where quotas or keys are others."""
        basis = self._claims.num_edits, self._tools.keys.num_changes
        if self._roster is None or self._roster[0] != basis:
            roster = roster_of(self._claims.all, reading.secrets)
            self._roster = basis, roster
            self._ledger.keep_only(set(roster.holders(roster.verdicts)))
        return self._roster[1]

    def _part_of(self, roster: Roster) -> Sequence[str]:
        """Those quotas whose turn it is to be measured."""
        quotas = list(roster.verdicts)
        begin = self._next_part if self._next_part < len(quotas) else 0
        self._next_part = begin + MEASURED_A_TURN
        return quotas[begin : self._next_part]

    async def _sync(self, quotas: Quotas, roster: Roster, part: Sequence[str]) -> None:
        seen, every_s = self._fresh(), _every_s(roster.verdicts)
        is_idle = seen is not None and seen.is_idle
        strain = seen.strain if seen is not None else None
        rates = self._lowering.turn(roster, self._ledger, strain, self._tools.now_s(), every_s)
        if not self._tools.may_write():
            raise StoreError("this operator does not lead, or not any more")
        self._store = await self._tools.redis.of(self.key, quotas.redis)
        # Those whose rates are moved are measured each time, as far as they are not too many.
        asking = islice(self._ledger.asking(), MEASURED_A_TURN)
        holders = tuple(dict.fromkeys((*roster.holders(part), *asking)))
        counts = await self._store.sync(
            "/".join(self.key), roster.limits, holders, is_idle=is_idle, rates=rates
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
        self, verdicts: Mapping[str, Verdict], standing: Standing | None, part: Sequence[str]
    ) -> None:
        now_s = self._tools.now_s()
        every_s = _every_s(verdicts)

        def status_of(name: str, item: Json, before: TenantQuotaStatus) -> TenantQuotaStatus:
            use = {c: self._use(verdicts[name].tenant, c, now_s, every_s) for c in RequestClass}
            share = self._slot_share([each.num_running for each in use.values()])
            generation = int(item["metadata"].get("generation", 0))
            return quota_status(verdicts[name], standing, use, share, before, generation, now_s)

        await self._reporter.report(verdicts, standing, part, status_of)
        self.is_behind |= self._reporter.is_behind

    def _use(
        self, tenant: str | None, request_class: RequestClass, now_s: float, every_s: float
    ) -> Use:
        if tenant is None:
            return Use()
        holder = holder_of(tenant, request_class)
        use = self._ledger.use(holder, now_s, every_s)
        return replace(use, lowered_to=self._lowering.rate(holder))

    def _slot_share(self, num_running: list[int | None]) -> float | None:
        known = [number for number in num_running if number is not None]
        seen = self._fresh()
        num_slots = seen.num_slots if seen is not None else None
        if len(known) < len(num_running) or not num_slots:
            return None
        return min(1.0, sum(known) / num_slots)


def _every_s(quotas: Sized) -> float:
    """How often each of so many is measured."""
    return ROUND_S * -(-len(quotas) // MEASURED_A_TURN)


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
