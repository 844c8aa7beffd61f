"""Tenants of one class take turns by what was computed for them, and keep to their caps."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chairlift_bench.fuzz_world import World
from chairlift_engine.config import Capacity
from chairlift_engine.request import Obstacle, Request
from chairlift_engine.tenancy import MAX_IDLE_TENANTS
from chairlift_protocol.policy import Generation, Policy, SloThresholds, TenantPolicy
from chairlift_protocol.wire import RequestClass

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
_numbers = count()


def world(num_blocks: int = 400, batch_size: int = 10, step_tokens: int = 64, **v: object) -> World:
    capacity = Capacity(16, 512, num_blocks, 16, 1000)
    given = {"batch_size": batch_size, "step_tokens": step_tokens, "chunk_tokens": step_tokens, **v}
    slo = SloThresholds(1000, 1000)
    policy = Policy(Generation(0, 0), batch_class_share=1.0, slo=slo, **given)  # type: ignore[arg-type]
    return World(capacity, policy)


def add(
    w: World, tenant: str, num_prompt: int = 20, output: int = 10, cls: RequestClass = INTERACTIVE
) -> Request:
    return w.add([1000 + next(_numbers)] * num_prompt, output, tenant, cls)


def keep_backlogged(w: World, tenants: dict[str, int], num_steps: int) -> Counter[str]:
    """Requests of so many tokens always wait; what each tenant was served, in cost."""
    before = dict(w.fairness.served_by_tenant())
    for _ in range(num_steps):
        waiting = Counter(r.tenant for q in w.scheduler.residency.waiting.values() for r in q)
        for tenant, size in tenants.items():
            for _ in range(4 - waiting[tenant]):
                add(w, tenant, size, size)
        w.step()
    return Counter({t: s - before.get(t, 0.0) for t, s in w.fairness.served_by_tenant().items()})


def test_a_newcomer_of_another_tenant_starts_in_the_next_step_of_a_busy_engine() -> None:
    w = world()
    for _ in range(30):
        add(w, "acme", output=200)
    for _ in range(8):
        w.step()
    assert len(w.scheduler.residency.running) == 9  # of 10: never the last one
    chat = add(w, "bolt")
    assert chat in {chunk.request for chunk in w.step().chunks}
    assert sum(r.num_preemptions for r in w.scheduler.residency.running) == 0


@pytest.mark.parametrize(("batch_size", "num_slots"), [(1, 1), (2, 1), (9, 8), (10, 9), (16, 15)])
def test_by_default_a_tenant_leaves_a_tenth_of_the_slots_and_at_least_one(
    batch_size: int, num_slots: int
) -> None:
    w = world(batch_size=batch_size, step_tokens=512)
    for _ in range(20):
        add(w, "acme", output=60)
    for _ in range(3):
        w.step()
    assert len(w.scheduler.residency.running) == num_slots
    assert w.scheduler.explain()[-1].obstacle in (Obstacle.TENANT_SLOTS, Obstacle.SLOTS)


def test_without_identities_nobody_keeps_a_slot_free_for_a_stranger() -> None:
    w = world(step_tokens=512)
    for _ in range(12):
        add(w, "anonymous", output=60)
    w.step()
    assert len(w.scheduler.residency.running) == 10
    add(w, "acme", output=60)
    while sum(r.tenant == "acme" for r in w.scheduler.residency.running) == 0:
        w.step()
    assert w.scheduler.residency.num_preemptions == 0


def test_two_backlogged_tenants_are_served_by_weight_whatever_the_size_of_their_requests() -> None:
    w = world(tenants={"bolt": TenantPolicy(weight=2.0)})
    served = keep_backlogged(w, {"acme": 60, "bolt": 10}, 1500)
    assert served["bolt"] / served["acme"] == pytest.approx(2.0, rel=0.05)


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.sampled_from([0.5, 1.0, 2.0])), min_size=2, max_size=4
    ),
    st.integers(2, 12),
)
def test_tenants_that_wait_are_never_further_apart_than_the_vtc_bound(
    clients: list[tuple[int, float]], batch_size: int
) -> None:
    names = [f"t{i}" for i in range(len(clients))]
    weights = {n: TenantPolicy(c[1], slots=16) for n, c in zip(names, clients, strict=True)}
    w = world(num_blocks=300, batch_size=batch_size, tenants=weights)
    keep_backlogged(w, {n: c[0] for n, c in zip(names, clients, strict=True)}, 80)
    assume(w.fairness.num_compared > 0)  # short requests and many slots: nobody waits
    assert not w.fairness.broken


def test_being_idle_earns_nothing() -> None:
    w = world()
    keep_backlogged(w, {"acme": 20}, 300)
    served = keep_backlogged(w, {"acme": 20, "sleeper": 20}, 400)
    assert served["sleeper"] / served["acme"] == pytest.approx(1.0, rel=0.1)


def test_who_comes_when_nobody_is_left_starts_where_the_last_one_was() -> None:
    w = world()
    keep_backlogged(w, {"acme": 20}, 300)
    while w.num_alive:
        w.step()
    served = keep_backlogged(w, {"bolt": 20, "acme": 20}, 400)
    assert served["bolt"] / served["acme"] == pytest.approx(1.0, rel=0.1)


def test_tokens_that_a_preemption_makes_compute_again_cost_nothing() -> None:
    w = world(num_blocks=30, batch_size=4, step_tokens=512)
    requests = [add(w, tenant, 60, 100) for tenant in ("acme", "bolt", "acme", "bolt")]
    served: dict[str, float] = {}
    while w.num_alive:
        ledger = w.scheduler.residency.tenants.ledgers[INTERACTIVE]
        served |= {name: account.served for name, account in ledger.active.items()}
        w.step()
    assert sum(r.num_preemptions for r in requests) > 0
    lower = 2 * (60 + 2 * 98)  # all but the last tokens, and before the last step
    assert all(lower <= cost <= 2 * (60 + 2 * 99) + 20 for cost in served.values())


def test_cached_tokens_cost_little() -> None:
    w = world(step_tokens=512)
    shared = [5] * 160
    w.add([*shared, 1], 1, "acme")
    w.step()
    before = w.scheduler.residency.tenants.ledgers[INTERACTIVE]._departed
    w.add([*shared, 2], 2, "acme")
    w.step()
    account = w.scheduler.residency.tenants.ledgers[INTERACTIVE].active["acme"]
    assert account.served - before == pytest.approx(0.1 * 160 + 1)


def test_a_step_that_was_not_computed_costs_nothing() -> None:
    w = world(step_tokens=512)
    add(w, "acme", 50, 20)
    w.step()
    add(w, "acme", 70, 20)
    account = w.scheduler.residency.tenants.ledgers[INTERACTIVE].active["acme"]
    before = account.served
    plan = w.scheduler.schedule(w.now_s)
    assert account.served == before + 2 + 70
    w.scheduler.discard(plan)
    assert account.served == before
    again = w.scheduler.schedule(w.now_s)
    assert account.served == before + 2 + 70
    assert {c.request for c in again.chunks} == {c.request for c in plan.chunks}


def test_a_tenants_caps_hold_and_the_others_pass_by() -> None:
    caps = {"acme": TenantPolicy(slots=2), "bolt": TenantPolicy(kv_tokens=64)}
    w = world(step_tokens=512, tenants=caps)
    acme = [add(w, "acme", 20, 50) for _ in range(4)]
    bolt = [add(w, "bolt", 40, 8) for _ in range(3)]
    crux = add(w, "crux")
    w.step()
    assert {*w.scheduler.residency.running} == {*acme[:2], bolt[0], crux}
    reasons = {known.request: known.obstacle for known in w.scheduler.explain()}
    assert reasons[acme[2]] is Obstacle.TENANT_SLOTS and reasons[bolt[1]] is Obstacle.TENANT_KV
    assert all(r.num_times_passed == 0 for r in (*acme, *bolt))
    while w.num_alive:
        w.step()


def test_a_request_larger_than_its_tenants_cap_runs_alone_instead_of_never() -> None:
    w = world(tenants={"acme": TenantPolicy(kv_tokens=16)})
    add(w, "acme", 100, 4)
    add(w, "acme", 100, 4)
    while w.num_alive:
        w.step()
        assert len(w.scheduler.residency.running) <= 1


def test_what_a_cap_kept_a_tenant_from_is_not_owed_to_it_later() -> None:
    w = world(tenants={"acme": TenantPolicy(slots=1)})
    keep_backlogged(w, {"acme": 20, "bolt": 20}, 600)
    w.set_policy(tenants={})
    served = keep_backlogged(w, {"acme": 20, "bolt": 20}, 200)
    assert served["acme"] / served["bolt"] == pytest.approx(1.0, rel=0.3)


def test_lowering_a_cap_drains() -> None:
    w = world(step_tokens=512)
    requests = [add(w, "acme", 20, 20) for _ in range(6)]
    w.step()
    w.set_policy(tenants={"acme": TenantPolicy(slots=1)})
    assert len(w.step().chunks) == 6
    while w.num_alive:
        w.step()
    assert all(r.num_preemptions == 0 for r in requests)


def test_an_interactive_request_takes_its_own_tenants_batch_slot_at_the_cap() -> None:
    w = world(batch_size=4, tenants={"acme": TenantPolicy(slots=1)})
    batch = add(w, "acme", 20, 50, BATCH)
    other = add(w, "bolt", 20, 50, BATCH)
    w.step()
    chat = add(w, "acme")
    w.step()
    assert {*w.scheduler.residency.running} == {chat, other}
    assert batch.num_preemptions == 1


def test_a_tenant_at_its_cap_on_kv_memory_keeps_nobody_else_waiting() -> None:
    w = world(tenants={"flood": TenantPolicy(kv_tokens=64)})
    for _ in range(100):
        add(w, "flood", 40, 30)
    w.step()
    chat = add(w, "chat")
    w.step()
    assert chat in w.scheduler.residency.running


def test_a_crowd_behind_one_prefix_keeps_no_other_tenant_waiting() -> None:
    w = world(step_tokens=64)
    for _ in range(100):
        w.add([7] * 800, 5, tenant="crowd")
    chat = add(w, "chat")
    w.step()
    assert chat in w.scheduler.residency.running


def test_tenants_that_left_are_remembered_up_to_a_bound() -> None:
    w = world(step_tokens=512)
    for index in range(MAX_IDLE_TENANTS + 50):
        add(w, f"t{index}", 1, 1)
        w.step()
    ledger = w.scheduler.residency.tenants.ledgers[INTERACTIVE]
    assert len(ledger._idle) == MAX_IDLE_TENANTS and not ledger.active
    assert not w.scheduler.residency.tenants.with_work
