"""One engine replica as a child process: how it is started, when it is ready, what it said if not.

Knows the engine's command line and no policy. `supervisor` restarts it, `control` tunes it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import aiohttp

from chairlift_cli.children import Child, describe_exit, options
from chairlift_cli.errors import FAILURE_EXIT_CODE, CliError, writing
from chairlift_cli.run_dir import RunDir
from chairlift_operator.engine_arguments import engine_arguments
from chairlift_operator.policy_plan import first_policy
from chairlift_operator.spec import InferencePool
from chairlift_protocol.wire import ADMIN_DRAIN_PATH, READY_PATH, RequestClass

POLL_S: Final = 0.05
DRAIN_POLL_S: Final = 0.2
PROGRESS_S: Final = 5.0
# Streams have ended by the time an engine is asked to go: the gateway drains first.
ENGINE_DRAIN_S: Final = 1.0


class EngineFailed(CliError):
    """An engine that ended before it was ready; the message shows its last log lines."""

    def __init__(self, message: str) -> None:
        super().__init__(message, FAILURE_EXIT_CODE)


@dataclass(frozen=True, slots=True)
class EngineAddress:
    url: str
    admin_url: str


class EngineProcess:
    """`address` is None until the engine is ready to serve and after it has ended."""

    def __init__(
        self,
        name: str,
        pool: InferencePool,
        run_dir: RunDir,
        request_class: RequestClass = RequestClass.INTERACTIVE,
    ) -> None:
        self.name = name
        self.request_class = request_class
        self.address: EngineAddress | None = None
        self._pool = pool
        self._run_dir = run_dir
        self._child: Child | None = None

    async def start(
        self, session: aiohttp.ClientSession, report_progress: Callable[[str], None]
    ) -> None:
        """Return when it is ready; raise EngineFailed when it ends before."""
        announce_file = self._run_dir.announce_file(self.name)
        policy_file = self._run_dir.policy_file(self.name)
        policy = first_policy(self._pool, self.request_class)
        with writing(policy_file):
            announce_file.unlink(missing_ok=True)
            policy_file.write_text(json.dumps(policy.to_json()))
        child = self._child = await Child.start(
            self.name, self._command(), self._run_dir.log_file(self.name)
        )
        started_s = reported_s = time.monotonic()
        report_progress(f"{self.name}: loading {self._pool.spec.model.name} …")
        while (address := await self._ready_address(session)) is None:
            if child.exit_code is not None:
                raise EngineFailed(
                    f"engine {self.name} {describe_exit(child.exit_code)} before it was ready; "
                    f"its last log lines:\n{child.log_tail()}"
                )
            if time.monotonic() - reported_s >= PROGRESS_S:
                reported_s = time.monotonic()
                elapsed_s = reported_s - started_s
                report_progress(f"{self.name}: still loading ({elapsed_s:.0f} s)")
            await asyncio.sleep(POLL_S)
        self.address = address

    async def wait(self) -> str:
        """Return, once it has ended, the sentence that says how."""
        assert self._child is not None
        exit_code = await self._child.wait()
        self.address = None
        return f"engine {self.name} {describe_exit(exit_code)}"

    async def drain(self, session: aiohttp.ClientSession, timeout_s: float) -> bool:
        """Take no new work; True once what was admitted has ended, False after `timeout_s`."""
        assert self.address is not None
        headers = {"Authorization": f"Bearer {self._run_dir.admin_token}"}
        try:
            async with asyncio.timeout(timeout_s):
                drain_url = self.address.admin_url + ADMIN_DRAIN_PATH
                while True:  # it answers how many are left, each time it is asked
                    async with session.post(drain_url, headers=headers) as response:
                        if (await response.json())["num_left"] == 0:
                            return True
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            return False
        except (aiohttp.ClientError, KeyError, ValueError):
            return True  # it is gone, and its requests with it

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop(ENGINE_DRAIN_S)

    async def end(self) -> None:
        if self._child is not None:
            await self._child.end()

    async def _ready_address(self, session: aiohttp.ClientSession) -> EngineAddress | None:
        try:
            announced = json.loads(self._run_dir.announce_file(self.name).read_text())
        except OSError:
            return None
        address = EngineAddress(announced["url"], announced["admin_url"])
        try:
            async with session.get(address.url + READY_PATH) as response:
                return address if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    def _command(self) -> list[str]:
        run_dir = self._run_dir
        values = {
            **engine_arguments(self._pool, self.request_class),
            "--host": "127.0.0.1",
            "--port": 0,
            "--admin-port": 0,
            "--policy-file": run_dir.policy_file(self.name),
            "--admin-token-file": run_dir.admin_token_file,
            "--internal-token-file": run_dir.internal_token_file,
            "--engine-id": self.name,
            "--drain-s": ENGINE_DRAIN_S,
            "--announce-file": run_dir.announce_file(self.name),
            "--log-level": "info",
        }
        return [sys.executable, "-P", "-u", "-m", "chairlift_engine", *options(values)]
