from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chairlift_bench.journal_tail import JournalTail


def tick(
    at_s: float, generation: int, batch_size: int, step_tokens: int, *decisions: dict[str, Any]
) -> str:
    policy = {
        "generation": {"term": min(generation, 1), "counter": generation},
        "batch_size": batch_size,
        "step_tokens": step_tokens,
    }
    replicas = [{"name": "interactive-0", "policy": {"effective": policy}}]
    snapshot = {"taken_at_s": at_s, "replicas": replicas}
    return json.dumps({"kind": "tick", "snapshot": snapshot, "decisions": decisions}) + "\n"


DECISION = {"field": "stepTokens", "before": 256, "after": 64, "reason": "12 % of gaps late"}


def test_changes_count_from_the_first_push_on_and_only_when_values_moved(tmp_path: Path) -> None:
    journal = JournalTail(tmp_path / "journal.jsonl")
    journal.path.write_text(
        '{"kind":"start","version":1}\n'
        + tick(100, 0, 64, 2048)  # the engine's own start values
        + tick(105, 1, 16, 256)  # the first push
        + tick(110, 2, 16, 256)  # a new generation, the same values
        + tick(115, 3, 16, 64, DECISION)
        + tick(120, 3, 16, 64)
        + tick(125, 4, 32, 64)
    )
    journal.read()
    assert journal.num_policy_changes == 2
    assert journal.in_force is not None
    assert (journal.in_force.batch_size, journal.in_force.step_tokens) == (32, 64)
    (change,) = journal.changes
    assert (change.at_s, change.sentence) == (15, "step tokens 256→64: 12 % of gaps late")


def test_a_line_that_is_still_being_written_is_read_once_when_it_is_whole(tmp_path: Path) -> None:
    journal = JournalTail(tmp_path / "journal.jsonl")
    journal.read()  # not there yet
    line = tick(100, 1, 16, 256, DECISION)
    with journal.path.open("w") as file:
        file.write(line[:50])
        file.flush()
        journal.read()
        assert journal.in_force is None
        file.write(line[50:])
        file.flush()
        journal.read()
        journal.read()
    assert journal.in_force is not None and len(journal.changes) == 1


def test_a_replica_whose_policy_could_not_be_read_is_no_change(tmp_path: Path) -> None:
    journal = JournalTail(tmp_path / "journal.jsonl")
    unread = json.loads(tick(105, 1, 1, 1))
    unread["snapshot"]["replicas"][0]["policy"] = None
    journal.path.write_text(
        tick(100, 1, 16, 256) + json.dumps(unread) + "\n" + tick(110, 1, 16, 256)
    )
    journal.read()
    assert journal.num_policy_changes == 0
