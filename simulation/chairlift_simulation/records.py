"""What became of the requests of a run, and what each second of it saw.

A request is good when its TTFT met the threshold and at least the objective's percent of its own
gaps did. Refused, failed, cut or unfinished requests are bad. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from chairlift_operator.spec import Slo
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.replica import VirtualRequest


@dataclass(slots=True, eq=False)
class Journey:
    """One request on its way. num_late_gaps: over the inter-token threshold of the run.

    error: None once it has all its tokens. gaps_s: where the run was asked to keep them.
    """

    request: VirtualRequest
    first_s: float | None = None
    ended_s: float | None = None
    num_tokens: int = 0
    num_late_gaps: int = 0
    error: str | None = "unfinished"
    gaps_s: array[float] | None = None
    replica: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.request.due_s

    @property
    def num_gaps(self) -> int:
        return max(0, self.num_tokens - 1)

    def met_first_token(self, slo: Slo) -> bool:
        ttft_s = self.ttft_s
        return ttft_s is not None and ttft_s <= slo.time_to_first_token.threshold_s

    def met_gaps(self, slo: Slo) -> bool:
        num_met = self.num_gaps - self.num_late_gaps
        return num_met * 100 >= slo.inter_token_latency.percent * self.num_gaps

    def is_good(self, slo: Slo) -> bool:
        return self.error is None and self.met_first_token(slo) and self.met_gaps(slo)


@dataclass(slots=True)
class SecondCounts:
    """Of interactive requests, by the second of the run that it happened in; and all tokens."""

    arrivals: array[int] = field(default_factory=lambda: array("q"))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    gaps: array[int] = field(default_factory=lambda: array("q"))
    late_gaps: array[int] = field(default_factory=lambda: array("q"))
    first_tokens: array[int] = field(default_factory=lambda: array("q"))
    late_first_tokens: array[int] = field(default_factory=lambda: array("q"))

    def reach(self, at_s: float) -> int:
        """The index of that second; series are as long as the run so far."""
        second = int(at_s)
        if missing := second + 1 - len(self.arrivals):
            if missing > 0:
                for name in self.__dataclass_fields__:
                    getattr(self, name).extend([0] * missing)
        return second


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica at a tick. batch_size, step_tokens: in force; 0 while it starts."""

    name: str
    request_class: RequestClass
    is_ready: bool
    is_draining: bool
    batch_size: int = 0
    step_tokens: int = 0
    batch_share: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    num_batch: int = 0
    kv_usage: float = 0.0


@dataclass(frozen=True, slots=True)
class TickState:
    at_s: float
    replicas: tuple[ReplicaState, ...]
    num_held: int

    def wanted(self, request_class: RequestClass) -> list[ReplicaState]:
        """Those that serve or start to."""
        return [r for r in self.replicas if r.request_class is request_class and not r.is_draining]

    def num_ready(self, request_class: RequestClass) -> int:
        return sum(r.is_ready and r.request_class is request_class for r in self.replicas)


def of_class(journeys: Iterable[Journey], request_class: RequestClass) -> list[Journey]:
    return [j for j in journeys if j.request.request_class is request_class]
