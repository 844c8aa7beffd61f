"""What a simulated run answers: whether objectives were met, with how many replicas, and if not,
what to change.

As far as the run's own figures tell: how the pool stood when bad requests came. Pure;
`chairlift simulate` prints it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from chairlift_operator.spec import InferencePool, Objective
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.conditions import PoolResult
from chairlift_simulation.records import TickState
from chairlift_simulation.summary import (
    BadRequest,
    Standing,
    Summary,
    bad_requests,
    most_interactive,
)

INTERACTIVE: Final = RequestClass.INTERACTIVE
# A cause of fewer of the bad requests often ends with the others.
LEAST_SHARE: Final = 0.2


def verdict(pool: InferencePool, summary: Summary) -> str:
    slo = pool.spec.interactive.slo
    told: dict[bool, list[str]] = {False: [], True: []}
    for name, objective, share in (
        ("first token", slo.time_to_first_token, summary.ttft_share),
        ("gaps", slo.inter_token_latency, 1 - summary.late_gap_share),
    ):
        if share == share:  # of none it is not known
            told[100 * share >= objective.percent].append(f"{name} {_attained(share, objective)}")
    parts = [f"{'met' if met else 'missed'}: {', '.join(told[met])}" for met in told if told[met]]
    return "; ".join(parts) or "nothing was to be met"


def _attained(share: float, objective: Objective) -> str:
    return (
        f"{100 * share:.1f} % within {objective.threshold_ms:g} ms ({objective.percent:g} % wanted)"
    )


def is_missed(pool: InferencePool, summary: Summary) -> bool:
    slo = pool.spec.interactive.slo
    return (
        100 * summary.ttft_share < slo.time_to_first_token.percent
        or 100 * (1 - summary.late_gap_share) < slo.inter_token_latency.percent
    )


def replicas_line(pool: InferencePool, ticks: Sequence[TickState]) -> str:
    """How many of each class served, over the ticks; of batch work where any did."""
    parts = []
    for request_class in RequestClass:
        counts = [tick.num_ready(request_class) for tick in ticks] or [0]
        bounds = pool.spec.replicas(request_class)
        if request_class is INTERACTIVE or any(counts):
            mean = sum(counts) / len(counts)
            parts.append(
                f"{request_class}: {min(counts)} to {max(counts)} ready, {mean:.1f} in the mean, "
                f"{bounds.min} to {bounds.max} allowed"
            )
    return "; ".join(parts)


def advice(pool: InferencePool, result: PoolResult) -> Iterator[str]:
    """When bad requests came, and what to try, the most frequent cause first."""
    bad = list(bad_requests(pool, result))
    if not bad:
        return
    nine_tenths_s = bad[(9 * len(bad) - 1) // 10].journey.request.due_s
    if nine_tenths_s < result.elapsed_s / 2:
        yield f"nine in ten bad requests came in the first {nine_tenths_s:.0f} s"
    causes = Counter(_cause(each.standing) for each in bad)
    for cause, count in causes.most_common():
        if count >= LEAST_SHARE * len(bad):
            own = [each for each in bad if _cause(each.standing) is cause]
            trial = _trial(pool, result, cause, own)
            yield f"{trial} ({100 * count / len(bad):.0f} % of bad requests: {cause})"


def _cause(standing: Standing) -> Standing:
    return Standing.STARTING if standing is Standing.NONE_READY else standing


def _trial(
    pool: InferencePool, result: PoolResult, cause: Standing, bad: Sequence[BadRequest]
) -> str:
    """A change for a run that was bad for that cause."""
    slots, bounds = pool.spec.interactive.batch_size, pool.spec.interactive.replicas
    most = max(len(tick.wanted(INTERACTIVE)) for tick in result.ticks)
    match cause:
        case Standing.STARTING if most <= bounds.min:
            return "try a shorter --warm-up, if replicas can start sooner"
        case Standing.STARTING:
            return f"try --set interactive.replicas.min={most}, as many as it came to have"
        case Standing.UNGROWN:
            return "begin on a pool that has served, or judge by a longer --duration"
        case Standing.SLOW_TOKENS:
            return "try a longer interactive.slo.interTokenLatency.threshold, or a faster --profile"
        case Standing.ALL_RUN:
            return f"try {_one_more(pool)}"
        case Standing.SLOTS_TAKEN if any(_is_at(each.tick, slots.max) for each in bad):
            return f"try --set interactive.batchSize.max={2 * slots.max}, if memory allows it"
    patience = "a longer interactive.slo.timeToFirstToken.threshold"
    if most < most_interactive(pool):
        return f"try --set interactive.replicas.min={most + 1}, one more than it had, or {patience}"
    return f"try {patience}"


def _one_more(pool: InferencePool) -> str:
    """Of the bounds, those that let no further replica run beside the least of batch work."""
    most, capacity = pool.spec.interactive.replicas.max, pool.spec.capacity
    num_batch = pool.spec.replicas(RequestClass.BATCH).min
    settings = []
    if capacity is None or most <= capacity.replicas - num_batch:
        settings.append(f"--set interactive.replicas.max={most + 1}")
    if capacity is not None and capacity.replicas - num_batch <= most:
        settings.append(f"--set capacity.replicas={capacity.replicas + 1}")
    return " ".join(settings)


def _is_at(tick: TickState, batch_size: int) -> bool:
    return any(r.batch_size >= batch_size for r in tick.wanted(INTERACTIVE))
