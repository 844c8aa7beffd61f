"""A `TenantQuota` as a user writes it: what is taken, and what is said of what is not."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift_operator.parsing import SpecError
from chairlift_operator.quota_parsing import parse_quota, quota_to_mapping
from chairlift_operator.spec_parsing import parse_pool
from chairlift_protocol.quota import Limits
from chairlift_protocol.wire import RequestClass

Json = dict[str, Any]


def _quota(**sections: Any) -> Json:
    return {
        "apiVersion": "chairlift.dev/v1alpha1",
        "kind": "TenantQuota",
        "metadata": {"name": "acme"},
        "spec": {"poolRef": {"name": "chat"}, "tenant": "acme", **sections},
    }


def test_limits_are_hard_and_burst_over_half_a_minute_unless_said_otherwise() -> None:
    spec = parse_quota(_quota(interactive={"tokensPerMinute": 60_000})).spec
    interactive, batch = spec.of(RequestClass.INTERACTIVE), spec.of(RequestClass.BATCH)
    assert interactive is not None and batch is None
    assert interactive.limits() == Limits(tokens_per_minute=60_000)
    assert interactive.limits().burst_ms == 30_000 and not interactive.limits().may_borrow


def test_every_limit_reaches_redis() -> None:
    given = {
        "tokensPerMinute": 0,
        "requestsPerMinute": 60,
        "concurrency": 4,
        "burst": "1m30s",
        "whenIdle": "Borrow",
    }
    batch = parse_quota(_quota(batch=given)).spec.batch
    assert batch is not None and batch.limits() == Limits(0, 60, 4, 90_000, True)


def test_what_is_written_down_reads_back_as_the_same_quota() -> None:
    quota = parse_quota(_quota(keys=[{"secret": "acme-keys", "class": "batch"}], batch={}))
    assert parse_quota(quota_to_mapping(quota)) == quota


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"tenant": "Acme"}, "spec.tenant: must be 1 to 63 of a-z"),
        ({"tenant": "a" * 64}, "spec.tenant: must be 1 to 63"),
        ({"tenant": "*", "keys": [{"secret": "k"}]}, "stand for requests without a key"),
        ({"tenant": "anonymous", "keys": [{"secret": "k"}]}, "remove keys, or name a tenant"),
        ({"keys": [{"secret": "k"}] * 17}, "keys has 17 items: at most 16 are read"),
        ({"interactive": {"whenIdle": "Borrow"}}, "set tokensPerMinute, or remove whenIdle"),
        ({"interactive": {"burst": "11m"}}, "burst 660s is above 600s: lower it"),
        ({"interactive": {"burst": "1us"}}, "must be at least 1ms"),
        ({"interactive": {"tokenPerMinute": 3}}, "did you mean tokensPerMinute?"),
        ({"interactive": {"concurrency": -1}}, "spec.interactive.concurrency: must be greater"),
        ({"weight": 0}, "spec.weight: must be greater than or equal to 0.001"),
        ({"tenant": "*", "weight": 2}, "who have weight 1: remove weight"),
        ({"priority": 2}, "spec.priority: is not a field here"),
    ],
)
def test_a_wrong_quota_is_refused_with_what_to_change(sections: Json, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_quota(_quota(**sections))
    assert sentence in str(caught.value)


def test_a_document_of_another_kind_is_named() -> None:
    with pytest.raises(SpecError, match="kind: is 'InferencePool': this version takes TenantQuota"):
        parse_quota({**_quota(), "kind": "InferencePool"})


def _pool(**sections: Any) -> Json:
    return {
        "apiVersion": "chairlift.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "chat"},
        "spec": {"model": {"name": "m", "source": "cache://m"}, **sections},
    }


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"quotas": {}}, "spec.quotas.redis: is missing: add it"),
        ({"quotas": {"redis": {"url": "http://redis"}}}, "must look like redis://"),
        ({"quotas": {"redis": {"url": "redis://me:secret@redis"}}}, "must look like redis://"),
        ({"quotas": {"redis": {"url": "redis://r:99999/0"}}}, "Port out of range"),
        ({"quotas": {"redis": {"url": "redis://r:x/0"}}}, "Port could not be cast"),
        ({"quotas": {"redis": {"url": "redis://r:0/0"}}}, "port must be 1 to 65535"),
        ({"quotas": {"redis": {"url": "redis://[::1/0"}}}, "Invalid IPv6 URL"),
        ({"quotas": {"redis": {"url": "redis://:6379/0"}}}, "names no host"),
        ({"quotas": {"redis": {"url": "redis://r", "caSecret": "ca"}}}, "begins with rediss://"),
        ({"quotas": {"redis": {"url": "redis://r", "user": "gate"}}}, "add passwordSecret"),
        ({"gateway": {"anonymous": "Refuse"}}, "would refuse everybody"),
        ({"gateway": {"trustedTenantHeader": "x tenant"}}, "must be a header's name"),
    ],
)
def test_a_pool_whose_tenants_cannot_be_known_is_refused(sections: Json, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_pool(_pool(**sections))
    assert sentence in str(caught.value)
