"""A single engine in virtual time: prompts that share blocks find them, others never do."""

from __future__ import annotations

import pytest

from chairlift_engine.config import Capacity
from chairlift_engine.engine import StepReport
from chairlift_engine.simulator_profile import Profile
from chairlift_protocol.policy import Generation, Policy, SloThresholds
from chairlift_simulation import replica as module
from chairlift_simulation.replica import VirtualReplica, VirtualRequest

CAPACITY = Capacity(
    batch_size=8, step_tokens=512, num_blocks=256, block_tokens=16, model_length_tokens=4096
)
POLICY = Policy(Generation(0, 0), 8, 512, 512, 1.0, SloThresholds(1000, 100))


def reports_of(requests: list[VirtualRequest]) -> list[StepReport]:
    reports: list[StepReport] = []
    replica = VirtualReplica(CAPACITY, POLICY, Profile(), 1, reports.append)
    for request in requests:
        replica.submit(request)
    replica.advance(60.0)
    return reports


def facts(reports: list[StepReport]) -> list[object]:
    return [(r.now_s, r.sums, r.gauges.num_cached_blocks, r.num_preemptions) for r in reports]


def test_names_made_up_for_blocks_do_as_well_as_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [VirtualRequest(0.02 * i, 100 + 37 * i % 900, 700 - 11 * i) for i in range(60)]
    named = facts(reports_of(requests))
    monkeypatch.setattr(module, "_own_keys", lambda number, num_blocks: [])
    assert facts(reports_of(requests)) == named
    assert any(fact[3] for fact in named if isinstance(fact, tuple))  # memory was short


@pytest.mark.parametrize(
    "blocks, num_hit_tokens", [((1, 2, 3), 1024), ((1, 9, 3), 512), ((9, 2, 3), 0), ((), 0)]
)
def test_a_prompt_finds_the_blocks_that_one_before_it_began_with(
    blocks: tuple[int, ...], num_hit_tokens: int
) -> None:
    first = VirtualRequest(0.0, 1300, 3, prefix_blocks=(1, 2, 4))
    second = VirtualRequest(5.0, 1300, 3, prefix_blocks=blocks)
    assert reports_of([first, second])[-1].gauges.prefix_hit_tokens == num_hit_tokens


def test_an_idle_replica_costs_nothing_and_keeps_to_time() -> None:
    reports: list[StepReport] = []
    replica = VirtualReplica(CAPACITY, POLICY, Profile(), 1, reports.append, start_s=100.0)
    replica.advance(5000.0)
    assert replica.clock.now_s() == 5000.0 and reports == []
    replica.submit(VirtualRequest(4999.0, 10, 1))
    replica.advance(5001.0)
    (report,) = (r for r in reports if r.tokens)
    assert 5000.0 < report.now_s < 5000.1
