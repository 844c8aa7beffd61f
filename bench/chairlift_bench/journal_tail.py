"""Reads the controller's journal while it grows: knobs in force, and what was changed and why.

Reads only fields that it shows, and skips what it does not know. `rush_run` calls it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift_operator.decisions import WORDS


@dataclass(frozen=True, slots=True)
class InForce:
    """The policy an engine was read back to hold, and when."""

    at_s: float
    generation: tuple[int, int]
    batch_size: int
    step_tokens: int
    batch_share: float

    @property
    def knobs(self) -> tuple[int, int, float]:
        return self.batch_size, self.step_tokens, self.batch_share


@dataclass(frozen=True, slots=True)
class Change:
    """One decision. at_s is Unix time, as in the journal; enforced: it was also done."""

    at_s: float
    field: str
    before: float
    after: float
    enforced: bool
    sentence: str


class JournalTail:
    """Follows one file.

    seen: the policy in force at each tick. num_policy_changes: times that an engine was seen with
    other knobs than at the last look, from the first pushed policy on, which itself is not counted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: list[InForce] = []
        self.changes: list[Change] = []
        self.num_policy_changes = 0
        self._offset = 0
        self._by_replica: dict[str, InForce] = {}

    @property
    def in_force(self) -> InForce | None:
        return self.seen[-1] if self.seen else None

    def read(self) -> None:
        """Take in the lines that were completed since the last call."""
        for record in self._new_records():
            if record.get("kind") != "tick":
                continue
            now_s = float(record["snapshot"]["taken_at_s"])
            for replica in record["snapshot"]["replicas"]:
                if replica["policy"] is not None:
                    self._see(replica["name"], replica["policy"]["effective"], now_s)
            self.changes += [_change(decision, now_s) for decision in record["decisions"]]

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

    def _see(self, replica: str, policy: dict[str, Any], now_s: float) -> None:
        term, counter = policy["generation"]["term"], policy["generation"]["counter"]
        now = InForce(
            at_s=now_s,
            generation=(term, counter),
            batch_size=policy["batch_size"],
            step_tokens=policy["step_tokens"],
            batch_share=policy["batch_class_share"],
        )
        before = self._by_replica.get(replica)
        self._by_replica[replica] = now
        self.seen.append(now)
        was_pushed = before is not None and before.generation > (0, 0)
        if before is not None and was_pushed and before.knobs != now.knobs:
            self.num_policy_changes += 1


def _change(decision: dict[str, Any], now_s: float) -> Change:
    before, after = decision["before"], decision["after"]
    name = WORDS.get(decision["field"], decision["field"])
    said = f"{before}→{after}" if before != after else f"{after} kept"
    return Change(
        at_s=now_s,
        field=name,
        before=before,
        after=after,
        enforced=decision["enforced"],
        sentence=f"{name} {said}: {decision['reason']}",
    )
