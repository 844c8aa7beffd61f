"""One run of the lunch rush through `chairlift local`: its settings, its load, what was recorded.

Static, fixed and tuned differ in the settings below and in nothing else. Knows no pictures and no
verdicts; `rush` and `bench_demo` call it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias

from chairlift_bench.journal_tail import Change, InForce, JournalTail
from chairlift_bench.load import Load, PlannedRequest
from chairlift_bench.local_server import local_server
from chairlift_bench.outcomes import Outcome, Slo
from chairlift_bench.rush_load import BACKLOG_CLIENTS, DRAIN_S, RushLoad
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_values import format_duration

PROGRESS_S: Final = 5.0
BATCH_PREFIX: Final = "/batch"
WARM_UP: Final = PlannedRequest(0.0, "Hello!", 8)
# The loop's first look at an engine; a run begins after it, as a pool that serves already.
NUM_TICKS_BEFORE: Final = 2

Say: TypeAlias = Callable[[str], None]


class RunKind(StrEnum):
    STATIC = "static"
    FIXED = "fixed"
    TUNED = "tuned"
    TUNED_ALONE = "tuned, no backlog"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Times of requests, changes and knobs count from the start of the load.

    num_policy_changes: as the journal shows them. elapsed_s: until the last request had ended.
    """

    kind: RunKind
    interactive: tuple[Outcome, ...]
    batch: tuple[Outcome, ...]
    changes: tuple[Change, ...]
    knobs: tuple[InForce, ...]
    num_policy_changes: int
    elapsed_s: float

    @property
    def num_failed(self) -> int:
        return sum(o.error is not None for o in (*self.interactive, *self.batch))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def settings_of(kind: RunKind, slo: Slo, static_batch_size: int) -> list[str]:
    """What `--set` says for a run of this kind, beyond what was set by hand."""
    objectives = "interactive.slo.{}.{}={}".format
    settings = [
        objectives("timeToFirstToken", "threshold", format_duration(slo.ttft_s)),
        objectives("interTokenLatency", "threshold", format_duration(slo.gap_s)),
        objectives("interTokenLatency", "objective", f"{slo.gap_percent:g}"),
    ]
    if kind is RunKind.STATIC:
        settings += [
            "interactive.scheduling=Static",
            f"interactive.batchSize.min={static_batch_size}",
            f"interactive.batchSize.max={static_batch_size}",
        ]
    if kind is RunKind.FIXED:
        settings.append("mode=Recommend")
    return settings


async def run_once(
    kind: RunKind,
    pool_file: Path,
    pool: InferencePool,
    settings: list[str],
    load: RushLoad,
    journal_file: Path,
    say: Say,
) -> RunRecord:
    journal_file.unlink(missing_ok=True)
    journal = JournalTail(journal_file)
    async with local_server(pool_file, journal_file, say, settings) as url:
        await Load(url, pool.spec.model.name).run([WARM_UP])
        while len(journal.seen) < NUM_TICKS_BEFORE:
            await asyncio.sleep(0.1)
            journal.read()
        started_s, started_unix_s = time.monotonic(), time.time()
        ends_s = started_s + load.duration_s + DRAIN_S
        interactive = Load(url, pool.spec.model.name, patience_s=DRAIN_S * 2, ends_s=ends_s)
        batch = Load(
            url + BATCH_PREFIX, pool.spec.model.name, patience_s=DRAIN_S * 2, ends_s=ends_s
        )
        progress = _Progress(kind, load, interactive, batch, journal, say)
        with progress.shown():
            sending = [interactive.run(load.requests)]
            if load.backlog:
                backlog = itertools.cycle(load.backlog)
                sending.append(batch.run_closed(backlog, BACKLOG_CLIENTS, load.duration_s))
            await asyncio.gather(*sending)
        elapsed_s = time.monotonic() - started_s
        say(progress.line())
    journal.read()
    return RunRecord(
        kind=kind,
        interactive=tuple(sorted(interactive.outcomes, key=lambda o: o.due_s)),
        batch=tuple(batch.outcomes),
        changes=tuple(replace(c, at_s=c.at_s - started_unix_s) for c in journal.changes),
        knobs=tuple(replace(k, at_s=k.at_s - started_unix_s) for k in journal.seen),
        num_policy_changes=journal.num_policy_changes,
        elapsed_s=elapsed_s,
    )


class _Progress:
    """A line every few seconds, and the changes as they come."""

    def __init__(
        self,
        kind: RunKind,
        load: RushLoad,
        interactive: Load,
        batch: Load,
        journal: JournalTail,
        say: Say,
    ) -> None:
        self._kind = kind
        self._load = load
        self._interactive = interactive
        self._batch = batch
        self._journal = journal
        self._say = say
        self._started_s = time.monotonic()
        self._num_changes_said = len(journal.changes)

    def line(self) -> str:
        self._journal.read()
        elapsed_s = time.monotonic() - self._started_s
        phase = next((p.name for p in self._load.phases if elapsed_s < p.ends_s), "drain")
        done = self._interactive.outcomes
        num_good = sum(o.is_good(self._load.slo) for o in done)
        knobs = self._journal.in_force
        told = f"; batch size {knobs.batch_size}" if knobs else ""
        if knobs and self._kind is not RunKind.STATIC:
            told += f", step tokens {knobs.step_tokens}, batch share {knobs.batch_share:g}"
        return (
            f"  {self._kind} {elapsed_s:4.0f} s {phase}: {self._interactive.num_in_flight} in "
            f"flight, {len(done)} of {len(self._load.requests)} done, {num_good} good, "
            f"{len(self._batch.outcomes)} batch{told}"
        )

    @contextmanager
    def shown(self) -> Iterator[None]:
        showing = asyncio.create_task(self._keep_showing())
        try:
            yield
        finally:
            showing.cancel()

    async def _keep_showing(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._say(self.line())
            for change in self._journal.changes[self._num_changes_said :]:
                if change.enforced and change.before != change.after:
                    self._say(f"    {change.sentence}")
            self._num_changes_said = len(self._journal.changes)
