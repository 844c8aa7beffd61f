"""A replica in virtual time: the same every time, and no waiting in this world's time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chairlift_bench import bench_simulator
from chairlift_bench.virtual import BenchReplica, Served
from chairlift_engine.config import Capacity
from chairlift_engine.simulator_profile import Fault, FaultKind, Profile
from chairlift_protocol.policy import Generation, Policy, SloThresholds
from chairlift_simulation.arrival_traces import Arrival, repeated
from chairlift_simulation.replica import VirtualRequest

CAPACITY = Capacity(
    batch_size=4, step_tokens=64, num_blocks=64, block_tokens=16, model_length_tokens=512
)
POLICY = Policy(Generation(0, 0), 4, 64, 64, 1.0, SloThresholds(1000, 100))
STEADY = Profile(a_ms=10, b_ms=0, c_ms=0, d_ms=0, noise=0)


def test_a_seed_gives_one_run_and_another_seed_another() -> None:
    first, again, other = (bench_simulator.simulate(10.0, seed) for seed in (1, 1, 2))
    assert replace(first, wall_s=0, cpu_s=0) == replace(again, wall_s=0, cpu_s=0)
    assert first.digest != other.digest
    assert first.num_served == other.num_served > 30


def test_hours_without_a_request_pass_at_once() -> None:
    replica = BenchReplica(CAPACITY, POLICY, STEADY)
    for due_s in (0.0, 4000.0):
        replica.submit(VirtualRequest(due_s, 100, 3))
    served = replica.run()
    assert [s.outcome.ttft_s for s in served] == pytest.approx([0.02, 0.02])
    assert [s.outcome.gaps_s for s in served] == [pytest.approx((0.01, 0.01))] * 2
    assert replica.clock.now_s() == pytest.approx(4000.04)


def test_a_client_may_answer_to_an_end_with_its_next_request() -> None:
    def follow(served: Served) -> None:
        if len(replica.served) < 3:
            now_s = replica.clock.now_s()
            replica.submit(replace(served.request, due_s=now_s + 1.0))

    replica = BenchReplica(CAPACITY, POLICY, STEADY, on_end=follow)
    replica.submit(VirtualRequest(0.0, 10, 2))
    dues_s = [s.request.due_s for s in replica.run()]
    assert dues_s == pytest.approx([0.0, 1.02, 2.04])


def test_who_was_in_a_step_that_failed_has_ended_too_and_the_next_one_is_served() -> None:
    faulty = replace(STEADY, faults=(Fault(FaultKind.OOM, at_step=2),))
    replica = BenchReplica(CAPACITY, POLICY, faulty)
    for due_s in (0.0, 1.0):
        replica.submit(VirtualRequest(due_s, 10, 3))
    failed, served = (s.outcome for s in replica.run())
    assert failed.error is not None and failed.output_tokens == 1
    assert served.error is None and served.output_tokens == 3


def test_a_policy_that_lets_a_waiting_request_start_needs_no_other_event() -> None:
    static = replace(POLICY, batch_size=2, scheduling="static")
    replica = BenchReplica(CAPACITY, static, STEADY)
    replica.submit(VirtualRequest(0.0, 10, 1))
    replica.step()
    assert not replica.served  # it waits for company
    replica.set_policy(replace(POLICY, generation=Generation(0, 1)))
    (served,) = replica.run()
    assert served.outcome.ttft_s == pytest.approx(0.01)


def test_a_trace_is_repeated_with_a_mean_gap_between_laps() -> None:
    laps = repeated([Arrival(0.0, 1, 1), Arrival(1.0, 2, 2), Arrival(4.0, 3, 3)], 2)
    assert [a.arrival_s for a in laps] == [0.0, 1.0, 4.0, 6.0, 7.0, 10.0]
    assert [a.prompt_tokens for a in laps] == [1, 2, 3] * 2
