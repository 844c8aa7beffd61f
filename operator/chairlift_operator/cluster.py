"""The seam between deciding and doing: where a pool's replicas are, however they are run.

Implemented by `direct_cluster.DirectCluster` for engines at known addresses (local mode), by
`kube.pool_controller.PoolController` for pods. `control_loop` is handed one and never knows which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from chairlift_operator.decisions import Action
from chairlift_operator.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class ActionResult:
    """What became of one action. verified: the engine holds the policy, or replicas are on their
    way."""

    action: Action
    verified: bool
    detail: str


class Cluster(Protocol):
    async def observe(self) -> Snapshot:
        """The pool now. A replica that cannot be read is in it, with the reason."""
        ...

    async def apply(self, actions: Sequence[Action]) -> tuple[ActionResult, ...]:
        """Perform actions in their order and read back; a failure is a result, not an exception."""
        ...
