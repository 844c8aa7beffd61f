"""One pool on one machine: engine and gateway as child processes, the control loop in this one.

Starts them, restarts what dies, drains on the first signal and ends at once on the second. Knows no
policy: the loop decides. `local` calls `serve`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO, TypeAlias

import aiohttp

from chairlift_cli.control import open_journal, run_control_loop
from chairlift_cli.engine_process import EngineProcess
from chairlift_cli.errors import CliError
from chairlift_cli.gateway_process import GatewayProcess, claim_port
from chairlift_cli.run_dir import RunDir, open_run_dir
from chairlift_cli.stopping import Stopping, stop_signals, until
from chairlift_cli.view import View
from chairlift_operator.spec import InferencePool

DRAIN_S: Final = 30.0
# A child that dies is started again after 1, 2, 4 … seconds; one that lived long, after 1 again.
FIRST_BACKOFF_S: Final = 1.0
LONGEST_BACKOFF_S: Final = 30.0
LONG_LIFE_S: Final = 60.0
ENGINE_NAME: Final = "interactive-0"
HTTP_TIMEOUT: Final = aiohttp.ClientTimeout(total=5.0)

Ending: TypeAlias = Callable[[], Coroutine[Any, Any, str]]
Starting: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """journal_file: where each tick is recorded; None puts it into the run folder."""

    port: int
    batch_key: str | None = None
    run_dir: Path | None = None
    journal_file: Path | None = None


async def serve(pool: InferencePool, options: LocalOptions, view: View) -> int | None:
    """Serve until a signal; return the signal that asked. CliError when the pool cannot start."""
    port = claim_port(options.port)
    with ExitStack() as closing:
        stopping = closing.enter_context(stop_signals())
        run_dir = closing.enter_context(open_run_dir(options.run_dir))
        journal_file = options.journal_file or run_dir.journal_file
        journal = closing.enter_context(open_journal(journal_file))
        # Failed ticks are logged there; on the terminal they would tear the live table.
        logging.basicConfig(filename=run_dir.log_file("controller"), level=logging.INFO)
        batch_keys = [options.batch_key] if options.batch_key else []
        gateway = GatewayProcess(port, run_dir, batch_keys, DRAIN_S)
        session = aiohttp.ClientSession(timeout=HTTP_TIMEOUT)
        local = LocalPool(pool, gateway, run_dir, session, view)
        try:
            if await until(stopping.asked, local.start()):
                view.say(f"journal: {journal_file}")
                await until(stopping.asked, local.run(journal))
            await local.drain(stopping)
        finally:
            view.close()
            await local.end()
            await session.close()
    return stopping.number


class LocalPool:
    """The processes of one pool and the loop over them; used once, from start to end."""

    def __init__(
        self,
        pool: InferencePool,
        gateway: GatewayProcess,
        run_dir: RunDir,
        session: aiohttp.ClientSession,
        view: View,
    ) -> None:
        self._pool = pool
        self._engine = EngineProcess(ENGINE_NAME, pool, run_dir)
        self._gateway = gateway
        self._run_dir = run_dir
        self._session = session
        self._view = view

    async def start(self) -> None:
        """Return when a request would be answered."""
        await self._gateway.start(self._session)
        await self._start_engine()
        url = f"{self._gateway.url}/v1"
        message = {"role": "user", "content": "Hello!"}
        body = json.dumps({"model": self._pool.spec.model.name, "messages": [message]})
        self._view.say(
            f"ready: {url} (try: curl {url}/chat/completions "
            f"-H 'Content-Type: application/json' -d '{body}')"
        )

    async def run(self, journal: TextIO) -> None:
        """Control and keep alive until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_engine())
            tasks.create_task(self._keep_gateway())
            await run_control_loop(
                self._pool,
                [self._engine],
                self._run_dir.admin_token,
                self._session,
                journal,
                self._view,
            )

    async def drain(self, stopping: Stopping) -> None:
        """Let streams finish, until a second signal."""

        async def in_order() -> None:
            await self._gateway.drain()
            await self._engine.stop()

        self._view.say("draining: streams may finish; Ctrl-C again ends at once")
        await until(stopping.insisted, in_order())

    async def end(self) -> None:
        """Leave no process, whatever happened before."""
        await self._gateway.end()
        await self._engine.end()

    async def _start_engine(self) -> None:
        await self._engine.start(self._session, self._view.say)
        assert self._engine.address is not None
        self._run_dir.write_endpoints({self._engine.name: self._engine.address.url})

    async def _keep_engine(self) -> None:
        async def until_it_ends() -> str:
            sentence = await self._engine.wait()
            self._run_dir.write_endpoints({})
            return sentence

        await self._keep_alive(until_it_ends, self._start_engine)

    async def _keep_gateway(self) -> None:
        await self._keep_alive(self._gateway.wait, lambda: self._gateway.start(self._session))

    async def _keep_alive(self, until_it_ends: Ending, start: Starting) -> None:
        """Start again whatever ends, ever less often while it does not live long."""
        loop = asyncio.get_running_loop()
        backoff_s = FIRST_BACKOFF_S
        while True:
            started_s = loop.time()
            why = await until_it_ends()
            if loop.time() - started_s >= LONG_LIFE_S:
                backoff_s = FIRST_BACKOFF_S
            while why:
                self._view.say(f"{why}; starting it again in {backoff_s:g} s")
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
                try:
                    await start()
                except CliError as error:
                    why = str(error)
                else:
                    why = ""
            self._view.say("serving again")
