"""A decision in words: what was measured when it was made. Pure; for status and command line."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift_operator.decisions import Decision, ReplicaReport


def inputs_of(decision: Decision, reports: Sequence[ReplicaReport]) -> dict[str, str]:
    """What was measured of the replica, or of all of the class, as far as it is known."""
    seen = [r for r in reports if decision.replica in (r.name, r.request_class.value)]
    sums = {
        "running": [r.num_running for r in seen],
        "waiting": [r.num_waiting for r in seen],
        "tokens per second": [r.output_tokens_per_s for r in seen],
    }
    inputs = {
        name: f"{sum(known):.4g}"
        for name, values in sums.items()
        if (known := [v for v in values if v is not None])
    }
    if len(seen) == 1:
        inputs |= _inputs_of_one(seen[0])
    return inputs


def _inputs_of_one(report: ReplicaReport) -> dict[str, str]:
    told = {
        "gaps within the objective": report.inter_token
        and f"{report.inter_token.good_percent:.1f} %",
        "first tokens within the objective": (
            report.first_token and f"{report.first_token.good_percent:.1f} %"
        ),
        "step": report.step_s and f"{1e3 * report.step_s:.1f} ms",
        "KV memory used": report.kv_usage is not None and f"{100 * report.kv_usage:.0f} %",
    }
    return {name: value for name, value in told.items() if isinstance(value, str)}
