"""From a changed spec to a changed Deployment: how long, seen as anybody sees it, by a watch.

Every other change is one that starts no engine anew (the gateway's replicas), the rest are ones
that do (a larger batch to reserve memory for). One pool is changed once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from chairlift_operator.kube import names
from chairlift_operator.kube.api import Api
from chairlift_operator.kube.paths import DEPLOYMENT, POOL
from chairlift_operator.kube.watching import SELECTOR
from chairlift_protocol.wire import RequestClass

Json = dict[str, Any]
APART_S: Final = 0.5
WITHIN_S: Final = 60.0
BATCH_SIZE: Final = 64
GATEWAYS: Final = 2


async def apply_times_s(api: Api, pools: Sequence[tuple[str, str]]) -> list[float]:
    """From before the request that changes a spec to the event of its Deployment; one a pool."""
    listed = await api.list(DEPLOYMENT.path(), SELECTOR)
    known = {(d["metadata"]["namespace"], d["metadata"]["name"]): d for d in listed.items}
    awaited: dict[tuple[str, str], tuple[Callable[[Json], bool], asyncio.Future[float]]] = {}
    following = asyncio.create_task(_follow(api, listed.resource_version, awaited))
    begun, ended = [], []
    for number, (namespace, pool) in enumerate(pools):
        change, name = _change(pool, is_gateway=number % 2 == 0)
        before = known[namespace, name]["spec"]
        seen = asyncio.get_running_loop().create_future()
        awaited[namespace, name] = (_is_changed(before), seen)
        begun.append(time.monotonic())
        ended.append(seen)
        await api.patch(POOL.path(namespace, pool), {"spec": change}, "bench")
        await asyncio.sleep(APART_S)
    async with asyncio.timeout(WITHIN_S):
        times_s = [at_s - start_s for at_s, start_s in zip(await asyncio.gather(*ended), begun,
                   strict=True)]  # fmt: skip
    following.cancel()
    return times_s


def _change(pool: str, is_gateway: bool) -> tuple[Json, str]:
    """The part of a spec, and the Deployment that follows it."""
    if is_gateway:
        return {"gateway": {"replicas": GATEWAYS}}, names.gateway(pool)
    change = {"interactive": {"batchSize": {"max": BATCH_SIZE}}}
    return change, names.engines(pool, RequestClass.INTERACTIVE)


def _is_changed(before: Json) -> Callable[[Json], bool]:
    """In what it runs or how many; a rollout's own marks are none."""
    return lambda spec: any(spec[part] != before[part] for part in ("replicas", "template"))


async def _follow(
    api: Api,
    version: str,
    awaited: dict[tuple[str, str], tuple[Callable[[Json], bool], asyncio.Future[float]]],
) -> None:
    async for event in api.watch(DEPLOYMENT.path(), SELECTOR, version):
        metadata = event.object["metadata"]
        key = metadata.get("namespace", ""), metadata.get("name", "")
        if key in awaited and awaited[key][0](event.object["spec"]) and not awaited[key][1].done():
            awaited[key][1].set_result(time.monotonic())
