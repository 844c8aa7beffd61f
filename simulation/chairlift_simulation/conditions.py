"""What a run in virtual time is given, and what it gives back. Values only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from chairlift_gateway.routing import Router
from chairlift_operator.control_loop import TICK_S
from chairlift_operator.decisions import Action, Decision
from chairlift_operator.snapshot import Snapshot
from chairlift_protocol.policy import Policy
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.fleet import Hardware
from chairlift_simulation.gateway import HoldLimits
from chairlift_simulation.records import Journey, SecondCounts, TickState
from chairlift_simulation.replica import VirtualRequest

TAIL_S: Final = 60.0  # after the last arrival: what has not ended by then is unfinished


@dataclass(frozen=True, slots=True)
class Backlog:
    """Batch work in a closed loop: each client sends its next request when one has ended.

    until_s: nothing new is sent from then on. is_endless: begin again after the last request.
    """

    requests: Sequence[VirtualRequest]
    num_clients: int
    from_s: float = 0.0
    until_s: float = 0.0
    is_endless: bool = True


NO_BACKLOG: Final = Backlog((), 0)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the pool runs under. warm_up_s: from asking for a replica until it serves.

    policy_delay_s: from a tick until its policies are in force. distort: what the law sees instead
    of what is. restarts_s: when the law forgets everything. first_policy, first_replicas
    (interactive ones): what the pool begins with; the operator's choice and the spec's least by
    default. router: how the gateway chooses. tail_s: for how long requests may still end after the
    last arrival.
    """

    hardware: Hardware
    warm_up_s: float = 60.0
    policy_delay_s: float = TICK_S
    seed: int = 0
    hold: HoldLimits = HoldLimits()
    distort: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot
    restarts_s: tuple[float, ...] = ()
    first_policy: Callable[[RequestClass], Policy] | None = None
    first_replicas: int | None = None
    keeps_gaps: bool = False
    router: Callable[[], Router] = Router
    tail_s: float = TAIL_S


@dataclass(frozen=True, slots=True)
class PoolResult:
    """journeys in the order of their arrival. replica_s: seconds that replicas were held.

    prefix_hit_tokens: of the prompts that were started, found in a prefix cache.
    """

    journeys: tuple[Journey, ...]
    ticks: tuple[TickState, ...]
    seconds: SecondCounts
    decisions: tuple[Decision, ...]
    actions: tuple[tuple[float, Action], ...]
    elapsed_s: float
    replica_s: float
    num_preemptions: int
    prefix_hit_tokens: int
