from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift_operator.cluster import ActionResult
from chairlift_operator.journal import JournalError, JournalWriter, open_for_append, replay
from chairlift_operator.memory import Memory
from chairlift_operator.plan import plan
from chairlift_operator.pool_windows import PoolWindows, Trouble, WindowedQuantity, WindowedShare
from chairlift_operator.signals import Idle, Signal, Unknown, Value
from chairlift_operator.snapshot import Snapshot
from chairlift_operator.step_time import StepCosts
from chairlift_protocol.wire import RequestClass

Make = Callable[..., Any]

REFERENCE = StepCosts(8e-3, 0.06e-3, 0.045e-3, 5e-8)


@pytest.fixture
def journal(tmp_path: Path, make_pool: Make, make_engine: Make, close_loop: Make) -> Path:
    """Two minutes of a saturated engine, started warm, with a term of its own."""
    memory = Memory.start(term=4, prior=StepCosts(4e-3, 3e-5, 2e-5, 2e-8))
    pool, engine, file = make_pool(), make_engine(REFERENCE, seed=3), io.StringIO()
    writer = JournalWriter(file, memory)
    seen: list[Snapshot] = []
    ticks = close_loop(pool, engine, memory, 120.0, on_snapshot=seen.append)
    for tick in ticks:
        results = [ActionResult(action, True, "read back") for action in tick.plan.actions]
        writer.tick(pool, seen[-1], tick.plan, results)
    path = tmp_path / "journal.jsonl"
    path.write_text(file.getvalue(), encoding="utf-8")
    return path


def test_a_replay_repeats_every_decision_to_the_letter(journal: Path) -> None:
    replayed = list(replay(journal))
    assert len(replayed) >= 20
    assert sum(len(r.plan.decisions) for r in replayed) > 8
    for tick in replayed:
        assert tick.plan.decisions == tick.recorded.decisions
        assert tick.plan.actions == tick.recorded.actions


def test_a_replay_under_another_objective_decides_otherwise(journal: Path) -> None:
    setting = "interactive.slo.interTokenLatency.threshold=30ms"
    replayed = list(replay(journal, [setting]))
    asked = [a.policy.step_tokens for r in replayed for a in r.plan.actions]
    recorded = [a.policy.step_tokens for r in replayed for a in r.recorded.actions]
    assert replayed[0].pool.spec.interactive.slo.inter_token_latency.threshold_ms == 30
    assert asked and asked[-1] < recorded[-1]
    assert not any("set again" in d.reason for r in replayed for d in r.plan.decisions)


def test_a_line_cut_off_by_a_crash_is_left_out(journal: Path) -> None:
    whole = list(replay(journal))
    text = journal.read_text(encoding="utf-8")
    journal.write_text(text[:-40], encoding="utf-8")
    assert len(list(replay(journal))) == len(whole) - 1


def test_a_journal_goes_on_after_a_line_that_a_crash_cut_off(journal: Path) -> None:
    whole, data = len(list(replay(journal))), journal.read_bytes()
    journal.write_bytes(data[:-40])
    with open_for_append(journal) as file:
        JournalWriter(file, Memory.start())
        file.write(data.decode())
    assert len(list(replay(journal))) == 2 * whole - 1


def test_an_appended_journal_adds_no_empty_line(tmp_path: Path) -> None:
    path = tmp_path / "new.jsonl"
    for _ in range(2):
        with open_for_append(path) as file:
            JournalWriter(file, Memory.start())
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["start"] * 2


@pytest.mark.parametrize("tail", [b'{"kind":"tick","x":"\xc3', b"\0" * 50])
def test_a_tail_of_any_bytes_is_left_out(journal: Path, tail: bytes) -> None:
    whole = len(list(replay(journal)))
    journal.write_bytes(journal.read_bytes() + tail)
    assert len(list(replay(journal))) == whole


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense",
        b"[]",
        b"\xff",
        b"[" * 5000,
        b"9" * 5000,
        b'{"kind": "tick", "spec": "x"}',
        b'{"kind": "tick", "spec": []}',
        b'{"kind": "other"}',
        b'{"kind": ["start"]}',
        b'{"kind": "start", "version": 99, "term": 1, "prior": null}',
        b'{"kind": "start"}',
        b'{"kind": "spec", "hash": "a", "pool": 3}',
        b'{"kind": "spec", "hash": [], "pool": {}}',
        b'{"kind": "spec", "hash": "a", "pool": {}}',
    ],
)
def test_a_line_that_is_no_record_is_named(journal: Path, line: bytes) -> None:
    data = journal.read_bytes()
    journal.write_bytes(data + line + b"\n")
    with pytest.raises(JournalError, match=rf"line {len(data.splitlines()) + 1}: ") as caught:
        list(replay(journal))
    assert len(str(caught.value).splitlines()) <= 4  # one for each problem of a spec


def test_broken_lines_in_the_middle_are_named_unless_a_new_start_follows(journal: Path) -> None:
    data = journal.read_bytes()
    journal.write_bytes(b"{broken\n" + data)
    assert list(replay(journal))
    journal.write_bytes(data + b"{broken\n" + data.split(b"\n")[2] + b"\n")
    with pytest.raises(JournalError, match=f"line {len(data.splitlines()) + 1}: not JSON"):
        list(replay(journal))


def test_a_missing_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"none\.jsonl: cannot be read: No such file"):
        list(replay(tmp_path / "none.jsonl"))


def test_a_tick_without_its_spec_is_named(journal: Path) -> None:
    lines = [line for line in journal.read_bytes().splitlines(True) if b'"kind":"spec"' not in line]
    journal.write_bytes(b"".join(lines))
    with pytest.raises(JournalError, match="line 2: no spec line before it names"):
        list(replay(journal))


@pytest.mark.parametrize(
    "signal",
    [
        Value(95.0, 7.0, "Prometheus: sloEvents[5m]"),
        Idle(7.0, "Prometheus: sloEvents[5m]"),
        Unknown("timed out", 7.0, "Prometheus: sloEvents[5m]"),
    ],
)
def test_windows_are_read_back_as_they_were_written(
    tmp_path: Path, make_pool: Make, make_engine: Make, signal: Signal
) -> None:
    share = WindowedShare(RequestClass.INTERACTIVE, "itl", 300.0, signal, 0.01, 0.09, 2000.0, 75.0)
    trouble = Trouble("Stale", "chat-a: its last sample is 65 s old")
    windows = PoolWindows((share,), (WindowedQuantity("a", signal),), trouble, 3)
    snapshot = Snapshot("default/chat", 1.0, (make_engine(REFERENCE).snapshot(),), windows=windows)
    memory = Memory.start()
    path = tmp_path / "journal.jsonl"
    with path.open("w") as file:
        made = plan(make_pool(), snapshot, memory, 1.0)
        JournalWriter(file, memory).tick(make_pool(), snapshot, made, [])
    (tick,) = replay(path)
    assert tick.recorded.snapshot == snapshot
    assert tick.plan.signals == made.signals


def test_a_journal_from_before_there_were_windows_is_replayed(journal: Path) -> None:
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    for record in records:
        if record["kind"] == "tick":
            del record["snapshot"]["windows"], record["snapshot"]["gateway"]["source"]
            for replica in record["snapshot"]["replicas"]:
                del replica["source"]
    journal.write_text("".join(json.dumps(record) + "\n" for record in records))
    for tick in replay(journal):
        assert tick.plan.decisions == tick.recorded.decisions
