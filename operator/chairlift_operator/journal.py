"""What was seen, decided and done, one JSON line a tick; enough to decide it all again.

A `start` line begins a memory, a `spec` line names a spec, each `tick` line refers to the last of
both. The reader rebuilds the snapshots, so that `plan` replays to the letter, or under another
spec.
"""

from __future__ import annotations

import json
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
    SpecError,
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


_START: TypeAdapter[Start] = TypeAdapter(Start)
_TICK: TypeAdapter[TickRecord] = TypeAdapter(TickRecord)


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


def replay(path: Path, settings: Sequence[str] = ()) -> Iterator[Replayed]:
    """Plan every recorded tick again. With settings, as if the engines had obeyed these plans."""
    pools: dict[str, InferencePool] = {}
    memory = Memory.start()
    for number, record in _records(path):
        try:
            if record["kind"] == "start":
                start = _START.validate_python(_body(record))
                memory = Memory.start(start.term, start.prior)
            elif record["kind"] == "spec":
                pools[record["hash"]] = with_overrides(parse_pool(record["pool"]), settings)
            elif record["kind"] == "tick":
                tick = _TICK.validate_python(_body(record))
                pool = pools[tick.spec]
                snapshot = _obeyed(tick.snapshot, memory) if settings else tick.snapshot
                made = plan(pool, snapshot, memory, snapshot.taken_at_s)
                memory = made.memory
                yield Replayed(pool, tick, made)
        except (KeyError, ValidationError) as error:
            raise JournalError(f"{path}, line {number}: not a journal line: {error}") from error
        except SpecError as error:
            raise JournalError(f"{path}, line {number}: {error}") from error


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every whole line; a last one without its end was cut off by a crash and is left out."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise JournalError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(record, dict) or "kind" not in record:
                raise JournalError(f"{path}, line {number}: not a journal line")
            yield number, record


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
