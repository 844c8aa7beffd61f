"""Tenants' weights, from their quotas to the engines' policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from chairlift_operator.decisions import SetPolicy
from chairlift_operator.memory import Memory
from chairlift_operator.plan import Plan, plan
from chairlift_operator.snapshot import EngineCapacity, PolicyReadback, ReplicaSnapshot, Snapshot
from chairlift_protocol.policy import Generation, Policy, SloThresholds, TenantPolicy

CAPACITY = EngineCapacity(256, 2048, 100_000, 4096, 16)


class Engine:
    """Obeys; nothing runs on it."""

    def __init__(self, pool: Any, tenants: Mapping[str, TenantPolicy] | None = None) -> None:
        self.pool = pool
        self.memory = Memory.start(3)
        self.now_s = 1000.0
        slo = SloThresholds(3000.0, 50.0)
        self.policy = Policy(Generation(0, 0), 16, 256, 256, 1.0, slo, tenants=tenants or {})

    def turn(self, weights: Mapping[str, float] | None) -> Plan:
        self.now_s += 5.0
        told = PolicyReadback(self.policy, self.policy, CAPACITY)
        seen = ReplicaSnapshot("one", True, scrape_failure="not asked", policy=told)
        snapshot = Snapshot("team/chat", self.now_s, (seen,), weights=weights)
        made = plan(self.pool, snapshot, self.memory, self.now_s)
        self.memory = made.memory
        for action in made.actions:
            if isinstance(action, SetPolicy):
                self.policy = action.policy
        return made

    def settled(self, weights: Mapping[str, float] | None) -> list[str]:
        """What is said of weights until nothing more changes."""
        plans = [self.turn(weights) for _ in range(4)]
        assert not [a for a in plans[-1].actions if isinstance(a, SetPolicy)]
        return [d.sentence for p in plans for d in p.decisions if d.field == "tenantWeights"]


@pytest.fixture
def engine(make_pool: Callable[..., Any]) -> Engine:
    return Engine(make_pool())


def test_weights_of_quotas_reach_the_engines_and_are_said_once(engine: Engine) -> None:
    assert len(engine.settled({"acme": 2.0})) == 1
    assert engine.policy.tenants == {"acme": TenantPolicy(2.0)}
    (sentence,) = engine.settled({"acme": 2.0, "beta": 0.5})
    assert "acme 2→acme 2, beta 0.5" in sentence and "quotas ask for it" in sentence


def test_a_tenant_whose_quota_is_gone_has_the_usual_weight(engine: Engine) -> None:
    engine.settled({"acme": 2.0})
    (sentence,) = engine.settled({})
    assert engine.policy.tenants == {} and "acme 2→all 1" in sentence


def test_before_quotas_are_known_engines_keep_their_weights(engine: Engine) -> None:
    engine.settled({"acme": 2.0})
    assert engine.settled(None) == []
    assert engine.policy.tenants == {"acme": TenantPolicy(2.0)}


def test_caps_that_somebody_else_set_stay(make_pool: Callable[..., Any]) -> None:
    engine = Engine(make_pool(), {"acme": TenantPolicy(slots=3), "beta": TenantPolicy(4.0)})
    engine.settled({"acme": 2.0})
    assert engine.policy.tenants == {"acme": TenantPolicy(2.0, slots=3)}


def test_a_sentence_names_a_few_tenants_and_counts_the_others(engine: Engine) -> None:
    (sentence,) = engine.settled({f"t{number}": 2.0 for number in range(9)})
    assert "t4 2, 4 more" in sentence


def test_no_weight_is_written_where_the_pool_only_recommends(
    make_pool: Callable[..., Any],
) -> None:
    engine = Engine(make_pool(mode="Recommend"))
    before = replace(engine.policy)
    engine.settled({"acme": 2.0})
    assert engine.policy == before
