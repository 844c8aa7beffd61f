"""One replica as people see it: what it runs, how it fares, and why nothing moves if so."""

from __future__ import annotations

from typing import Final

from chairlift_operator.decisions import ReplicaReport, SlotUse, Strain
from chairlift_operator.memory import ReplicaMemory
from chairlift_operator.readings import SHORT_WINDOW_S, Readings
from chairlift_operator.snapshot import ReplicaSnapshot
from chairlift_operator.step_time import means_between
from chairlift_operator.windows import History
from chairlift_protocol.wire import RequestClass

SLOTS_WINDOW_S: Final = 60.0
LEAST_SAMPLES: Final = 3
MOST: Final = 0.5  # of the requests that run
NEARLY_ALWAYS: Final = 0.8


def report_of(
    memory: ReplicaMemory,
    seen: ReplicaSnapshot,
    readings: Readings,
    held: str | None,
    infeasible: bool,
) -> ReplicaReport:
    latest, told = memory.history.latest, seen.policy.desired if seen.policy else None
    short = memory.history.within(SHORT_WINDOW_S, latest.at_s) if latest else memory.history
    steps, busy_s = short.increase("num_steps"), short.increase("step_seconds")
    tokens = short.increase("generation_tokens")
    return ReplicaReport(
        name=seen.name,
        ready=seen.ready,
        health=readings.health,
        request_class=seen.request_class,
        phase=seen.phase,
        batch_share=told.batch_class_share if told else None,
        held=held,
        batch_size=told.batch_size if told else None,
        step_tokens=told.step_tokens if told else None,
        num_running=latest.sample.num_running if latest else None,
        num_waiting=latest.sample.num_waiting if latest else None,
        num_borrowing=readings.demand.num_borrowing,
        num_borrowing_waiting=readings.demand.num_borrowing_waiting,
        kv_usage=latest.sample.kv_usage if latest else None,
        step_s=busy_s / steps if steps and busy_s is not None else None,
        output_tokens_per_s=tokens / short.span_s if tokens is not None and short.span_s else None,
        inter_token=readings.inter_token,
        first_token=readings.first_token,
        costs=memory.model.costs,
        kappa=memory.tuning.kappa,
        num_unverified=memory.num_unverified,
        infeasible=infeasible,
        num_rejected_values=memory.num_rejected_values,
        observed_at_s=latest.at_s if latest else None,
        source=seen.source,
        strain=_strain(memory, seen, readings),
        slot_use=_slot_use(memory.history),
    )


def _strain(memory: ReplicaMemory, seen: ReplicaSnapshot, readings: Readings) -> Strain | None:
    """None without steps enough, or without the policy in force."""
    latest, gaps = memory.history.latest, readings.inter_token
    if latest is None or gaps is None or seen.policy is None:
        return None
    window = memory.history.within(gaps.window_s, latest.at_s)
    means = means_between(window, window.points[0].at_s)
    if means is None:
        return None
    is_trusted = memory.model.trusted_at(means.num_decodes, 0.0, means.kv_tokens)
    in_force = seen.policy.effective
    return Strain(
        num_decodes=means.num_decodes,
        prefill_tokens=means.prefill_tokens,
        kv_tokens=means.kv_tokens,
        costs=memory.model.costs if is_trusted else None,
        prompt_tokens=_prompt_tokens(window, seen.request_class),
        step_tokens=None if in_force.scheduling == "static" else in_force.step_tokens,
    )


def _prompt_tokens(window: History, request_class: RequestClass) -> float | None:
    first, last = (p.sample.of(request_class) for p in (window.points[0], window.points[-1]))
    ends = (first.first_tokens, last.first_tokens, first.prompt_tokens, last.prompt_tokens)
    began, ended, least, most = ends
    if began is None or ended is None or least is None or most is None or ended <= began:
        return None
    return (most - least) / (ended - began)


def _slot_use(history: History) -> SlotUse | None:
    """None where engines do not tell tenants apart, or too little was seen."""
    latest = history.latest
    if latest is None:
        return None
    window = history.within(SLOTS_WINDOW_S, latest.at_s)
    told = [
        (p.sample.slot_holder, p.sample.num_running)
        for p in window.points
        if p.sample.slot_holder is not None and p.sample.num_running is not None
    ]
    if len(told) < LEAST_SAMPLES or latest.sample.slot_holder is None:
        return None
    now, running = latest.sample.slot_holder, latest.sample.num_running or 0.0
    holds = [
        holder.tenant == now.tenant
        and holder.num_running > MOST * num_running
        and holder.num_others_waiting > 0
        for holder, num_running in told
    ]
    is_one = bool(now.tenant) and sum(holds) >= NEARLY_ALWAYS * len(holds)
    return SlotUse(now.tenant if is_one else None, now.num_running, running, now.num_others_waiting)
