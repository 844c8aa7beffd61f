"""What an engine says of its load, at `/load` and in a header of every response."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Load:
    """A moment's load of one replica. `lend_share` is the policy's batch_class_share."""

    num_running: int
    num_waiting: int
    waiting_prefill_tokens: int
    free_kv_tokens: int
    lend_share: float
    policy_generation: tuple[int, int]
    draining: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_header(self) -> str:
        return json.dumps(self.to_json(), separators=(",", ":"))

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Raise KeyError, TypeError or ValueError when a field is missing or of the wrong type."""
        term, counter = body["policy_generation"]
        return cls(
            num_running=int(body["num_running"]),
            num_waiting=int(body["num_waiting"]),
            waiting_prefill_tokens=int(body["waiting_prefill_tokens"]),
            free_kv_tokens=int(body["free_kv_tokens"]),
            lend_share=float(body["lend_share"]),
            policy_generation=(int(term), int(counter)),
            draining=bool(body["draining"]),
        )
