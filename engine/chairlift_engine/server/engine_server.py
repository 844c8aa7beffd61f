"""One replica's life: ports up, model loaded, serving, drained, gone; then its exit code.

Two uvicorn servers (public, admin) share the event loop; the engine steps in a thread of its own
and the model loads in another. Knows no model and no command line: `load` is handed in.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import uvicorn

from chairlift_engine.clock import Clock
from chairlift_engine.config import Capacity
from chairlift_engine.engine import Engine
from chairlift_engine.runner import Runner
from chairlift_engine.scheduler import Scheduler
from chairlift_engine.server.admin import admin_app
from chairlift_engine.server.bridge import Bridge
from chairlift_engine.server.door import Bounds, Door
from chairlift_engine.server.metrics import Metrics
from chairlift_engine.server.order import OrderTaker
from chairlift_engine.server.public import public_app
from chairlift_engine.server.replica import Replica, Serving
from chairlift_engine.tokenizer import Tokenizer
from chairlift_protocol.policy import Generation, Policy, SloThresholds

logger = logging.getLogger(__name__)

# Every thread that could outlive the loop is named so, and the entry point asks for them.
THREAD_PREFIX: Final = "chairlift-"
DRAIN_S: Final = 600.0
NUM_TOKENISERS: Final = 2
KEEP_ALIVE_S: Final = 75  # longer than the gateway's pool keeps it, so that the client closes first
FLUSH_S: Final = 5  # for what is still in socket buffers when the last answer is complete
DEAD_FLUSH_S: Final = 1
DEAD_NOTICE_S: Final = 0.5  # a dead engine's streams get their errors, and probes their 503
STOP_S: Final = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What `load` brings: everything that depends on the model.

    policy: in force from the first step on; None for all of the capacity.
    """

    runner: Runner
    tokenizer: Tokenizer
    capacity: Capacity
    eos_token_ids: frozenset[int]
    policy: Policy | None = None


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """A token that is None is held by nobody: no call with it can succeed."""

    model_name: str
    engine_id: str = "0"
    drain_s: float = DRAIN_S
    admin_token: str | None = None
    internal_token: str | None = None
    bounds: Bounds = Bounds()


def initial_policy(capacity: Capacity) -> Policy:
    """All of the capacity, until somebody who knows better writes a policy."""
    return Policy(
        generation=Generation(0, 0),
        batch_size=capacity.batch_size,
        step_tokens=capacity.step_tokens,
        chunk_tokens=capacity.step_tokens,
        batch_class_share=1.0,
        slo=SloThresholds(ttft_ms=1000.0, itl_ms=100.0),
    )


class EngineServer:
    """Make it inside a running event loop."""

    def __init__(
        self, settings: ServerSettings, load: Callable[[], LoadedModel], clock: Clock
    ) -> None:
        self.replica = Replica(clock)
        self._settings = settings
        self._load = load
        self._clock = clock
        self._stop = asyncio.Event()
        self._servers = [
            _server(public_app(self.replica, settings.internal_token, clock)),
            _server(admin_app(self.replica, settings.admin_token, clock)),
        ]

    async def run(
        self, public: socket.socket, admin: socket.socket, on_bound: Callable[[], None]
    ) -> int:
        """Serve on the two bound sockets until stopped; what `load` raises is raised again."""
        sockets = (public, admin)
        for sock in sockets:
            # Connections inherit it; asyncio sets it only where the socket names its protocol.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tasks = [
            asyncio.create_task(server.serve(sockets=[sock]))
            for server, sock in zip(self._servers, sockets, strict=True)
        ]
        try:
            await asyncio.gather(*(server.bound.wait() for server in self._servers))
            on_bound()
            return await self._live()
        finally:
            for server in self._servers:
                server.should_exit = True
            await asyncio.gather(*tasks)
            for server in self._servers:
                server.cut()

    def handle_signals(self) -> None:
        """SIGTERM and SIGINT drain; SIGINT while draining ends the process at once."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)

    def stop(self) -> None:
        """Take no new work, finish what was admitted, then end."""
        self.replica.draining = True
        self._stop.set()

    def _interrupt(self) -> None:
        if self._stop.is_set():
            logger.warning("interrupted again: leaving %d requests", self.replica.num_in_flight)
            os._exit(130)
        logger.info("draining; interrupt again to leave at once")
        self.stop()

    async def _live(self) -> int:
        stopped = asyncio.create_task(self._stop.wait())
        loaded = _in_thread("load", self._load)
        await _first_of(loaded, stopped)
        if not loaded.done():
            return 0
        serving = self._serving(loaded.result())
        try:
            engine_end = _in_thread("engine", serving.engine.run)
            self.replica.begin(serving)
            logger.info("ready: %s, %s", self._settings.model_name, serving.capacity)
            await _first_of(engine_end, stopped)
            if not engine_end.done():
                await self._drain(serving, engine_end)
            if serving.engine.failure is not None:
                return await self._die(serving, engine_end)
            serving.engine.request_stop()
            await _first_of(engine_end, timeout_s=STOP_S)
            return 0
        finally:
            serving.pool.shutdown(wait=False, cancel_futures=True)

    async def _drain(self, serving: Serving, engine_end: asyncio.Future[None]) -> None:
        """Until nothing is in flight, the drain time is over, or the engine died."""
        idle = asyncio.create_task(self.replica.wait_idle())
        await _first_of(idle, engine_end, timeout_s=self._settings.drain_s)
        if not idle.done() and not engine_end.done():
            logger.warning("drain time is over: ending %d requests", self.replica.num_in_flight)
            serving.bridge.abort_all()
            await _first_of(idle, engine_end, timeout_s=STOP_S)

    async def _die(self, serving: Serving, engine_end: asyncio.Future[None]) -> int:
        logger.error("the engine failed", exc_info=engine_end.exception())
        serving.bridge.fail()
        for server in self._servers:
            server.config.timeout_graceful_shutdown = DEAD_FLUSH_S
        await asyncio.sleep(DEAD_NOTICE_S)
        return 1

    def _serving(self, loaded: LoadedModel) -> Serving:
        settings, capacity = self._settings, loaded.capacity
        metrics = Metrics(settings.model_name, settings.engine_id, capacity, self._clock)
        bridge = Bridge(metrics, self._clock)
        scheduler = Scheduler(capacity, loaded.policy or initial_policy(capacity))
        engine = Engine(scheduler, loaded.runner, self._clock, bridge.on_report)
        bridge.connect(engine)
        return Serving(
            model_name=settings.model_name,
            tokenizer=loaded.tokenizer,
            capacity=capacity,
            engine=engine,
            bridge=bridge,
            metrics=metrics,
            door=Door(settings.bounds, bridge, metrics, self._clock),
            orders=OrderTaker(
                settings.model_name, loaded.tokenizer, capacity, loaded.eos_token_ids
            ),
            pool=ThreadPoolExecutor(NUM_TOKENISERS, f"{THREAD_PREFIX}tokenise"),
        )


class _Server(uvicorn.Server):
    """Says when it accepts connections, and leaves the signals to the whole process."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.bound = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.bound.set()

    def cut(self) -> None:
        """Connections whose clients have not read what was sent: nobody waits for them any more."""
        for connection in tuple(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _server(app: Callable[..., object]) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=FLUSH_S,
        )
    )


async def _first_of(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Return when one has ended, whatever its result, or when the time is over."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _in_thread(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """In a daemon thread: neither a long load nor a hanging step can keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the loop has closed: the process is ending
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=f"{THREAD_PREFIX}{name}", daemon=True).start()
    return future
