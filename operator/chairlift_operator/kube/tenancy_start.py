"""The parts of `tenancy` put together for an operator's life: what it watches, reads and writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from chairlift_operator.kube.api import Api
from chairlift_operator.kube.key_reading import KeyReader
from chairlift_operator.kube.lease import Lease
from chairlift_operator.kube.objects import Stores
from chairlift_operator.kube.paths import QUOTA
from chairlift_operator.kube.quota_turn import QuotaTools
from chairlift_operator.kube.redis_access import RedisStores
from chairlift_operator.kube.settings import Settings
from chairlift_operator.kube.tenancy import Tenancy
from chairlift_operator.kube.watching import PoolKey, Reflector, Store
from chairlift_operator.quotas.store import RedisStore

Json = dict[str, Any]


def start_tenancy(
    api: Api,
    lease: Lease,
    stores: Stores,
    settings: Settings,
    pools: Mapping[PoolKey, Json],
    now_s: Callable[[], float],
    wake: Callable[[PoolKey], None],
    tasks: asyncio.TaskGroup,
) -> Tenancy:
    """Runs until the tasks end. Pools are served where there is no CRD of TenantQuotas, too.

    api: writes only while the lease is held. wake: a pool's controller.
    """
    quotas = Store(lambda key: tenancy.changed(key), _pool_of)
    reflectors = [
        Reflector(api, QUOTA, quotas, namespace, selector="")
        for namespace in settings.namespaces or (None,)
    ]
    redis = RedisStores(api, now_s, RedisStore)
    tools = QuotaTools(
        api, stores, quotas, KeyReader(api, now_s), redis, settings, now_s, lease.is_held
    )
    tenancy = Tenancy(
        tools,
        pools,
        lambda: lease.term if lease.is_held() else None,
        lambda: all(reflector.is_synced.is_set() for reflector in reflectors),
        wake,
    )
    for work in (*(reflector.run() for reflector in reflectors), tenancy.run()):
        tasks.create_task(work)
    return tenancy


def _pool_of(quota: Json) -> PoolKey:
    """One that no CRD of ours let in names no pool, and is told what is wrong with it."""
    try:
        name = str(quota["spec"]["poolRef"]["name"])
    except (KeyError, TypeError):
        name = ""
    return quota["metadata"]["namespace"], name
