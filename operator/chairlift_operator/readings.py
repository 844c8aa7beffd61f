"""One replica's sample taken into its memory, and what the law needs read out of it again. Pure.

A sample counts only when it is fresh and complete: an unusable one leaves history and model as they
were, and its reason is handed on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from chairlift_operator.batch_share import Served
from chairlift_operator.decisions import Health
from chairlift_operator.exposition import EngineSample
from chairlift_operator.law import Demand
from chairlift_operator.memory import ReplicaMemory
from chairlift_operator.snapshot import ReplicaSnapshot
from chairlift_operator.spec import Slo
from chairlift_operator.step_time import learn, means_between
from chairlift_operator.windows import (
    WINDOWS_S,
    Attainment,
    History,
    ObjectiveKey,
    attainment,
    attainment_over,
)
from chairlift_protocol.wire import RequestClass

STALE_AFTER_S: Final = 15.0  # three ticks
SHORT_WINDOW_S: Final = WINDOWS_S[0]
CONTEXT_WINDOW_S: Final = 60.0
PREEMPTION_WINDOW_S: Final = 120.0
PEAK_WINDOW_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Readings:
    """What a replica's memory and sample say now.

    failure: why this tick's sample is unusable. since_move: gaps since the last move was obeyed,
    for the law; inter_token and first_token: over all that is remembered, for people. full_share:
    of the steps that since_move tells of, those whose budget was used up. num_slots: None where
    the engine's policy could not be read.
    """

    failure: str | None
    health: Health
    age_s: float
    demand: Demand
    preempting: bool
    since_move: Attainment | None
    just_now: Attainment | None
    inter_token: Attainment | None
    first_token: Attainment | None
    first_since_lending: Attainment | None
    first_just_now: Attainment | None
    full_share: float
    num_slots: int | None = None

    @property
    def served(self) -> Served:
        own = self.demand.num_own + self.demand.num_own_waiting
        return Served(
            gaps=self.since_move,
            gaps_just_now=self.just_now,
            first_tokens=self.first_since_lending,
            first_tokens_just_now=self.first_just_now,
            has_borrowers=self.demand.num_borrowing + self.demand.num_borrowing_waiting > 0,
            is_idle=own == 0 and self.failure is None,
            oldest_waiting_s=self.demand.oldest_own_waiting_s,
            borrowed_share=self.demand.num_borrowing / self.num_slots if self.num_slots else 1.0,
        )


def take_in(
    memory: ReplicaMemory, seen: ReplicaSnapshot, failure: str | None, now_s: float
) -> ReplicaMemory:
    """failure: why the sample may not be used, from `failure_of`."""
    memory = replace(memory, last_seen_s=now_s, request_class=seen.request_class)
    if seen.policy is not None:
        memory = replace(memory, kv_tokens=seen.policy.capacity.kv_tokens)
    if seen.sample is not None:
        rejected = memory.num_rejected_values + len(seen.sample.rejected)
        memory = replace(memory, num_rejected_values=rejected)
    if failure is not None or seen.sample is None or seen.sampled_at_s is None:
        return memory
    history = memory.history.with_sample(seen.sampled_at_s, seen.sample)
    since_s = memory.learned_at_s
    if history.num_restarts > memory.history.num_restarts:
        since_s = -math.inf
    memory = replace(memory, history=history, learned_at_s=since_s)
    means = means_between(history, since_s)
    if means is None or seen.policy is None:
        return memory
    in_force = seen.policy.effective.step_tokens
    model = learn(memory.model, means, in_force, now_s)
    if model.num_changes > memory.model.num_changes:
        # The trim made up for errors of a model that is no more.
        memory = replace(memory, tuning=replace(memory.tuning, kappa=1.0))
    return replace(memory, model=model, learned_at_s=seen.sampled_at_s)


def failure_of(seen: ReplicaSnapshot, history: History, now_s: float) -> str | None:
    """Why this sample may not be used, None when it may. history: as it was before the sample."""
    if seen.sample is None or seen.sampled_at_s is None:
        return seen.scrape_failure or "no metrics were read"
    if rejected := set(seen.sample.missing) & set(seen.sample.rejected):
        return f"{sorted(rejected)[0]} is NaN, negative or absurdly large"
    if missing := seen.sample.missing:
        return f"series {missing[0]} is absent"
    if (age_s := now_s - seen.sampled_at_s) > STALE_AFTER_S:
        return f"the last sample is {age_s:.0f} s old"
    latest = history.latest
    if latest is not None and seen.sampled_at_s <= latest.at_s:
        return "the sample is not newer than the one before"
    return None


def read(
    memory: ReplicaMemory, seen: ReplicaSnapshot, slo: Slo, failure: str | None, now_s: float
) -> Readings:
    """memory: with the sample taken in."""
    histories = [memory.history]
    request_class = seen.request_class.value
    gaps = ObjectiveKey("itl", slo.inter_token_latency.threshold_ms, request_class)
    first = ObjectiveKey("ttft", slo.time_to_first_token.threshold_ms, request_class)
    budget = slo.inter_token_latency.bad_budget
    first_budget = slo.time_to_first_token.bad_budget
    moved_at_s, lending_at_s = memory.tuning.moved_at_s, memory.lending.moved_at_s
    inter_token = attainment(histories, gaps, budget, now_s)
    latest = memory.history.latest
    recent = memory.history.within(PREEMPTION_WINDOW_S, now_s)
    in_force_s = _in_force_since_s(memory)
    since_move = attainment(histories, gaps, budget, now_s, in_force_s)
    return Readings(
        failure=failure,
        health=_health(memory.history, failure, inter_token, now_s),
        age_s=max(0.0, now_s - (latest.at_s if latest else memory.first_seen_s)),
        demand=demand_of(memory.history, seen, now_s),
        preempting=(recent.increase("num_preemptions") or 0) > 0,
        since_move=since_move,
        just_now=attainment_over(histories, gaps, SHORT_WINDOW_S, now_s, moved_at_s),
        inter_token=inter_token,
        first_token=attainment(histories, first, first_budget, now_s),
        first_since_lending=attainment(histories, first, first_budget, now_s, lending_at_s),
        first_just_now=attainment_over(histories, first, SHORT_WINDOW_S, now_s, lending_at_s),
        full_share=_full_share(memory.history, seen, since_move, in_force_s, now_s),
        num_slots=seen.policy.effective.batch_size if seen.policy is not None else None,
    )


def _in_force_since_s(memory: ReplicaMemory) -> float:
    """From which sample on an engine obeyed the last move; what is from before it is no reading of
    these knobs. An engine that does not tell its policy obeyed at once."""
    moved_at_s = memory.tuning.moved_at_s
    latest = memory.history.latest
    if memory.wanted is None or latest is None or latest.sample.policy_generation is None:
        return moved_at_s
    wanted = memory.wanted.generation
    obeying = (
        p.at_s
        for p in memory.history.points
        if p.at_s >= moved_at_s and p.sample.policy_generation == wanted
    )
    return next(obeying, math.inf)


def _full_share(
    history: History,
    seen: ReplicaSnapshot,
    since_move: Attainment | None,
    since_s: float,
    now_s: float,
) -> float:
    """As if prefill came in full steps only; all of them where it cannot be told."""
    if since_move is None or seen.policy is None:
        return 1.0
    window = history.within(since_move.window_s, now_s, since_s)
    steps, decodes = window.increase("num_steps"), window.increase("step_decode_seqs")
    prefill = window.increase("step_prefill_tokens")
    if not steps or decodes is None or prefill is None:
        return 1.0
    room_tokens = seen.policy.effective.step_tokens * steps - decodes
    return min(1.0, prefill / room_tokens) if room_tokens > 0 else 1.0


def _health(history: History, failure: str | None, gaps: Attainment | None, now_s: float) -> Health:
    latest = history.latest
    if failure is not None or latest is None:
        return Health.MISSING if latest is None else Health.STALE
    at_rest = latest.sample.num_running == 0 and latest.sample.num_waiting == 0
    steps = history.within(SHORT_WINDOW_S, now_s).increase("num_steps")
    if steps is None:  # looked at seldom: what counts is since the look before
        steps = replace(history, points=history.points[-2:]).increase("num_steps")
    if at_rest and steps == 0:
        return Health.IDLE
    return Health.LOW_SAMPLE if gaps is None or gaps.low_sample else Health.OK


def demand_of(history: History, seen: ReplicaSnapshot, now_s: float) -> Demand:
    latest = history.latest
    if latest is None:
        return Demand(0.0, 0.0)
    recent = history.within(PEAK_WINDOW_S, now_s).points
    peaks = (_counted(point.sample, seen.request_class).num_to_run for point in recent)
    return replace(
        _counted(latest.sample, seen.request_class),
        context_tokens=_context_tokens(history.within(CONTEXT_WINDOW_S, now_s), seen),
        num_peak=max(peaks, default=0.0),
        prefill_per_decode=_prefill_per_decode(history),
    )


def _counted(sample: EngineSample, request_class: RequestClass) -> Demand:
    """Who runs and waits. An engine that does not tell classes apart is read as if all were
    interactive."""
    batch = sample.of(RequestClass.BATCH)
    lends = request_class is RequestClass.INTERACTIVE
    return Demand(
        num_running=sample.num_running or 0.0,
        num_waiting=sample.num_waiting or 0.0,
        num_borrowing=(batch.num_running or 0.0) if lends else 0.0,
        num_borrowing_waiting=(batch.num_waiting or 0.0) if lends else 0.0,
        oldest_own_waiting_s=sample.of(request_class).oldest_waiting_s or 0.0,
    )


def _prefill_per_decode(history: History) -> float:
    """0, so that nothing is limited by it, before there was a decode."""
    prefill, decodes = history.increase("step_prefill_tokens"), history.increase("step_decode_seqs")
    return prefill / decodes if prefill and decodes else 0.0


def _context_tokens(window: History, seen: ReplicaSnapshot) -> float | None:
    """Mean KV tokens held by a running sequence, from memory in use, else from what steps read."""
    if seen.policy is None:
        return None
    capacity = seen.policy.capacity
    pairs = [
        (p.sample.kv_usage * capacity.kv_tokens, p.sample.num_running)
        for p in window.points
        if p.sample.kv_usage and p.sample.num_running  # 0 beside running ones is no reading
    ]
    held, running = sum(h for h, _ in pairs), sum(r for _, r in pairs)
    if held > 0 and running > 0:
        return min(held / running, capacity.model_length_tokens)
    read_tokens = window.increase("step_kv_tokens")
    decoded = window.increase("step_decode_seqs")
    if not read_tokens or not decoded:
        return None
    return min(read_tokens / decoded, capacity.model_length_tokens)
