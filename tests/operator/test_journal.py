from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift_operator.cluster import ActionResult
from chairlift_operator.journal import JournalError, JournalWriter, replay
from chairlift_operator.memory import Memory
from chairlift_operator.snapshot import Snapshot
from chairlift_operator.step_time import StepCosts

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


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"kind": "tick", "spec": "x"}'])
def test_a_line_that_is_no_record_is_named(journal: Path, line: str) -> None:
    text = journal.read_text(encoding="utf-8")
    journal.write_text(text + line + "\n", encoding="utf-8")
    with pytest.raises(JournalError, match=rf"line {text.count(chr(10)) + 1}: not"):
        list(replay(journal))
