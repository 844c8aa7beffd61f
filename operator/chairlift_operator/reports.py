"""One replica as people see it: what it runs, how it fares, and why nothing moves if so."""

from __future__ import annotations

from chairlift_operator.decisions import ReplicaReport
from chairlift_operator.memory import ReplicaMemory
from chairlift_operator.readings import SHORT_WINDOW_S, Readings
from chairlift_operator.snapshot import ReplicaSnapshot


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
    )
