from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chairlift_bench.journal_tail import JournalTail


def tick(
    at_s: float,
    generation: int,
    batch_size: int,
    step_tokens: int,
    *decisions: dict[str, Any],
    share: float = 1.0,
) -> str:
    policy = {
        "generation": {"term": min(generation, 1), "counter": generation},
        "batch_size": batch_size,
        "step_tokens": step_tokens,
        "batch_class_share": share,
    }
    replicas = [{"name": "interactive-0", "policy": {"effective": policy}}]
    snapshot = {"taken_at_s": at_s, "replicas": replicas}
    return json.dumps({"kind": "tick", "snapshot": snapshot, "decisions": decisions}) + "\n"


DECISION = {
    "field": "stepTokens",
    "before": 256,
    "after": 64,
    "reason": "12 % of gaps late",
    "enforced": True,
}
KEPT = {"field": "batchShare", "before": 1.0, "after": 1.0, "reason": "first", "enforced": False}


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
        + tick(130, 5, 32, 64, KEPT, share=0.5)
    )
    journal.read()
    assert journal.num_policy_changes == 3
    assert journal.in_force is not None
    assert journal.in_force.knobs == (32, 64, 0.5)
    assert [seen.at_s for seen in journal.seen] == [100, 105, 110, 115, 120, 125, 130]
    change, kept = journal.changes
    assert (change.at_s, change.sentence) == (115, "step tokens 256→64: 12 % of gaps late")
    assert (kept.enforced, kept.sentence) == (False, "batch share 1.0 kept: first")


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
