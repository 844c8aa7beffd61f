"""A simulated run in figures: what was met, what it cost, what moved, and what stood in the way.

Pure; `chairlift simulate` prints it, the evaluation averages it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from chairlift_operator.decisions import WORDS
from chairlift_operator.spec import InferencePool
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.conditions import PoolResult
from chairlift_simulation.records import Journey, TickState, of_class

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH


class Standing(StrEnum):
    """How the pool stood when a bad request came: the first of these that was so."""

    SLOW_TOKENS = "tokens came too slowly"
    NONE_READY = "no replica was ready"
    STARTING = "replicas were starting"
    UNGROWN = "the batch size had yet to grow"
    ALL_RUN = "all replicas that may run did"
    SLOTS_TAKEN = "every slot was taken and no replica was asked for"
    PROMPTS_QUEUED = "prompts queued and no replica was asked for"


@dataclass(frozen=True, slots=True)
class BadRequest:
    """tick: the last one before it came."""

    journey: Journey
    tick: TickState
    standing: Standing


@dataclass(frozen=True, slots=True)
class Summary:
    """Shares are of all interactive requests, refused and unfinished ones included; NaN of none.

    changes: decisions by what they moved. bad_while: bad requests by how the pool stood when they
    came. goodput_per_s: good requests a second. replica_hours: starting and draining included.
    """

    num_requests: int
    num_refused: int
    num_unfinished: int
    ttft_share: float
    itl_share: float
    good_share: float
    ttft_p50_s: float
    ttft_p95_s: float
    late_gap_share: float
    goodput_per_s: float
    output_tokens_per_s: float
    num_batch_done: int
    replica_hours: float
    most_replicas: int
    num_preemptions: int
    changes: dict[str, int]
    bad_while: dict[str, int]

    @classmethod
    def of(cls, pool: InferencePool, result: PoolResult, offered_s: float) -> Summary:
        slo = pool.spec.interactive.slo
        own = of_class(result.journeys, INTERACTIVE)
        num_good = sum(j.is_good(slo) for j in own)
        unfinished = sum(j.error == "unfinished" for j in own)
        first_s = sorted(j.ttft_s for j in own if j.ttft_s is not None)
        num_gaps = sum(result.seconds.gaps)
        batch = of_class(result.journeys, BATCH)
        return cls(
            num_requests=len(own),
            num_refused=sum(j.error is not None for j in own) - unfinished,
            num_unfinished=unfinished,
            ttft_share=_share(sum(j.met_first_token(slo) for j in own), len(own)),
            itl_share=_share(sum(j.error is None and j.met_gaps(slo) for j in own), len(own)),
            good_share=_share(num_good, len(own)),
            ttft_p50_s=percentile(first_s, 50),
            ttft_p95_s=percentile(first_s, 95),
            late_gap_share=_share(sum(result.seconds.late_gaps), num_gaps),
            goodput_per_s=num_good / offered_s,
            output_tokens_per_s=sum(result.seconds.tokens) / result.elapsed_s,
            num_batch_done=sum(j.error is None for j in batch),
            replica_hours=result.replica_s / 3600,
            most_replicas=max((len(tick.replicas) for tick in result.ticks), default=0),
            num_preemptions=result.num_preemptions,
            changes=dict(
                Counter(
                    WORDS[d.field] for d in result.decisions if d.enforced and d.before != d.after
                )
            ),
            bad_while=dict(
                Counter(str(bad.standing) for bad in bad_requests(pool, result)).most_common()
            ),
        )


def bad_requests(pool: InferencePool, result: PoolResult) -> Iterator[BadRequest]:
    """The interactive ones, by arrival."""
    slo, times_s = pool.spec.interactive.slo, [tick.at_s for tick in result.ticks]
    grown_s = _grown_s(result.ticks)
    for journey in of_class(result.journeys, INTERACTIVE):
        if not journey.is_good(slo):
            tick = result.ticks[max(0, bisect_right(times_s, journey.request.due_s) - 1)]
            yield BadRequest(journey, tick, _standing(pool, tick, journey, grown_s))


def _standing(pool: InferencePool, tick: TickState, journey: Journey, grown_s: float) -> Standing:
    slo = pool.spec.interactive.slo
    if journey.met_first_token(slo) and journey.error is None:
        return Standing.SLOW_TOKENS
    own = tick.wanted(INTERACTIVE)
    if not any(r.is_ready for r in own):
        return Standing.NONE_READY
    if not all(r.is_ready for r in own):
        return Standing.STARTING
    full = [r for r in own if r.num_waiting > 0 and r.num_running >= 0.9 * r.batch_size]
    if full and tick.at_s < grown_s:
        return Standing.UNGROWN
    if len(own) >= most_interactive(pool):
        return Standing.ALL_RUN
    return Standing.SLOTS_TAKEN if full else Standing.PROMPTS_QUEUED


def most_interactive(pool: InferencePool) -> int:
    """Replicas that may run beside the least of batch work, which a full pool keeps."""
    left = pool.spec.num_replicas - pool.spec.replicas(BATCH).min
    return min(pool.spec.replicas(INTERACTIVE).max, left)


def _grown_s(ticks: Sequence[TickState]) -> float:
    """When a batch size first was half of the run's largest: a pool begins cautiously."""
    sizes = [(t.at_s, r.batch_size) for t in ticks for r in t.wanted(INTERACTIVE)]
    largest = max((size for _, size in sizes), default=0)
    return min((at_s for at_s, size in sizes if 2 * size >= largest), default=0.0)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Nearest rank; NaN when there are none."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def _share(count: float, of: float) -> float:
    return count / of if of else math.nan
