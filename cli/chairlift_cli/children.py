"""Child processes that never outlive the supervisor, each with a log file of its own.

Knows nothing of engines or gateways. `supervisor` and `engine_process` call it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from chairlift_cli.die_with_parent import bound
from chairlift_cli.errors import writing

# A process that has had SIGTERM and its drain time gets this long to end by itself.
LAST_WORDS_S = 5.0


class Child:
    """One running process in a session of its own, so that Ctrl-C at the terminal misses it."""

    def __init__(self, name: str, process: Process, log_path: Path, log_start: int) -> None:
        self.name = name
        self._process = process
        self._log_path = log_path
        self._log_start = log_start  # in bytes: a log may hold what came before this process

    @classmethod
    async def start(cls, name: str, command: Sequence[str], log_path: Path) -> Self:
        with writing(log_path), log_path.open("ab") as log:
            log_start = log.tell()
            process = await asyncio.create_subprocess_exec(
                *bound(command), stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return cls(name, process, log_path, log_start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self, drain_s: float = 0.0) -> None:
        """Ask it to drain and end; make it end when it does not, or when this is cancelled."""
        try:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s + LAST_WORDS_S):
                    await self._process.wait()
        finally:
            self._kill()
        await self._process.wait()

    async def end(self) -> None:
        """Now, whatever it is doing."""
        self._kill()
        await self._process.wait()

    def _kill(self) -> None:
        """The process and what it may have started (a compiler, say)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def log_tail(self, num_lines: int = 12) -> str:
        lines = self._log().splitlines()
        return "\n".join(f"  | {line}" for line in lines[-num_lines:])

    def has_said(self, line: str) -> bool:
        return line in self._log().splitlines()

    def _log(self) -> str:
        try:
            with self._log_path.open("rb") as log:
                log.seek(self._log_start)
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


def options(values: Mapping[str, object]) -> list[str]:
    """As --name=value, so that no value is ever taken for an option."""
    return [f"{name}={value}" for name, value in values.items()]


def describe_exit(exit_code: int) -> str:
    if exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
