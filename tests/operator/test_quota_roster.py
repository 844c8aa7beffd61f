"""Whose limits and keys are in force, what was used, and when a pool has capacity to lend."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest

from chairlift_gateway.identity import parse_tenants
from chairlift_operator.decisions import Condition, Health, ReplicaReport, Truth
from chairlift_operator.exposition import GatewayClassSample
from chairlift_operator.quota_parsing import parse_quota
from chairlift_operator.quotas.idle import has_idle_capacity
from chairlift_operator.quotas.key_secrets import KEYS_TYPE, SecretKeys, read_keys
from chairlift_operator.quotas.ledger import Counts, Ledger, Use
from chairlift_operator.quotas.roster import Claim, roster_of
from chairlift_operator.snapshot import GatewaySnapshot, Phase
from chairlift_protocol.quota import Limits
from chairlift_protocol.wire import RequestClass

KEY = "ck-0123456789abcdef0123456789"
OTHER_KEY = "ck-fedcba9876543210fedcba9876"
EVERY_S = 4.0


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _claim(name: str, tenant: str, created: str = "2026-01-01T00:00:00Z", **spec: Any) -> Claim:
    quota = parse_quota(
        {
            "apiVersion": "chairlift.dev/v1alpha1",
            "kind": "TenantQuota",
            "metadata": {"name": name},
            "spec": {"poolRef": {"name": "chat"}, "tenant": tenant, **spec},
        }
    )
    return Claim(name, created, quota.spec)


def _secret(kind: str = KEYS_TYPE, **values: str) -> dict[str, Any]:
    return {
        "type": kind,
        "data": {name: base64.b64encode(text.encode()).decode() for name, text in values.items()},
    }


def test_limits_are_written_by_holder_beside_those_of_everybody_else() -> None:
    claims = [_claim("acme", "acme", interactive={"tokensPerMinute": 600}), _claim("b", "beta")]
    limits = roster_of(claims, {}).limits
    assert set(limits) == {"*/interactive", "*/batch", "acme/interactive"}
    assert Limits.from_json(limits["acme/interactive"]) == Limits(600)
    assert Limits.from_json(limits["*/batch"]) == Limits()


def test_weights_are_told_where_they_are_not_one() -> None:
    claims = [_claim("acme", "acme", weight=2), _claim("beta", "beta", weight=1)]
    assert roster_of(claims, {}).weights == {"acme": 2.0}


def test_a_quota_of_the_tenant_star_is_everybody_elses() -> None:
    limits = roster_of([_claim("rest", "*", interactive={"concurrency": 1})], {}).limits
    assert Limits.from_json(limits["*/interactive"]) == Limits(concurrency=1)
    assert Limits.from_json(limits["*/batch"]) == Limits()


def test_the_older_of_two_quotas_keeps_the_tenant() -> None:
    old = _claim("zeta", "acme", interactive={"concurrency": 1})
    new = _claim("alpha", "acme", "2026-01-02T00:00:00Z", interactive={"concurrency": 9})
    roster = roster_of([new, old], {})
    assert Limits.from_json(roster.limits["acme/interactive"]) == Limits(concurrency=1)
    verdict = roster.verdicts["alpha"]
    assert (verdict.accepted.status, verdict.accepted.reason) == (Truth.FALSE, "TenantTaken")
    assert "zeta" in verdict.accepted.message and verdict.tenant is None
    assert roster.verdicts["zeta"].tenant == "acme"


def test_gateways_understand_the_tenants_that_are_written() -> None:
    sources = [{"secret": "chat-keys"}, {"secret": "batch-keys", "class": "batch"}]
    secrets: dict[str, SecretKeys | None] = {
        "chat-keys": read_keys("chat-keys", _secret(a=KEY + "\n")),
        "batch-keys": read_keys("batch-keys", _secret(b=OTHER_KEY)),
    }
    roster = roster_of([_claim("acme", "acme", keys=sources)], secrets)
    keys = parse_tenants(roster.keys.whole.encode())
    for key, request_class in ((KEY, RequestClass.INTERACTIVE), (OTHER_KEY, RequestClass.BATCH)):
        caller = keys.find(key.encode())
        assert caller is not None
        assert (caller.tenant, caller.request_class) == ("acme", request_class)
    missing = roster.verdicts["acme"].keys_missing
    assert (missing.status, missing.reason) == (Truth.FALSE, "AllRead")
    assert KEY not in roster.keys.whole


def test_a_key_of_two_tenants_stays_the_older_ones() -> None:
    secrets: dict[str, SecretKeys | None] = {"keys": read_keys("keys", _secret(a=KEY))}
    old = _claim("acme", "acme", keys=[{"secret": "keys"}])
    new = _claim("beta", "beta", "2026-01-02T00:00:00Z", keys=[{"secret": "keys"}])
    roster = roster_of([new, old], secrets)
    caller = parse_tenants(roster.keys.whole.encode()).find(KEY.encode())
    assert caller is not None and caller.tenant == "acme"
    assert roster.verdicts["beta"].keys_missing.reason == "KeyTaken"


@pytest.mark.parametrize(
    ("secret", "reason", "sentence"),
    [
        (None, "SecretNotFound", "Secret acme-keys does not exist"),
        (_secret("Opaque", a=KEY), "WrongType", "is of type Opaque, and not read"),
        (_secret(), "NoKeys", "Secret acme-keys is empty"),
        (_secret(a="short"), "WeakKey", "Secret acme-keys: a has 5 characters"),
        (_secret(a="with blanks " * 3), "WeakKey", "holds what no header can carry"),
        ({"type": KEYS_TYPE, "data": {"a": "%"}}, "WeakKey", "a has 0 characters"),
    ],
)
def test_what_is_wrong_with_a_secret_of_keys_is_said_by_its_name(
    secret: dict[str, Any] | None, reason: str, sentence: str
) -> None:
    read = read_keys("acme-keys", secret)
    roster = roster_of(
        [_claim("acme", "acme", keys=[{"secret": "acme-keys"}])], {"acme-keys": read}
    )
    missing = roster.verdicts["acme"].keys_missing
    assert (missing.status, missing.reason) == (Truth.TRUE, reason)
    assert sentence in missing.message
    assert json.loads(roster.keys.whole) == {"tenants": []}


def test_one_bad_key_takes_nothing_from_the_good_ones() -> None:
    read = read_keys("keys", _secret(good=KEY, bad="short"))
    assert read.digests == (_digest(KEY),)
    assert read.trouble is not None and "bad has 5 characters" in read.trouble.message


def test_a_secret_that_was_not_read_yet_is_not_a_missing_one() -> None:
    roster = roster_of([_claim("acme", "acme", keys=[{"secret": "keys"}])], {"keys": None})
    assert roster.verdicts["acme"].keys_missing.status is Truth.UNKNOWN


def test_a_minute_is_not_known_before_a_minute_was_watched() -> None:
    ledger = Ledger()
    for at_s in range(0, 41, 5):
        ledger.note(at_s, {"acme/batch": Counts(1000 + at_s, 0, 2)})
    assert ledger.use("acme/batch", 40, EVERY_S) == Use(num_running=2, num_reserved=0)
    assert ledger.use("beta/batch", 40, EVERY_S) == Use()
    for at_s in range(45, 121, 5):
        ledger.note(at_s, {"acme/batch": Counts(1000 + at_s, 3, 1)})
    assert ledger.use("acme/batch", 120, EVERY_S) == Use(60, 0, 1, 0)
    assert ledger.use("acme/batch", 120 + 16, EVERY_S) == Use()


def test_readings_that_come_in_a_flurry_are_not_all_kept() -> None:
    ledger = Ledger()
    for number in range(650):
        ledger.note(number / 10, {"acme/batch": Counts(number, 0, 1)})
    assert len(ledger._readings["acme/batch"]) <= 33
    assert ledger.use("acme/batch", 65, EVERY_S) == Use(600, 0, 1, 0)


def test_an_account_that_was_forgotten_counts_from_zero_again() -> None:
    ledger = Ledger()
    for at_s, num_used in ((0, 500), (20, 700), (40, 30), (60, 50)):
        ledger.note(at_s, {"acme/batch": Counts(num_used, 0, 0)})
    assert ledger.use("acme/batch", 60, EVERY_S) == Use(200 + 30 + 20, 0, 0, 0)


def test_of_many_tenants_that_are_read_seldom_the_last_minute_is_known_all_the_same() -> None:
    ledger = Ledger()
    for at_s in range(0, 401, 80):
        ledger.note(at_s, {"acme/batch": Counts(8 * at_s, at_s, 2)})
    assert ledger.use("acme/batch", 460, 80.0) == Use(480, 60, 2, 0)
    assert ledger.use("acme/batch", 400 + 161, 80.0) == Use()


def test_one_who_rests_takes_no_more_room_than_two_readings() -> None:
    ledger = Ledger()
    for at_s in range(0, 400, 4):
        ledger.note(at_s, {"acme/batch": Counts(5, 1, 0)})
    assert len(ledger._readings["acme/batch"]) == 2
    assert ledger.use("acme/batch", 396, EVERY_S) == Use(0, 0, 0, 0)
    ledger.note(400, {"acme/batch": Counts(9, 1, 0)})
    assert ledger.use("acme/batch", 400, EVERY_S) == Use(4, 0, 0, 0)
    ledger.keep_only(())
    assert ledger.use("acme/batch", 400, EVERY_S) == Use()


def _report(running: float | None, waiting: float | None = 0.0, **otherwise: Any) -> ReplicaReport:
    given = {"health": Health.OK, "batch_size": 10, **otherwise}
    return ReplicaReport("one", True, num_running=running, num_waiting=waiting, **given)


QUIET = GatewaySnapshot((GatewayClassSample(RequestClass.INTERACTIVE, 5.0, 0.0),), 1.0)


def test_a_pool_with_free_slots_and_nobody_waiting_has_capacity_to_lend() -> None:
    assert has_idle_capacity([_report(0.0)], QUIET, ())
    assert has_idle_capacity([_report(9.0), _report(9.0)], QUIET, ())
    assert not has_idle_capacity([_report(10.0), _report(9.0)], QUIET, ())


@pytest.mark.parametrize(
    "report",
    [
        _report(1.0, waiting=1.0),
        _report(1.0, waiting=None),
        _report(None),
        _report(1.0, batch_size=None),
        _report(1.0, health=Health.STALE),
        _report(1.0, health=Health.MISSING),
        _report(1.0, health=Health.PARTIAL),
        _report(1.0, phase=Phase.STARTING),
    ],
)
def test_what_is_not_known_is_not_idle(report: ReplicaReport) -> None:
    assert not has_idle_capacity([report], QUIET, ())


def test_held_requests_silent_gateways_and_missed_objectives_are_not_idle() -> None:
    holding = GatewaySnapshot((GatewayClassSample(RequestClass.BATCH, 5.0, 1.0),), 1.0)
    missed = Condition("WithinSLO", Truth.FALSE, "ObjectiveMissed", "Late.")
    assert not has_idle_capacity([_report(1.0)], holding, ())
    assert not has_idle_capacity([_report(1.0)], GatewaySnapshot(failure="silent"), ())
    assert not has_idle_capacity([_report(1.0)], QUIET, (missed,))
    assert not has_idle_capacity([], QUIET, ())
