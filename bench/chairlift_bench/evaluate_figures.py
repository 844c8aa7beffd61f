"""One run of the evaluation in figures. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from chairlift_bench.evaluate_faults import BLINDING
from chairlift_bench.evaluate_scenarios import Setup
from chairlift_operator.decisions import SetPolicy, SetReplicas
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.conditions import PoolResult
from chairlift_simulation.records import of_class
from chairlift_simulation.summary import percentile

INTERACTIVE = RequestClass.INTERACTIVE
SETTLED_S: Final = 30.0
MOVE: Final = 0.10  # smaller moves are none


@dataclass(frozen=True, slots=True)
class Figures:
    """Shares are of all interactive requests judged. settle_s: seconds until, for 30 s, gaps met
    their objective and throughput was 90 % of `tokens_per_s_wanted`; by the latter, in steps."""

    num_requests: int
    ttft_share: float
    itl_share: float
    good_share: float
    goodput_per_s: float
    tokens_per_s: float
    late_gap_share: float
    ttft_p95_s: float
    replica_hours: float
    batch_size_reversals_per_h: float
    step_tokens_reversals_per_h: float
    replica_reversals: int
    num_turns: int
    actions_per_h: float
    preemptions_per_1k: float
    num_unsafe: int
    batch_tokens_per_s: float
    batch_share_kept: float
    settle: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """What is not finite was written as null."""
        known: dict[str, Any] = {
            name: math.inf if values[name] is None else values[name]
            for name in cls.__dataclass_fields__
        }
        return cls(**known)


def figures_of(setup: Setup, result: PoolResult) -> Figures:
    slo = setup.pool.spec.interactive.slo
    own = [
        j
        for j in of_class(result.journeys, INTERACTIVE)
        if j.request.due_s >= setup.judged_from_s and j.request.tenant != "noisy"
    ]
    judged_s = setup.until_s - setup.judged_from_s
    num_good = sum(j.is_good(slo) for j in own)
    first_s = sorted(math.inf if j.ttft_s is None else j.ttft_s for j in own)
    seconds, start = result.seconds, int(setup.judged_from_s)
    num_gaps = sum(seconds.gaps[start:])
    num_tokens = sum(seconds.tokens[start : int(setup.until_s)])
    hours = setup.until_s / 3600
    batch_reversals, step_reversals = _knob_reversals(result)
    counts = [sum(not r.is_draining for r in tick.replicas) for tick in result.ticks]
    return Figures(
        num_requests=len(own),
        ttft_share=sum(j.met_first_token(slo) for j in own) / max(1, len(own)),
        itl_share=sum(j.error is None and j.met_gaps(slo) for j in own) / max(1, len(own)),
        good_share=num_good / max(1, len(own)),
        goodput_per_s=num_good / judged_s,
        tokens_per_s=num_tokens / judged_s,
        late_gap_share=sum(seconds.late_gaps[start:]) / max(1, num_gaps),
        ttft_p95_s=percentile(first_s, 95),
        replica_hours=result.replica_s / 3600,
        batch_size_reversals_per_h=batch_reversals / hours,
        step_tokens_reversals_per_h=step_reversals / hours,
        replica_reversals=reversals(counts, least=0.0),
        num_turns=setup.num_turns,
        actions_per_h=len(result.actions) / hours,
        preemptions_per_1k=1000 * result.num_preemptions / max(1, len(result.journeys)),
        num_unsafe=_num_unsafe(setup, result),
        batch_tokens_per_s=_batch_tokens(result, 0, int(setup.until_s)) / setup.until_s,
        batch_share_kept=_batch_share_kept(setup, result),
        settle=_settle(result, int(setup.until_s)),
    )


def reversals(values: Sequence[float], least: float = MOVE) -> int:
    """Moves of more than `least` of the value against the direction of the one before."""
    count, last, direction = 0, None, 0
    for value in values:
        if last is None:
            last = value
        if abs(value - last) <= least * last:
            continue
        now = 1 if value > last else -1
        count += direction not in (0, now)
        direction, last = now, value
    return count


def _knob_reversals(result: PoolResult) -> tuple[float, float]:
    """Of batch size and of step tokens; the mean over replicas."""
    names = {r.name for tick in result.ticks for r in tick.replicas if r.is_ready}
    batch: list[int] = []
    step: list[int] = []
    for name in sorted(names):
        states = [r for t in result.ticks for r in t.replicas if r.name == name and r.is_ready]
        batch.append(reversals([r.batch_size for r in states]))
        step.append(reversals([r.step_tokens for r in states]))
    return sum(batch) / max(1, len(batch)), sum(step) / max(1, len(step))


def _num_unsafe(setup: Setup, result: PoolResult) -> int:
    """What grew, or went, while nothing could be known."""
    fault = setup.fault
    if fault is None or fault.kind not in BLINDING:
        return 0
    unsafe = 0
    blind_from_s = fault.from_s + 15.0  # a sample may be so old
    told: dict[str, tuple[int, int]] = {}
    for at_s, action in result.actions:
        blind = blind_from_s < at_s < fault.until_s
        if isinstance(action, SetReplicas):
            unsafe += blind and bool(action.victims)
        elif isinstance(action, SetPolicy):
            after = action.policy.batch_size, action.policy.step_tokens
            before = told.get(action.replica, after)
            unsafe += blind and (after[0] > before[0] or after[1] > before[1])
            told[action.replica] = after
    return unsafe


def _settle(result: PoolResult, until_s: int) -> dict[str, float]:
    """Seconds until settled, by the throughput wanted; the lookup is `settle_s`."""
    seconds, window = result.seconds, int(SETTLED_S)
    if len(seconds.gaps) < window:
        return {}
    best: dict[str, float] = {}
    level = -math.inf
    met: list[tuple[float, int]] = []
    for start in range(min(until_s, len(seconds.gaps)) - window + 1):
        gaps = sum(seconds.gaps[start : start + window])
        late = sum(seconds.late_gaps[start : start + window])
        if gaps and late <= 0.05 * gaps:
            rate = sum(seconds.tokens[start : start + window]) / SETTLED_S
            met.append((rate, start))
    for rate, start in met:
        if rate > level:
            level = rate
            best[f"{rate:.3f}"] = float(start)
    return best


def settle_s(settle: dict[str, float], tokens_per_s: float) -> float:
    """First second from which 30 s met the objective at 90 % of that throughput."""
    levels = sorted((float(rate), start) for rate, start in settle.items())
    index = bisect_left(levels, (0.9 * tokens_per_s, -math.inf))
    return levels[index][1] if index < len(levels) else math.inf


def _batch_tokens(result: PoolResult, start: int, end: int) -> int:
    seconds = result.seconds
    return sum(
        sum(series[start:end]) * sign
        for series, sign in ((seconds.tokens, 1), (seconds.gaps, -1), (seconds.first_tokens, -1))
    )


def _batch_share_kept(setup: Setup, result: PoolResult) -> float:
    """Of the minutes with batch work waiting, those in which it got its least share of tokens."""
    backlog = setup.backlog
    if not backlog.num_clients:
        return 1.0
    starts = range(int(backlog.from_s), int(backlog.until_s) - 59, 60)
    kept = [
        _batch_tokens(result, start, start + 60)
        >= 0.05 * sum(result.seconds.tokens[start : start + 60])
        for start in starts
    ]
    return sum(kept) / len(kept)
