"""What outlives a leader: the step-time model and the last good policy, in a ConfigMap."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from chairlift_e2e.fake_kube import FakeKube
from chairlift_operator.kube.children import Owner
from chairlift_operator.kube.keeping import KEEP_EVERY_S, Keeper, KnownHardware
from chairlift_operator.kube.objects import PoolObjects
from chairlift_operator.kube.owning import Foreign
from chairlift_operator.memory import Knobs, Memory, ReplicaMemory
from chairlift_operator.policy_plan import first_policy
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import hardware_hash
from chairlift_operator.step_time import StepCosts, StepTimeModel
from chairlift_protocol.wire import RequestClass

UPDATES_TO_TEACH = 6
COSTS = StepCosts(8e-3, 0.06e-3, 0.045e-3, 5e-8)
POLICIES = "/api/v1/namespaces/team/configmaps/chat-policy"


def taught(costs: StepCosts) -> StepTimeModel:
    return replace(StepTimeModel.from_prior(costs), num_updates=UPDATES_TO_TEACH)


@pytest.fixture
def pool(make_pool: Callable[..., InferencePool]) -> InferencePool:
    return make_pool(interactive={"batchSize": {"max": 128}})


@pytest.fixture
def memory(pool: InferencePool) -> Memory:
    """Of a leader whose engine served well with 48 and 512."""
    known = ReplicaMemory(
        model=taught(COSTS),
        wanted=first_policy(pool, RequestClass.INTERACTIVE),
        last_good=Knobs(48, 512),
    )
    memory = replace(Memory.start(3), replicas=MappingProxyType({"a": known}))
    return memory.on(hardware_hash(pool), 0.0)


def learned(memory: Memory, costs: StepCosts) -> Memory:
    known = replace(memory.replicas["a"], model=taught(costs))
    return replace(memory, replicas=MappingProxyType({"a": known}))


class Cluster:
    def __init__(self, owner: Owner) -> None:
        self.kube, self.owner, self.now_s = FakeKube(), owner, 1000.0
        self.objects = PoolObjects(("team", "chat"), self.kube.stores)

    def leader(self, known: KnownHardware | None = None) -> Keeper:
        """In a process of its own, unless told what that knows."""
        api: Any = self.kube
        known = KnownHardware() if known is None else known
        return Keeper(self.objects, api, self.owner, lambda: self.now_s, known)

    def keep(self, keeper: Keeper, pool: InferencePool, memory: Memory | None) -> int:
        """How often that wrote."""
        before = len(self.kube.writes)
        asyncio.run(keeper.keep(pool, memory))
        return len(self.kube.writes) - before

    def policy(self) -> dict[str, Any]:
        return dict(json.loads(self.kube.objects[POLICIES]["data"]["interactive.json"]))


@pytest.fixture
def cluster(owner: Owner) -> Cluster:
    return Cluster(owner)


def test_another_leader_goes_on_with_model_and_policy(
    cluster: Cluster, pool: InferencePool, memory: Memory
) -> None:
    assert cluster.leader().prior(pool) is None
    assert cluster.keep(cluster.leader(), pool, memory) == 1
    successor = cluster.leader()
    prior = successor.prior(pool)
    assert prior is not None and prior.fixed_s == pytest.approx(COSTS.fixed_s)
    assert Memory.start(4, prior).of("new", 0.0).model.costs is not None
    assert cluster.keep(successor, pool, None) == 0  # knows nothing yet, and forgets nothing
    assert (cluster.policy()["batch_size"], cluster.policy()["step_tokens"]) == (48, 512)


def test_noise_and_haste_write_nothing(
    cluster: Cluster, pool: InferencePool, memory: Memory
) -> None:
    def slower(factor: float) -> Memory:
        return learned(memory, replace(COSTS, fixed_s=factor * COSTS.fixed_s))

    keeper = cluster.leader()
    assert cluster.keep(keeper, pool, memory) == 1
    cluster.now_s += 2 * KEEP_EVERY_S
    assert cluster.keep(keeper, pool, slower(1.1)) == 0
    assert cluster.keep(keeper, pool, slower(2.0)) == 1
    assert cluster.keep(keeper, pool, slower(4.0)) == 0  # soon after
    cluster.now_s += KEEP_EVERY_S
    assert cluster.keep(keeper, pool, slower(4.0)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "3",
        '"x"',
        '{"fixed_s": 1}',
        '{"fixed_s": "x", "decode_s": 1, "prefill_s": 1, "kv_s": 1}',
        '{"fixed_s": null, "decode_s": 1, "prefill_s": 1, "kv_s": 1}',
        '{"fixed_s": NaN, "decode_s": 1, "prefill_s": 1, "kv_s": 1}',
    ],
)
def test_what_people_write_there_that_is_no_model_is_no_model(
    cluster: Cluster, pool: InferencePool, memory: Memory, text: str
) -> None:
    assert cluster.keep(cluster.leader(), pool, memory) == 1
    data = cluster.kube.objects[POLICIES]["data"]
    change = {"data": {key: text for key in data}}
    asyncio.run(cluster.kube.patch(POLICIES, change, "person"))
    assert cluster.leader().prior(pool) is None
    assert cluster.keep(cluster.leader(), pool, memory) == 1
    assert cluster.leader().prior(pool) is not None and cluster.policy()["batch_size"] == 48


def test_a_strangers_config_map_is_not_taken_over(
    cluster: Cluster, pool: InferencePool, memory: Memory
) -> None:
    theirs = {"kind": "ConfigMap", "metadata": {"name": "chat-policy", "namespace": "team"}}
    cluster.kube.objects[POLICIES] = theirs
    with pytest.raises(Foreign, match="is not this pool's"):
        cluster.keep(cluster.leader(), pool, memory)
    assert cluster.kube.objects[POLICIES] == theirs


def test_a_new_pool_begins_with_the_model_of_another_on_the_same_hardware(
    cluster: Cluster,
    pool: InferencePool,
    memory: Memory,
    owner: Owner,
    make_pool: Callable[..., InferencePool],
) -> None:
    known = KnownHardware()
    cluster.keep(cluster.leader(known), pool, memory)
    api: Any = cluster.kube
    objects = PoolObjects(("team", "other"), cluster.kube.stores)
    sibling = Keeper(objects, api, owner, lambda: cluster.now_s, known)
    prior = sibling.prior(make_pool(interactive={"batchSize": {"max": 64}}))
    assert prior is not None and prior.fixed_s == pytest.approx(COSTS.fixed_s)
    on_others = make_pool(runtime={"engine": "simulator", "simulator": {"profile": "slow"}})
    assert sibling.prior(on_others) is None
    assert cluster.leader().prior(on_others) is None  # nor what this one knew before it moved


def test_another_split_of_the_same_step_times_writes_nothing(
    cluster: Cluster, pool: InferencePool, memory: Memory
) -> None:
    """Replicas take turns at being the slowest, and each splits a step in its own way."""
    keeper = cluster.leader()
    cluster.keep(keeper, pool, learned(memory, replace(COSTS, kv_s=0.0)))
    cluster.now_s += 2 * KEEP_EVERY_S
    split = replace(COSTS, fixed_s=7.5e-3, decode_s=0.09e-3, kv_s=1e-9)
    assert cluster.keep(keeper, pool, learned(memory, split)) == 0


def test_what_was_learned_on_other_hardware_is_not_kept_for_this(
    cluster: Cluster, pool: InferencePool, memory: Memory, make_pool: Callable[..., InferencePool]
) -> None:
    known = KnownHardware()
    keeper = cluster.leader(known)
    cluster.keep(keeper, pool, memory)
    cluster.now_s += 2 * KEEP_EVERY_S
    moved = make_pool(runtime={"engine": "simulator", "simulator": {"profile": "slow"}})
    cluster.keep(keeper, moved, memory)  # before the first plan for it
    cluster.keep(keeper, moved, memory.on(hardware_hash(moved), 1.0))
    assert cluster.leader(known).prior(moved) is None
    prior = cluster.leader(known).prior(pool)
    assert prior is not None and prior.fixed_s == pytest.approx(COSTS.fixed_s)


def test_what_an_earlier_leader_kept_does_not_take_the_place_of_what_was_learned_since(
    cluster: Cluster, pool: InferencePool, memory: Memory, owner: Owner
) -> None:
    cluster.keep(cluster.leader(), pool, memory)
    known = KnownHardware()
    api: Any = cluster.kube
    objects = PoolObjects(("team", "other"), cluster.kube.stores)
    sibling = Keeper(objects, api, owner, lambda: cluster.now_s, known)
    asyncio.run(sibling.keep(pool, learned(memory, replace(COSTS, fixed_s=16e-3))))
    cluster.keep(cluster.leader(known), pool, None)  # at rest since
    costs = known.costs[hardware_hash(pool)]
    assert costs.fixed_s == pytest.approx(16e-3)


def test_a_volume_claim_is_another_model_in_another_namespace(
    make_pool: Callable[..., InferencePool],
) -> None:
    def named(source: str, namespace: str) -> str:
        pool = make_pool(model={"name": "m", "source": source})
        metadata = replace(pool.metadata, namespace=namespace)
        return hardware_hash(replace(pool, metadata=metadata))

    assert named("pvc://models/chat", "a") != named("pvc://models/chat", "b")
    assert named("hf://owner/chat", "a") == named("hf://owner/chat", "b")
