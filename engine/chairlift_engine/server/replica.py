"""What the HTTP apps know of this replica: its phase, its health and its load.

Lives on the event loop. Reads the engine's heartbeat and failure; steps nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

from chairlift_engine.clock import Clock
from chairlift_engine.config import Capacity
from chairlift_engine.engine import Engine
from chairlift_engine.server.body_reader import BodyMemory
from chairlift_engine.server.bridge import Bridge
from chairlift_engine.server.door import Door
from chairlift_engine.server.errors import ApiError, draining, engine_gone, loading, refusal_of
from chairlift_engine.server.metrics import Metrics
from chairlift_engine.server.order import OrderTaker
from chairlift_engine.server.usage_book import UsageBook
from chairlift_engine.tokenizer import Tokenizer
from chairlift_protocol.load import Load
from chairlift_protocol.policy import Policy

# The idle loop beats twice a second. A busy one beats once a step, and a step of a large model on a
# slow CPU takes a minute: killing that replica would only lose its requests.
STALE_IDLE_S: Final = 30.0
STALE_BUSY_S: Final = 300.0
# An answer from the engine's thread comes between two steps.
ENGINE_ANSWER_S: Final = 60.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Serving:
    """Everything there is once the model has been loaded."""

    model_name: str
    tokenizer: Tokenizer
    capacity: Capacity
    engine: Engine
    bridge: Bridge
    metrics: Metrics
    door: Door
    orders: OrderTaker
    pool: ThreadPoolExecutor
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @property
    def policy(self) -> Policy:
        """What is in force."""
        return self.engine.scheduler.policy

    async def in_pool(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    async def in_turn(self, work: Callable[[], T]) -> T:
        """For what starts no request: one at a time, so that prompts find the pool free."""
        async with self._turn:
            return await self.in_pool(work)

    async def answered(self, future: Future[T]) -> T:
        """What the engine's thread makes of a command."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), ENGINE_ANSWER_S)
        except TimeoutError:
            raise ApiError(503, "the engine is busy with one long step; try again") from None


class Replica:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._serving: Serving | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.bodies = BodyMemory()
        self.usage = UsageBook()
        self.draining = False
        self.num_in_flight = 0

    def begin(self, serving: Serving) -> None:
        self._serving = serving

    @property
    def serving(self) -> Serving:
        """Raises ApiError while there is no engine to speak to."""
        if self._serving is None:
            raise loading()
        if self._serving.engine.failure is not None:
            raise engine_gone()
        return self._serving

    @property
    def model_name(self) -> str | None:
        return None if self._serving is None else self._serving.model_name

    @property
    def is_alive(self) -> bool:
        """Also while loading; not when the engine died or its loop stands still."""
        if self._serving is None:
            return True
        engine = self._serving.engine
        limit_s = STALE_BUSY_S if self._serving.bridge.num_open else STALE_IDLE_S
        return engine.failure is None and self._clock.now_s() - engine.heartbeat_s <= limit_s

    @property
    def not_ready_because(self) -> str | None:
        """None when new work is welcome. However full the engine is, it is ready."""
        if self.draining:
            return "draining"
        if self._serving is None:
            return "loading"
        return None if self.is_alive else "the engine does not step"

    @property
    def load(self) -> Load | None:
        """None while the model loads: nothing is known yet, which is not the same as idle."""
        if self._serving is None:
            return None
        gauges, policy = self._serving.bridge.gauges, self._serving.policy
        return Load(
            num_running=sum(gauges.num_running.values()),
            num_waiting=sum(gauges.num_waiting.values()),
            waiting_prefill_tokens=gauges.waiting_prefill_tokens,
            free_kv_tokens=gauges.num_free_blocks * self._serving.capacity.block_tokens,
            lend_share=policy.batch_class_share,
            policy_generation=(policy.generation.term, policy.generation.counter),
            draining=self.draining,
        )

    def check_open(self) -> Serving:
        """Raise ApiError when new work is not taken."""
        if self.draining:
            raise draining()
        return self.serving

    @contextmanager
    def admitted(self) -> Iterator[Serving]:
        """Counts a request as in flight until it has been answered; a drain waits for it."""
        serving = self.check_open()
        self.num_in_flight += 1
        self._idle.clear()
        try:
            yield serving
        finally:
            self.num_in_flight -= 1
            if self.num_in_flight == 0:
                self._idle.set()

    def observe_error(self, error: ApiError) -> None:
        """Count what was refused; while loading there is nobody to ask for the count."""
        if self._serving is not None and (reason := refusal_of(error)) is not None:
            self._serving.metrics.observe_refusal(reason)

    async def wait_idle(self) -> None:
        await self._idle.wait()
