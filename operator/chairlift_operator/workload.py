"""What one class asks of its replicas, added up from their last samples. Pure; for `scaling`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from chairlift_operator.memory import ReplicaMemory
from chairlift_operator.replica_law import Lengths, sustainable_rate
from chairlift_operator.windows import History
from chairlift_protocol.wire import RequestClass

MIN_REQUESTS: Final = 5  # fewer say little about lengths
LENT_WINDOW_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Workload:
    """queues: how many wait at each replica. kv_tokens: of one replica. kv_tokens_held: contexts of
    all that runs. kv_tokens_needed: of all that runs and waits."""

    num_running: float
    queues: tuple[float, ...]
    oldest_waiting_s: float
    kv_tokens: float
    kv_tokens_held: float
    kv_tokens_needed: float

    @classmethod
    def of(cls, request_class: RequestClass, replicas: Mapping[str, ReplicaMemory]) -> Self:
        latest = [m.history.latest.sample for m in replicas.values() if m.history.latest]
        own = [sample.of(request_class) for sample in latest]
        num_running = sum(c.num_running or 0.0 for c in own)
        queues = tuple(c.num_waiting or 0.0 for c in own)
        lengths = lengths_of(request_class, replicas)
        context = lengths.context_tokens if lengths else 0.0
        held = [m.kv_tokens for m in replicas.values() if m.kv_tokens]
        return cls(
            num_running=num_running,
            queues=queues,
            oldest_waiting_s=max((c.oldest_waiting_s or 0.0 for c in own), default=0.0),
            kv_tokens=min(held, default=0.0),
            kv_tokens_held=num_running * context,
            kv_tokens_needed=(num_running + sum(queues)) * context,
        )

    @property
    def num_waiting(self) -> float:
        return sum(self.queues)


def lengths_of(
    request_class: RequestClass, replicas: Mapping[str, ReplicaMemory]
) -> Lengths | None:
    """Mean lengths over what the replicas' histories hold; None before enough requests."""
    histories = [memory.history for memory in replicas.values()]
    started, prompt, output = (
        sum(_increase(history, request_class, counter) for history in histories)
        for counter in ("first_tokens", "prompt_tokens", "generation_tokens")
    )
    if started < MIN_REQUESTS:
        return None
    return Lengths(prompt / started, max(1.0, output / started))


def rate_per_replica(
    request_class: RequestClass,
    replicas: Mapping[str, ReplicaMemory],
    target_s: float,
    max_batch: int,
) -> float | None:
    """Requests a second that one replica carries, the mean of those whose step times are known."""
    lengths = lengths_of(request_class, replicas)
    if lengths is None:
        return None
    rates = [
        sustainable_rate(memory.model.costs, target_s, lengths, max_batch, memory.kv_tokens)
        for memory in replicas.values()
        if memory.model.costs is not None and memory.kv_tokens
    ]
    return sum(rates) / len(rates) if rates else None


def batch_work_per_s(lenders: Mapping[str, ReplicaMemory], now_s: float) -> float:
    """Batch requests that interactive replicas start in a second."""
    total = 0.0
    for memory in lenders.values():
        window = memory.history.within(LENT_WINDOW_S, now_s)
        if window.span_s > 0:
            total += _increase(window, RequestClass.BATCH, "first_tokens") / window.span_s
    return total


def _increase(history: History, request_class: RequestClass, counter: str) -> float:
    values = [
        value
        for point in history.points
        if (value := getattr(point.sample.of(request_class), counter)) is not None
    ]
    return float(values[-1] - values[0]) if len(values) >= 2 else 0.0
