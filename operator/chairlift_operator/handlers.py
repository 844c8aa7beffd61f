"""Kopf's view of the operator: `kopf run -m chairlift_operator.handlers`. All decorators are here.

No change handlers, timers or daemons: standbys would write annotations, and finalizers would leave
pools stuck where the operator was uninstalled first. The loop in `kube.leading` does the work.
"""

from __future__ import annotations

from typing import Any, Final

import kopf

from chairlift_operator.kube import names
from chairlift_operator.kube.access import connection
from chairlift_operator.kube.kopf_side import PoolIndex, configure, slim
from chairlift_operator.kube.process import OperatorProcess
from chairlift_operator.kube.settings import Settings, SettingsError

POOLS: Final = (names.GROUP, names.VERSION, names.PLURAL)
process: Final = OperatorProcess()


@kopf.on.login()
async def login(settings: kopf.OperatorSettings, **_: Any) -> kopf.ConnectionInfo:
    return connection(settings)


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, **indices: Any) -> None:
    configure(settings)
    try:
        process.start(Settings.from_environment(), PoolIndex(indices["pools"]))
    except SettingsError as error:
        raise kopf.PermanentError(str(error)) from error


@kopf.on.cleanup()
async def stop(**_: Any) -> None:
    await process.stop()


@kopf.index(*POOLS)
async def pools(namespace: str | None, name: str, body: kopf.Body, **_: Any) -> dict[Any, Any]:
    return {(namespace, name): slim(body)}


@kopf.on.event(*POOLS)
async def changed(namespace: str | None, name: str, **_: Any) -> None:
    process.wake((namespace or "", name))


@kopf.on.probe(id="operator")
async def probe(**_: Any) -> dict[str, Any]:
    return process.health()
