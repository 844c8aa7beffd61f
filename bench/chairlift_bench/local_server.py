"""`chairlift local` as a child process, started and stopped as a user would.

Knows its command line, its "ready:" line and the model it needs. `rush_run`, `rush_plan` call it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from chairlift_cli.die_with_parent import bound
from chairlift_cli.model_command import run_model_get
from chairlift_operator.spec import InferencePool

READY: Final = "ready: "
# Above the supervisor's own drain time, so that it is the supervisor that ends its children.
STOP_S: Final = 60.0


class LocalServerFailed(Exception):
    """`chairlift local` ended when it should not have; the message holds what it said."""


def ensure_model(pool: InferencePool) -> None:
    """Put a cache:// model into the cache unless it is there."""
    name = pool.spec.model.source.removeprefix("cache://")
    if pool.spec.runtime.engine == "chairlift" and name != pool.spec.model.source:
        run_model_get(name)


@asynccontextmanager
async def local_server(
    pool_file: Path,
    journal_file: Path,
    say: Callable[[str], None],
    settings: Sequence[str] = (),
    run_dir: Path | None = None,
) -> AsyncIterator[str]:
    """Yield the gateway's base URL (without /v1) once it is ready; leave no process behind.

    run_dir: where to put its logs and what it knows of its engines.
    """
    command = [sys.executable, "-P", "-u", "-m", "chairlift_cli", "local", "-f", str(pool_file)]
    command += ["--port", "0", "--no-live", "--journal", str(journal_file)]
    if run_dir is not None:
        command += ["--run-dir", str(run_dir)]
    for setting in settings:
        command += ["--set", setting]
    # A session of its own: Ctrl-C reaches us alone, and we end it in order.
    process = await asyncio.create_subprocess_exec(
        *bound(command, signal.SIGTERM), stdout=PIPE, stderr=STDOUT, start_new_session=True
    )
    try:
        url = await _until_ready(process, say)
        # Runs until the child closes its end, so that the child never waits for a reader.
        relaying = asyncio.create_task(_relay(process, say))
        yield url
    finally:
        await asyncio.shield(_stop(process))
    await relaying


def engine_url(run_dir: Path) -> str:
    """Of the one engine that is there, as it announced itself to the supervisor."""
    (announced,) = run_dir.glob("*.announce.json")
    return str(json.loads(announced.read_text())["url"])


async def _until_ready(process: Process, say: Callable[[str], None]) -> str:
    assert process.stdout is not None
    said: list[str] = []
    async for line in process.stdout:
        text = line.decode(errors="replace").rstrip()
        if text.startswith(READY):
            return text.removeprefix(READY).split()[0].removesuffix("/v1")
        said.append(text)
        say(text)
    raise LocalServerFailed(
        f"chairlift local ended with exit code {await process.wait()} before it was ready; "
        f"it said: {' / '.join(said) or 'nothing'}"
    )


async def _relay(process: Process, say: Callable[[str], None]) -> None:
    """Keep the pipe empty; what is said of trouble is passed on, decisions are in the journal."""
    assert process.stdout is not None
    async for line in process.stdout:
        text = line.decode(errors="replace").rstrip()
        if "starting it again" in text or text.startswith("chairlift:"):
            say(text)


async def _stop(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
