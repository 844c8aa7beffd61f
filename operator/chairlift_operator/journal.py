"""What was seen, decided and done, one JSON line a tick; enough to decide it all again.

A `start` line begins a memory, a `spec` line names a spec, each `tick` line refers to the last of
both. The reader rebuilds the snapshots, so that `plan` replays to the letter, or under another
spec.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TextIO

from pydantic import TypeAdapter, ValidationError

from chairlift_operator.cluster import ActionResult
from chairlift_operator.decisions import Action, Decision
from chairlift_operator.memory import Memory
from chairlift_operator.plan import Plan, plan
from chairlift_operator.snapshot import PolicyReadback, Snapshot
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import (
    parse_pool,
    pool_hash,
    pool_to_mapping,
    with_overrides,
)
from chairlift_operator.step_time import StepCosts

VERSION: Final = 1


class JournalError(ValueError):
    """A journal that cannot be read; the message names the line."""


@dataclass(frozen=True, slots=True)
class Start:
    version: int
    term: int
    prior: StepCosts | None


@dataclass(frozen=True, slots=True)
class NamedSpec:
    """pool: as `pool_to_mapping` writes it."""

    hash: str
    pool: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TickRecord:
    """One tick as recorded. `spec` is the pool's hash."""

    spec: str
    snapshot: Snapshot
    decisions: tuple[Decision, ...]
    actions: tuple[Action, ...]
    results: tuple[ActionResult, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """A recorded tick beside the plan that the same function makes of it now."""

    pool: InferencePool
    recorded: TickRecord
    plan: Plan


_START: Final[TypeAdapter[Start]] = TypeAdapter(Start)
_TICK: Final[TypeAdapter[TickRecord]] = TypeAdapter(TickRecord)
_KINDS: Final[dict[str, TypeAdapter[Any]]] = {
    "start": _START,
    "spec": TypeAdapter(NamedSpec),
    "tick": _TICK,
}


class JournalWriter:
    """Appends to an open text file, which stays the caller's to close."""

    def __init__(self, file: TextIO, memory: Memory) -> None:
        self._file = file
        self._spec = ""
        self._write("start", _START.dump_python(Start(VERSION, memory.term, memory.prior)))

    def tick(
        self, pool: InferencePool, snapshot: Snapshot, made: Plan, results: Sequence[ActionResult]
    ) -> None:
        spec = pool_hash(pool)
        if spec != self._spec:
            self._write("spec", {"hash": spec, "pool": pool_to_mapping(pool)})
            self._spec = spec
        record = TickRecord(spec, snapshot, made.decisions, made.actions, tuple(results))
        self._write("tick", _TICK.dump_python(record, mode="json"))

    def _write(self, kind: str, body: dict[str, Any]) -> None:
        line = json.dumps({"kind": kind, **body}, separators=(",", ":"), ensure_ascii=False)
        self._file.write(line + "\n")
        self._file.flush()


def open_for_append(path: Path) -> TextIO:
    """For a `JournalWriter`; a line that a crash had cut off is ended first. OSError."""
    with path.open("ab+") as file:
        if file.seekable() and file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return path.open("a", encoding="utf-8")


def replay(path: Path, settings: Sequence[str] = ()) -> Iterator[Replayed]:
    """Plan every recorded tick again. With settings, as if the engines had obeyed these plans."""
    pools: dict[str, InferencePool] = {}
    memory = Memory.start()
    for number, record in _records(path):
        try:
            entry = _understood(record)
            if isinstance(entry, NamedSpec):
                pools[entry.hash] = with_overrides(parse_pool(entry.pool), settings)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise JournalError(f"{path}, line {number}: {_brief(error)}") from error
        if isinstance(entry, Start):
            memory = Memory.start(entry.term, entry.prior)
        if not isinstance(entry, TickRecord):
            continue
        if (pool := pools.get(entry.spec)) is None:
            raise JournalError(f"{path}, line {number}: no spec line before it names {entry.spec}")
        snapshot = _obeyed(entry.snapshot, memory) if settings else entry.snapshot
        made = plan(pool, snapshot, memory, snapshot.taken_at_s)
        memory = made.memory
        yield Replayed(pool, entry, made)


def _understood(record: object) -> Start | NamedSpec | TickRecord:
    kind = record.get("kind") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"not a journal line: its kind must be one of {', '.join(_KINDS)}")
    entry: Start | NamedSpec | TickRecord = _KINDS[kind].validate_python(_body(record))
    if isinstance(entry, Start) and entry.version != VERSION:
        raise ValueError(f"version {entry.version} is not known here, only {VERSION}")
    return entry


def _brief(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"not a journal line: {place}: {first['msg']}"
    if isinstance(error, RecursionError):
        return "not a journal line: it is nested too deeply"
    return str(error)


def _records(path: Path) -> Iterator[tuple[int, object]]:
    """Every whole line. One that a crash cut off is left out: the last, or before a new start."""
    torn: JournalError | None = None
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    if torn is not None:
                        raise torn from error
                    torn = JournalError(f"{path}, line {number}: not JSON: {_brief(error)}")
                    continue
                if torn is not None and not (
                    isinstance(record, dict) and record.get("kind") == "start"
                ):
                    raise torn
                torn = None
                yield number, record
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}") from error
    if torn is not None:
        raise torn


def _body(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "kind"}


def _obeyed(snapshot: Snapshot, memory: Memory) -> Snapshot:
    replicas = []
    for seen in snapshot.replicas:
        known = memory.replicas.get(seen.name)
        if known is not None and known.wanted is not None and seen.policy is not None:
            told = PolicyReadback(known.wanted, known.wanted, seen.policy.capacity)
            seen = replace(seen, policy=told)
        replicas.append(seen)
    return replace(snapshot, replicas=tuple(replicas))
