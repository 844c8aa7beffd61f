"""What the simulation counts is, to the letter, what an engine exports and the operator reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chairlift_engine.config import Capacity
from chairlift_engine.engine import StepReport
from chairlift_engine.server.metrics import Metrics
from chairlift_engine.simulator_profile import Profile
from chairlift_operator.exposition import parse_engine_metrics
from chairlift_protocol.policy import Generation, Policy, SloThresholds
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.counters import EngineCounters
from chairlift_simulation.replica import VirtualReplica, VirtualRequest

CAPACITY = Capacity(
    batch_size=8, step_tokens=256, num_blocks=64, block_tokens=16, model_length_tokens=512
)
POLICY = Policy(Generation(1, 3), 6, 128, 128, 1.0, SloThresholds(60, 12.5))


@pytest.mark.parametrize("until_s", [0.05, 0.4, 60.0])
def test_counters_equal_what_is_parsed_from_the_engines_own_metrics(until_s: float) -> None:
    reports: list[StepReport] = []
    profile = Profile(a_ms=8, b_ms=0.5, c_ms=0.05, d_ms=0.001)
    replica = VirtualReplica(CAPACITY, POLICY, profile, 1, reports.append)
    for number in range(24):
        request_class = list(RequestClass)[number % 3 == 0]
        replica.submit(VirtualRequest(0.02 * number, 40 + number, 5 + number, request_class))
    replica.advance(until_s / 2)
    for request_id in ("3", "9"):
        replica.abort(request_id)
    stricter = replace(POLICY, generation=Generation(1, 4), slo=SloThresholds(50, 10))
    replica.set_policy(stricter)
    replica.advance(until_s)
    counters = EngineCounters()
    exported = Metrics("tiny", "0", CAPACITY, replica.clock)
    fresh = VirtualReplica(CAPACITY, POLICY, profile).scheduler
    exported.observe_gauges(fresh.residency.gauges(), POLICY, POLICY)
    for report in reports:
        counters.take(report)
        exported.observe_report(report)
        exported.observe_gauges(report.gauges, report.policy, report.policy)
    expected = parse_engine_metrics(exported.render().decode())
    sample = counters.sample(
        reports[-1].gauges, reports[-1].policy, CAPACITY.num_blocks, replica.clock.now_s()
    )
    assert sample == replace(
        expected, slo_counts=sample.slo_counts, step_seconds=sample.step_seconds
    )
    assert sample.step_seconds == pytest.approx(expected.step_seconds)
    assert set(sample.slo_counts) <= set(expected.slo_counts)
    others = set(expected.slo_counts) - set(sample.slo_counts)
    assert all(count.num_good == count.num_bad == 0 for count in others)
