"""The operator's control loop over one machine's engines, with a journal and a view.

Only joins parts: engines from `fleet`, decisions from the operator, a screen by `view`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TextIO

import aiohttp

from chairlift_cli.errors import CliError
from chairlift_cli.fleet import LocalFleet
from chairlift_cli.view import View
from chairlift_operator.control_loop import AnchoredClock, ControlLoop, Tick
from chairlift_operator.direct_cluster import DirectCluster
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
    fleet: LocalFleet,
    session: aiohttp.ClientSession,
    journal: TextIO,
    view: View,
) -> None:
    """Tick until cancelled."""

    def show(tick: Tick) -> None:
        view.show(tick.plan)

    memory = Memory.start()
    loop = ControlLoop(
        pool,
        DirectCluster(pool.name, fleet, session, AnchoredClock()),
        memory,
        JournalWriter(journal, memory),
        on_tick=show,
    )
    await loop.run(asyncio.Event())
