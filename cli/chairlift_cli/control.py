"""The operator's control loop over one machine's engines, with a journal and a view.

Only joins parts: addresses from `engine_process`, decisions from the operator, a screen by `view`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import aiohttp

from chairlift_cli.engine_process import EngineProcess
from chairlift_cli.errors import CliError
from chairlift_cli.view import View
from chairlift_operator.control_loop import AnchoredClock, ControlLoop, Tick
from chairlift_operator.direct_cluster import DirectCluster
from chairlift_operator.engine_client import ReplicaEndpoint
from chairlift_operator.journal import JournalWriter
from chairlift_operator.memory import Memory
from chairlift_operator.spec import InferencePool


def open_journal(path: Path) -> TextIO:
    """Appends: a journal may hold several runs."""
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise CliError(
            f"--journal: cannot write {path}: {error.strerror}; name a file in an existing folder"
        ) from error


async def run_control_loop(
    pool: InferencePool,
    engines: Sequence[EngineProcess],
    admin_token: str,
    session: aiohttp.ClientSession,
    journal: TextIO,
    view: View,
) -> None:
    """Tick until cancelled."""

    def endpoints() -> list[ReplicaEndpoint]:
        return [
            ReplicaEndpoint(engine.name, address.url, address.admin_url, admin_token)
            for engine in engines
            if (address := engine.address) is not None
        ]

    def show(tick: Tick) -> None:
        view.show(tick.plan)

    memory = Memory.start()
    loop = ControlLoop(
        pool,
        DirectCluster(pool.name, endpoints, session, AnchoredClock()),
        memory,
        JournalWriter(journal, memory),
        on_tick=show,
    )
    await loop.run(asyncio.Event())
