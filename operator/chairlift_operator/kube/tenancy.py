"""The quotas of all pools, looked after beside the pools: one at rest has tenants too.

A turn for each pool every few seconds, and at once when something changed; the same parts as
`leading`, and nothing of a pool's replicas. `leading` runs it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from chairlift_operator.decisions import Condition
from chairlift_operator.kube.quota_seen import PoolSeen
from chairlift_operator.kube.quota_status import NOT_LISTED
from chairlift_operator.kube.quota_turn import ROUND_S as ROUND_S
from chairlift_operator.kube.quota_turn import PoolQuotas, QuotaTools
from chairlift_operator.kube.watching import PoolKey

logger = logging.getLogger(__name__)

Json = dict[str, Any]
SETTLE_S: Final = 0.1
NUM_AT_ONCE: Final = 16


class Tenancy:
    """pools: a live view of all InferencePools. term: of the leadership, None while not leading.

    is_known: False until TenantQuotas have been listed; before that, none is not known from some.
    on_condition: told of a pool whose condition is another.
    """

    def __init__(
        self,
        tools: QuotaTools,
        pools: Mapping[PoolKey, Json],
        term: Callable[[], int | None],
        is_known: Callable[[], bool],
        on_condition: Callable[[PoolKey], None],
    ) -> None:
        self._tools, self._pools, self._term = tools, pools, term
        self._is_known, self._on_condition = is_known, on_condition
        self._turns: dict[PoolKey, PoolQuotas] = {}
        self._changed: set[PoolKey] = set()
        self._busy: set[PoolKey] = set()
        self._woken = asyncio.Event()
        self._slots = asyncio.Semaphore(NUM_AT_ONCE)
        self._last_term: int | None = None

    def changed(self, key: PoolKey) -> None:
        """Something of the pool's quotas changed, perhaps only their status."""
        known = self._turns.get(key)
        if known is None or known.has_news:
            self.wake(key)

    def wake(self, key: PoolKey) -> None:
        """The pool's turn is now."""
        self._changed.add(key)
        self._woken.set()

    def condition(self, key: PoolKey) -> Condition | None:
        """For the pool's status; None where it has no quotas, or nobody looked yet."""
        known = self._turns.get(key)
        if known is not None:
            return known.condition
        is_asked_for = _keeps_quotas(self._pools.get(key, {}))
        return NOT_LISTED if is_asked_for and not self._is_known() else None

    def weights(self, key: PoolKey) -> Mapping[str, float] | None:
        """Of a pool's tenants; None where nobody looked yet."""
        known = self._turns.get(key)
        return known.weights if known is not None else None

    def saw(self, key: PoolKey, seen: PoolSeen) -> None:
        known = self._turns.get(key)
        if known is None:
            return
        was_idle = known.seen is not None and known.seen.is_idle
        known.seen = seen
        if was_idle != seen.is_idle:
            self.wake(key)

    async def run(self) -> None:
        """Until cancelled."""
        due_s = time.monotonic()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    is_due = time.monotonic() >= due_s
                    if is_due:
                        due_s = time.monotonic() + ROUND_S
                    if self._leads() and self._is_known():
                        self._begin(self._all() if is_due else set(self._changed), tasks)
                        self._tools.keys.keep_only(self._secrets())
                    await self._wait(due_s)
        finally:
            await self._tools.redis.close()

    def _leads(self) -> bool:
        term = self._term()
        if term != self._last_term:
            self._turns.clear()  # what they know is of another term
            self._last_term = term
        return term is not None

    def _all(self) -> set[PoolKey]:
        with_quotas = {key for key, body in self._pools.items() if _keeps_quotas(body)}
        return with_quotas | set(self._tools.quotas.keys()) | set(self._turns)

    def _secrets(self) -> set[tuple[str, str]]:
        return {secret for turn in self._turns.values() for secret in turn.secrets}

    def _begin(self, keys: set[PoolKey], tasks: asyncio.TaskGroup) -> None:
        for key in keys - self._busy:
            self._changed.discard(key)
            self._busy.add(key)
            tasks.create_task(self._turn(key))

    async def _turn(self, key: PoolKey) -> None:
        turn = self._turns.setdefault(key, PoolQuotas(key, self._tools))
        before = turn.condition
        try:
            async with self._slots:
                is_kept = await turn.turn(self._pools.get(key))
            if not is_kept and self._turns.get(key) is turn:
                del self._turns[key]
            if turn.condition != before:
                self._on_condition(key)
            if is_kept and turn.is_behind:
                self.wake(key)
        except Exception:
            logger.exception("%s/%s: this turn of its quotas failed", *key)
        finally:
            self._busy.discard(key)
            if key in self._changed:
                self._woken.set()

    async def _wait(self, due_s: float) -> None:
        """Changes of pools whose turn is not over stay: it may have begun before them."""
        self._woken.clear()
        left_s = max(SETTLE_S, due_s - time.monotonic())
        try:
            async with asyncio.timeout(left_s):
                await self._woken.wait()
        except TimeoutError:
            return
        await asyncio.sleep(SETTLE_S)  # changes come in flurries


def _keeps_quotas(body: Json) -> bool:
    return body.get("spec", {}).get("quotas") is not None
