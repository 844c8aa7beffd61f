"""The gateway as a child process: how it is started on the user's port, and how it drains.

Knows the gateway's command line and nothing of requests. `supervisor` calls it.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import socket
import sys
from collections.abc import Sequence
from typing import Final

import aiohttp

from chairlift_cli.children import Child, describe_exit, options
from chairlift_cli.errors import FAILURE_EXIT_CODE, CliError
from chairlift_cli.run_dir import RunDir
from chairlift_protocol.wire import LIVE_PATH

HOST: Final = "127.0.0.1"
NAME: Final = "gateway"
POLL_S: Final = 0.05


def claim_port(wanted: int) -> int:
    """The port if it is free, or a free one for 0; raise CliError when something holds it."""
    try:
        with socket.create_server((HOST, wanted)) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"fails: {error.strerror}"
        raise CliError(
            f"--port: {HOST}:{wanted} {why}; choose another, or 0 for any free one"
        ) from error


class GatewayProcess:
    def __init__(
        self,
        port: int,
        run_dir: RunDir,
        batch_keys: Sequence[str],
        drain_s: float,
        tenant_arguments: Sequence[str] = (),
    ) -> None:
        self.url = f"http://{HOST}:{port}"
        self._port = port
        self._run_dir = run_dir
        self._batch_keys = batch_keys
        self._drain_s = drain_s
        self._tenant_arguments = tenant_arguments
        self._child: Child | None = None

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Return when it answers; raise CliError when it ends before.

        That something answers is not enough: another program may have taken the port.
        """
        child = self._child = await Child.start(NAME, self._command(), self._run_dir.log_file(NAME))
        listens = f"chairlift-gateway: listening on {self.url}"
        while not (child.has_said(listens) and await self._is_live(session)):
            if child.exit_code is not None:
                claim_port(self._port)
                raise CliError(
                    f"the gateway {describe_exit(child.exit_code)} before it was ready; "
                    f"its last log lines:\n{child.log_tail()}",
                    FAILURE_EXIT_CODE,
                )
            await asyncio.sleep(POLL_S)

    async def wait(self) -> str:
        """Return, once it has ended, the sentence that says how."""
        assert self._child is not None
        return f"the gateway {describe_exit(await self._child.wait())}"

    async def drain(self) -> None:
        """Refuse what is new, let streams finish within the drain time, end."""
        if self._child is not None:
            await self._child.stop(self._drain_s)

    async def end(self) -> None:
        if self._child is not None:
            await self._child.end()

    async def _is_live(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(self.url + LIVE_PATH) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _command(self) -> list[str]:
        values = {
            "--host": HOST,
            "--port": self._port,
            "--endpoints-file": self._run_dir.endpoints_file,
            "--internal-token-file": self._run_dir.internal_token_file,
            "--drain-s": self._drain_s,
            "--log-level": "info",
        }
        arguments = options(values)
        for key in self._batch_keys:
            digest = hashlib.sha256(key.encode()).hexdigest()
            arguments += options({"--batch-key-sha256": digest})
        arguments += self._tenant_arguments
        return [sys.executable, "-P", "-u", "-m", "chairlift_gateway", *arguments]
