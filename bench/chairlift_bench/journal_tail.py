"""Reads the controller's journal while it grows: knobs in force, and what was changed and why.

Reads only fields that it shows, and skips what it does not know. `ride` and its view call it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIELDS = {
    "batchSize": "batch size",
    "stepTokens": "step tokens",
    "batchShare": "batch share",
}


@dataclass(frozen=True, slots=True)
class InForce:
    """The policy an engine was read back to hold."""

    generation: tuple[int, int]
    batch_size: int
    step_tokens: int


@dataclass(frozen=True, slots=True)
class Change:
    """One decision; at_s counts from the journal's first tick."""

    at_s: float
    sentence: str


class JournalTail:
    """Follows one file. num_policy_changes: times that an engine was seen with other knobs than at
    the last look, from the first pushed policy on, which itself is not counted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.in_force: InForce | None = None
        self.changes: list[Change] = []
        self.num_policy_changes = 0
        self._offset = 0
        self._started_s: float | None = None
        self._by_replica: dict[str, InForce] = {}

    def read(self) -> None:
        """Take in the lines that were completed since the last call."""
        for record in self._new_records():
            if record.get("kind") != "tick":
                continue
            now_s = float(record["snapshot"]["taken_at_s"])
            self._started_s = now_s if self._started_s is None else self._started_s
            for replica in record["snapshot"]["replicas"]:
                if replica["policy"] is not None:
                    self._see(replica["name"], replica["policy"]["effective"])
            for decision in record["decisions"]:
                self.changes.append(Change(now_s - self._started_s, _sentence(decision)))

    def _new_records(self) -> Iterator[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)

    def _see(self, replica: str, policy: dict[str, Any]) -> None:
        term, counter = policy["generation"]["term"], policy["generation"]["counter"]
        now = InForce((term, counter), policy["batch_size"], policy["step_tokens"])
        before = self._by_replica.get(replica)
        self.in_force = self._by_replica[replica] = now
        was_pushed = before is not None and before.generation > (0, 0)
        if before is not None and was_pushed and _knobs(before) != _knobs(now):
            self.num_policy_changes += 1


def _knobs(policy: InForce) -> tuple[int, int]:
    return policy.batch_size, policy.step_tokens


def _sentence(decision: dict[str, Any]) -> str:
    field = FIELDS.get(decision["field"], decision["field"])
    return f"{field} {decision['before']}→{decision['after']}: {decision['reason']}"
