"""One pool on one machine: engines and gateway as child processes, the control loop in this one.

Starts the gateway, and through `fleet` the engines; restarts what dies, drains on the first signal
and ends at once on the second. Knows no policy: the loop decides. `local` calls `serve`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

from chairlift_cli.backoff import Backoff
from chairlift_cli.control import Journal, open_journal, run_control_loop
from chairlift_cli.errors import CliError, writing
from chairlift_cli.fleet import LocalFleet
from chairlift_cli.gateway_process import GatewayProcess, claim_port
from chairlift_cli.run_dir import RunDir, open_run_dir
from chairlift_cli.stopping import Stopping, stop_signals, until
from chairlift_cli.tenants import LocalQuotas, TenantFiles, open_store, tenant_arguments
from chairlift_cli.view import View
from chairlift_operator.spec import InferencePool

DRAIN_S: Final = 30.0
HTTP_TIMEOUT: Final = aiohttp.ClientTimeout(total=5.0)


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """journal_file: where each tick is recorded; None puts it into the run folder."""

    port: int
    batch_key: str | None = None
    run_dir: Path | None = None
    journal_file: Path | None = None
    tenants: TenantFiles = TenantFiles()


async def serve(pool: InferencePool, options: LocalOptions, view: View) -> int | None:
    """Serve until a signal; return the signal that asked. CliError when the pool cannot start."""
    port = claim_port(options.port)
    with ExitStack() as closing:
        stopping = closing.enter_context(stop_signals())
        run_dir = closing.enter_context(open_run_dir(options.run_dir))
        journal_file = options.journal_file or run_dir.journal_file
        journal = closing.enter_context(open_journal(journal_file))
        # Failed ticks are logged there; on the terminal they would tear the live table.
        log_file = run_dir.log_file("controller")
        with writing(log_file):
            logging.basicConfig(filename=log_file, level=logging.INFO)
        logging.raiseExceptions = False  # a full disk must not write tracebacks there either
        batch_keys = [options.batch_key] if options.batch_key else []
        arguments = tenant_arguments(pool, options.tenants)
        gateway = GatewayProcess(port, run_dir, batch_keys, DRAIN_S, arguments)
        session = aiohttp.ClientSession(timeout=HTTP_TIMEOUT)
        store = open_store(pool, options.tenants)
        quotas = LocalQuotas(pool, options.tenants, store, view.say)
        local = LocalPool(pool, gateway, run_dir, session, view, quotas)
        try:
            if await until(stopping.asked, local.start()):
                view.say(f"journal: {journal_file}")
                await until(stopping.asked, local.run(journal))
            await local.drain(stopping)
        finally:
            view.close()
            await local.end()
            await quotas.close()
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
        quotas: LocalQuotas,
    ) -> None:
        self._pool = pool
        self._quotas = quotas
        self._fleet = LocalFleet(pool, run_dir, session, gateway.url, view)
        self._gateway = gateway
        self._session = session
        self._view = view

    async def start(self) -> None:
        """Return when a request would be answered."""
        await self._quotas.begin()
        await self._gateway.start(self._session)
        await self._fleet.start_first()
        url = f"{self._gateway.url}/v1"
        message = {"role": "user", "content": "Hello!"}
        body = json.dumps({"model": self._pool.spec.model.name, "messages": [message]})
        self._view.say(
            f"ready: {url} (try: curl {url}/chat/completions "
            f"-H 'Content-Type: application/json' -d '{body}')"
        )

    async def run(self, journal: Journal) -> None:
        """Control and keep alive until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._fleet.keep())
            tasks.create_task(self._keep_gateway())
            tasks.create_task(self._quotas.run())
            await run_control_loop(
                self._pool, self._fleet, self._session, journal, self._view, self._quotas
            )

    async def drain(self, stopping: Stopping) -> None:
        """Let streams finish, until a second signal."""

        async def in_order() -> None:
            await self._gateway.drain()
            await self._fleet.stop()

        self._view.say("draining: streams may finish; Ctrl-C again ends at once")
        await until(stopping.insisted, in_order())

    async def end(self) -> None:
        """Leave no process, whatever happened before."""
        await self._gateway.end()
        await self._fleet.end()

    async def _keep_gateway(self) -> None:
        """Start again whatever ends, ever less often while it does not live long."""
        backoff = Backoff()
        while True:
            with backoff.timed():
                why = await self._gateway.wait()
            while why:
                self._view.say(f"{why}; starting it again in {backoff.next_s:g} s")
                await backoff.sleep()
                try:
                    await self._gateway.start(self._session)
                except CliError as error:
                    why = str(error)
                else:
                    why = ""
            self._view.say("the gateway is serving again")
