from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from chairlift_operator.kube.api import ApiError
from chairlift_operator.kube.lease import Lease
from chairlift_operator.kube.settings import DEADLINE_S, LEASE_S

Json = dict[str, Any]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeLeases:
    """One Lease, as the API server keeps it: writes only over the version that was read."""

    def __init__(self) -> None:
        self.lease: Json | None = None
        self.is_down = False
        self._version = 0

    async def find(self, path: str) -> Json | None:
        self._answer()
        return copy.deepcopy(self.lease)

    async def create(self, path: str, manifest: Json, manager: str) -> Json:
        self._answer()
        if self.lease is not None:
            raise ApiError(409, "exists")
        return self._store(manifest)

    async def replace(self, path: str, manifest: Json, manager: str) -> Json:
        self._answer()
        assert self.lease is not None
        if manifest["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(409, "changed meanwhile")
        return self._store(manifest)

    def _answer(self) -> None:
        if self.is_down:
            raise ApiError(0, "away")

    def _store(self, manifest: Json) -> Json:
        self._version += 1
        self.lease = copy.deepcopy(manifest)
        self.lease["metadata"]["resourceVersion"] = str(self._version)
        return copy.deepcopy(self.lease)


@pytest.fixture
def leases() -> FakeLeases:
    return FakeLeases()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _lease(leases: FakeLeases, clock: Clock, identity: str) -> Lease:
    api: Any = leases
    return Lease(api, "system", "chairlift-operator", identity, clock)


def _step(*steps: Lease) -> None:
    for lease in steps:
        asyncio.run(lease.step())


def test_the_first_leads_and_the_second_waits(leases: FakeLeases, clock: Clock) -> None:
    one, two = _lease(leases, clock, "one"), _lease(leases, clock, "two")
    _step(one, two)
    assert (one.is_held(), two.is_held()) == (True, False)


def test_a_leader_that_renews_keeps_its_term(leases: FakeLeases, clock: Clock) -> None:
    one, two = _lease(leases, clock, "one"), _lease(leases, clock, "two")
    _step(one, two)
    term = one.term
    for _ in range(10):
        clock.now_s += 5
        _step(one, two)
    assert one.is_held() and not two.is_held() and one.term == term


def test_whoever_takes_over_leads_in_a_newer_term(leases: FakeLeases, clock: Clock) -> None:
    one, two = _lease(leases, clock, "one"), _lease(leases, clock, "two")
    _step(one, two)
    clock.now_s += LEASE_S - 1
    _step(two)
    assert not two.is_held()
    clock.now_s += 2
    _step(two)
    assert two.is_held() and two.term == one.term + 1


def test_a_silent_leader_stops_before_anybody_else_can_lead(
    leases: FakeLeases, clock: Clock
) -> None:
    one, two = _lease(leases, clock, "one"), _lease(leases, clock, "two")
    _step(one, two)
    for _ in range(300):
        clock.now_s += 0.1
        _step(two)
        assert not (one.is_held() and two.is_held()), clock.now_s
    assert two.is_held() and DEADLINE_S < LEASE_S


def test_a_deposed_leader_knows_it_at_its_next_step(leases: FakeLeases, clock: Clock) -> None:
    one, two = _lease(leases, clock, "one"), _lease(leases, clock, "two")
    _step(one, two)
    clock.now_s += LEASE_S + 1
    _step(two)
    _step(one)
    assert two.is_held() and not one.is_held()


def test_a_release_lets_the_standby_lead_at_once(leases: FakeLeases, clock: Clock) -> None:
    one, two = _lease(leases, clock, "one"), _lease(leases, clock, "two")
    _step(one, two)
    asyncio.run(one.release())
    _step(two)
    assert two.is_held() and not one.is_held() and two.term == one.term + 1


def test_a_restarted_process_of_the_same_name_is_a_new_leadership(
    leases: FakeLeases, clock: Clock
) -> None:
    one = _lease(leases, clock, "one")
    _step(one)
    again = _lease(leases, clock, "one")
    _step(again)
    assert again.is_held() and again.term == one.term + 1


def test_terms_grow_although_the_lease_was_deleted(leases: FakeLeases, clock: Clock) -> None:
    one = _lease(leases, clock, "one")
    _step(one)
    leases.lease = None
    two = _lease(leases, clock, "two")
    _step(two)
    assert two.term >= one.term > 29_000_000


def test_an_api_server_that_is_away_ends_leading_in_time(leases: FakeLeases, clock: Clock) -> None:
    one = _lease(leases, clock, "one")
    _step(one)
    leases.is_down = True
    with pytest.raises(ApiError):
        _step(one)
    clock.now_s += DEADLINE_S - 0.1
    assert one.is_held()
    clock.now_s += 0.2
    assert not one.is_held()


def test_of_two_that_come_at_once_one_leads(leases: FakeLeases, clock: Clock) -> None:
    one, two = _lease(leases, clock, "one"), _lease(leases, clock, "two")

    async def both() -> None:
        await asyncio.gather(one.step(), two.step())

    asyncio.run(both())
    assert [one.is_held(), two.is_held()].count(True) == 1


def test_a_deleted_lease_is_not_taken_while_its_holder_may_trust_it(
    leases: FakeLeases, clock: Clock
) -> None:
    first, second = (_lease(leases, clock, name) for name in ("first", "second"))
    _step(first, second)
    term, leases.lease = first.term, None
    while first.is_held():
        _step(second)
        assert not second.is_held()
        clock.now_s += 1.0
    clock.now_s += LEASE_S - DEADLINE_S + 1.0
    _step(second)
    assert second.is_held() and second.term > term


def test_whoever_leads_makes_a_deleted_lease_again_at_once(
    leases: FakeLeases, clock: Clock
) -> None:
    lease = _lease(leases, clock, "first")
    _step(lease)
    term, leases.lease = lease.term, None
    _step(lease)
    assert lease.is_held() and lease.term > term


@pytest.mark.parametrize("written", [0, None, 7, 2**31 - 1])
def test_a_term_that_somebody_writes_is_not_gone_by(
    leases: FakeLeases, clock: Clock, written: int | None
) -> None:
    first = _lease(leases, clock, "first")
    _step(first)
    assert leases.lease is not None
    leases.lease["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    term = first.term
    leases.lease["spec"]["leaseTransitions"] = written
    _step(first)
    assert first.term == leases.lease["spec"]["leaseTransitions"] == term
    leases.lease["spec"].update(leaseTransitions=min(written or 0, term), holderIdentity="")
    second = _lease(leases, clock, "second")
    _step(second)
    assert second.is_held() and second.term >= term
