"""Anything at all, in any order: the rules of `make fuzz`, chosen by hypothesis."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from chairlift_bench.fuzz import play
from chairlift_bench.fuzz_world import World
from chairlift_engine.config import Capacity
from chairlift_protocol.policy import Generation, Policy, SloThresholds, TenantPolicy
from chairlift_protocol.wire import RequestClass

SLO = SloThresholds(1000, 100)
tenants = st.sampled_from(["anonymous", "acme", "bolt"])
caps = st.builds(
    TenantPolicy,
    weight=st.sampled_from([0.5, 1.0, 3.0]),
    slots=st.sampled_from([None, 1, 2]),
    kv_tokens=st.sampled_from([None, 64]),
)


class AnythingAtAll(RuleBasedStateMachine):
    world: World

    @initialize(
        num_blocks=st.integers(4, 40),
        batch_size=st.integers(1, 6),
        share_prefixes=st.booleans(),
    )
    def begin(self, num_blocks: int, batch_size: int, share_prefixes: bool) -> None:
        capacity = Capacity(6, 64, num_blocks, 8, 300, share_prefixes)
        self.world = World(capacity, Policy(Generation(0, 0), batch_size, 48, 32, 1.0, SLO))

    @rule(
        prefix=st.sampled_from([[], [9] * 20, [9] * 40, [8, 9] * 12]),
        tail=st.lists(st.integers(8, 12), min_size=1, max_size=40),
        max_tokens=st.integers(1, 50),
        tenant=tenants,
        request_class=st.sampled_from(RequestClass),
    )
    def add(
        self,
        prefix: list[int],
        tail: list[int],
        max_tokens: int,
        tenant: str,
        request_class: RequestClass,
    ) -> None:
        longest_tokens = self.world.scheduler.capacity.longest_prompt_tokens
        self.world.add((prefix + tail)[:longest_tokens], max_tokens, tenant, request_class)

    @rule(count=st.integers(1, 12), step_s=st.sampled_from([0.01, 0.2, 30.0]))
    def step(self, count: int, step_s: float) -> None:
        for _ in range(count):
            self.world.step(step_s)

    @rule()
    def fail(self) -> None:
        self.world.step(fails=True)

    @rule(index=st.integers(0, 20))
    def abort(self, index: int) -> None:
        self.world.abort(index)

    @rule(
        batch_size=st.integers(1, 6),
        step_tokens=st.integers(8, 64),
        share=st.sampled_from([0.0, 0.4, 1.0]),
        min_share=st.sampled_from([0.0, 0.05, 0.5]),
        by_name=st.dictionaries(tenants, caps, max_size=2),
    )
    def set_policy(
        self,
        batch_size: int,
        step_tokens: int,
        share: float,
        min_share: float,
        by_name: dict[str, TenantPolicy],
    ) -> None:
        self.world.set_policy(
            batch_size=batch_size,
            step_tokens=step_tokens,
            batch_class_share=share,
            batch_min_share=min_share,
            tenants=by_name,
        )

    @invariant()
    def what_waits_can_be_explained(self) -> None:
        scheduler = self.world.scheduler
        assert len(scheduler.explain()) == scheduler.residency.num_requests

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.set_policy(batch_class_share=1.0, batch_size=6, step_tokens=64)
        while self.world.num_alive:
            self.world.step()
        self.world.check_drained()


TestAnythingAtAll = pytest.mark.timeout(120)(AnythingAtAll.TestCase)
TestAnythingAtAll.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(3))
def test_an_episode_of_the_long_fuzz_breaks_no_promise(seed: int) -> None:
    episode = play(seed)
    assert not episode.broken
    assert episode.num_steps > 0 and episode.num_leaked_blocks == 0
