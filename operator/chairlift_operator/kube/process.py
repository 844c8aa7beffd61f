"""The operator's task in Kopf's event loop: begun, ended, and how it is; for `handlers`."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import time
from typing import Any, Final

from chairlift_operator.kube.leading import Operator, Pools
from chairlift_operator.kube.settings import REQUEST_S, Settings
from chairlift_operator.kube.starting import CannotOperate
from chairlift_operator.kube.watching import PoolKey

logger = logging.getLogger(__name__)

# A loop that has not turned for so long hangs: restarting it costs no stream.
HANGING_S: Final = 120.0
# Objects of a thousand pools are a million for the collector to look at, and none is a cycle: by
# Python's own thresholds that was a fifth of the processor time at rest, in stops of a second.
GC_THRESHOLDS: Final = (10_000, 20, 100)
NUM_FILES: Final = 65_536  # each pool keeps a few connections open


class OperatorProcess:
    """One a process; `start` before anything else."""

    def __init__(self) -> None:
        self._operator: Operator | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, settings: Settings, pools: Pools) -> None:
        gc.set_threshold(*GC_THRESHOLDS)
        _allow_many_connections()
        operator = self._operator = Operator(settings, pools)
        operator.metrics.serve(settings.metrics_port)
        self._task = asyncio.create_task(operator.run())
        self._task.add_done_callback(_end_process)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.remove_done_callback(_end_process)
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=REQUEST_S)

    def wake(self, key: PoolKey) -> None:
        if self._operator is not None:
            self._operator.wake(key)

    def health(self) -> dict[str, Any]:
        """RuntimeError, and with it a failed liveness probe, when the loop hangs."""
        operator = self._operator
        if operator is None:
            return {"state": "starting"}
        silent_s = time.monotonic() - operator.turned_at_s
        if silent_s > HANGING_S:
            raise RuntimeError(f"the loop has not turned for {silent_s:.0f} s")
        is_leading = operator.lease is not None and operator.lease.is_held()
        return {"leading": is_leading, "synced": operator.is_synced}


def _allow_many_connections() -> None:
    """The soft limit may be 1,024, which is for programs that use select()."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < NUM_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(NUM_FILES, most)), most))


def _end_process(task: asyncio.Task[None]) -> None:
    """Kopf would go on without us."""
    if not task.cancelled() and (error := task.exception()) is not None:
        trace = None if isinstance(error, CannotOperate) else error
        logger.error("the operator's loop ended: %s", error, exc_info=trace)
    os.kill(os.getpid(), signal.SIGTERM)
