"""The operator's control loop over one machine's engines, with a journal and a view.

Only joins parts: engines from `fleet`, decisions from the operator, a screen by `view`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import aiohttp

from chairlift_cli.errors import CliError
from chairlift_cli.fleet import LocalFleet
from chairlift_cli.tenants import LocalQuotas
from chairlift_cli.view import View
from chairlift_operator.control_loop import AnchoredClock, ControlLoop, Tick
from chairlift_operator.direct_cluster import DirectCluster
from chairlift_operator.journal import JournalWriter, open_for_append
from chairlift_operator.memory import Memory
from chairlift_operator.spec import InferencePool


@dataclass(frozen=True, slots=True)
class Journal:
    """A writer that has begun, and the memory that its first line says the run begins with."""

    writer: JournalWriter
    memory: Memory


@contextmanager
def open_journal(path: Path) -> Iterator[Journal]:
    """Appends: a journal may hold several runs. Its first line is written at once, to know that it
    can be."""
    memory = Memory.start()
    with ExitStack() as closing:
        try:
            file = open_for_append(path)
            closing.callback(_close, file)
            writer = JournalWriter(file, memory)
        except OSError as error:
            raise CliError(
                f"--journal: cannot write {path}: {error.strerror}; "
                "name a file in an existing folder with room"
            ) from error
        yield Journal(writer, memory)


def _close(file: TextIO) -> None:
    with suppress(OSError):  # what could not be written before cannot be now, and was told then
        file.close()


async def run_control_loop(
    pool: InferencePool,
    fleet: LocalFleet,
    session: aiohttp.ClientSession,
    journal: Journal,
    view: View,
    quotas: LocalQuotas,
) -> None:
    """Tick until cancelled."""

    def show(tick: Tick) -> None:
        quotas.saw(tick)
        view.show(tick.plan)

    loop = ControlLoop(
        pool,
        DirectCluster(pool.name, fleet, session, AnchoredClock(), quotas.weights),
        journal.memory,
        journal.writer,
        on_tick=show,
        say=view.say,
    )
    await loop.run(asyncio.Event())
