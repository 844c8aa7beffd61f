"""The policy body on the wire: what it says is what comes back, and a bad field is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from chairlift_protocol.policy import (
    Generation,
    Policy,
    PolicyError,
    SloThresholds,
    TenantPolicy,
)

POLICY = Policy(
    generation=Generation(3, 17),
    batch_size=48,
    step_tokens=256,
    chunk_tokens=128,
    batch_class_share=0.25,
    slo=SloThresholds(ttft_ms=500, itl_ms=50),
    scheduling="static",  # no field has its default, so that a dropped one shows
    batch_min_share=0.125,
    tenants={"acme": TenantPolicy(2.5, 3, 4096, 7), "burst": TenantPolicy(waiting=0)},
)


def test_a_policy_survives_the_wire() -> None:
    assert Policy.from_json(POLICY.to_json()) == POLICY


def test_a_policy_without_newer_fields_is_one_that_older_readers_understand() -> None:
    plain = replace(POLICY, batch_min_share=0.05, tenants={})
    assert {"batch_min_share", "tenants"}.isdisjoint(plain.to_json())
    assert Policy.from_json(plain.to_json()) == plain


def test_generations_order_by_leadership_first() -> None:
    assert Generation(1, 99) < Generation(2, 0) < Generation(2, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size: must be a whole number of at least 1, not 0"),
        ({"batch_size": True}, "batch_size: must be a whole number"),
        ({"step_tokens": 1.5}, "step_tokens: must be a whole number"),
        ({"batch_class_share": 1.01}, r"batch_class_share: must lie in 0.0..1.0, not 1.01"),
        ({"batch_class_share": float("nan")}, "batch_class_share: must lie in"),
        ({"slo": {"ttft_ms": 0, "itl_ms": 50}}, "slo.ttft_ms: must lie in"),
        ({"slo": {"ttft_ms": 5}}, "slo: field 'itl_ms' is missing"),
        ({"slo": 5}, "slo: must be a JSON object, not int"),
        ({"generation": 7}, r"generation: must be \[term, counter\], not 7"),
        ({"generation": [1, -1]}, "generation: must be a whole number of at least 0, not -1"),
        ({"batch_class_share": 10**400}, "batch_class_share: must lie in"),
        ({"slo": {"ttft_ms": 10**400, "itl_ms": 50}}, "slo.ttft_ms: must lie in"),
        ({"generation": [10**400, 1]}, "generation: must be a whole number"),
        ({"batch_size": 2**53 + 1}, "batch_size: must be a whole number"),
        ({"scheduling": "greedy"}, "scheduling: must be one of"),
        ({"batch_min_share": -0.1}, "batch_min_share: must lie in"),
        ({"tenants": []}, "tenants: must be a JSON object, not list"),
        ({"tenants": {"a": {"weight": 0}}}, "tenants.a.weight: must lie in"),
        ({"tenants": {"a": {"slots": 0}}}, "tenants.a.slots: must be a whole number of at least 1"),
        ({"tenants": {"a": {"kv_tokens": 0}}}, "tenants.a.kv_tokens: must be a whole number"),
        ({"tenants": {"a": {"waiting": -1}}}, "tenants.a.waiting: must be a whole number"),
        ({"tenants": {"a": {"slot": 1}}}, "tenants.a: unknown field 'slot'; it takes weight"),
        ({"burst": 3}, "policy: unknown field 'burst'; it takes generation, batch_size"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy.from_json({**POLICY.to_json(), **change})


def test_a_missing_field_is_named() -> None:
    body = POLICY.to_json()
    del body["chunk_tokens"]
    with pytest.raises(PolicyError, match="field 'chunk_tokens' is missing"):
        Policy.from_json(body)


@pytest.mark.parametrize("body", [None, [], "policy", 3])
def test_a_policy_is_an_object(body: object) -> None:
    with pytest.raises(PolicyError, match="must be a JSON object"):
        Policy.from_json(body)
