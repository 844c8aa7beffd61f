"""From a trace to what a pool is offered: requests that fit its model, at a wanted rate. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chairlift_operator.spec import InferencePool
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.arrival_traces import Arrival, Stretch, at_rates, mean_rate_per_s, rotated
from chairlift_simulation.replica import VirtualRequest


@dataclass(frozen=True, slots=True)
class Offered:
    """num_too_long: left out, since no engine of the pool could hold their prompt."""

    requests: tuple[VirtualRequest, ...]
    num_too_long: int


def offered(
    arrivals: Iterable[Arrival],
    pool: InferencePool,
    kv_tokens: int,
    request_class: RequestClass = RequestClass.INTERACTIVE,
    tenant: str = "anonymous",
) -> Offered:
    longest = min(kv_tokens, pool.spec.model.max_length) - 1
    kept, num_too_long = [], 0
    for arrival in arrivals:
        if arrival.prompt_tokens > longest:
            num_too_long += 1
            continue
        kept.append(
            VirtualRequest(
                arrival.arrival_s,
                arrival.prompt_tokens,
                arrival.output_tokens,
                request_class,
                tenant,
                arrival.prefix_blocks,
            )
        )
    return Offered(tuple(kept), num_too_long)


def scaled(
    arrivals: Sequence[Arrival], requests_per_s: float | None, duration_s: float | None, seed: int
) -> list[Arrival]:
    """The trace from a place that the seed picks; its own rate and length where none is given."""
    rate = requests_per_s or mean_rate_per_s(arrivals)
    duration_s = duration_s or len(arrivals) / rate
    return at_rates(rotated(arrivals, seed), [Stretch(duration_s, rate)])
