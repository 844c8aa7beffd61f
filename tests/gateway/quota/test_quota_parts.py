"""The pure parts beside the law: shares, breaker, leases, limits as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_gateway.quota.breaker import FAILURES_TO_OPEN, LONGEST_PAUSE_S, Breaker
from chairlift_gateway.quota.law import LATE_MS, Progress, Status
from chairlift_gateway.quota.leases import (
    MAX_OWED,
    RENEW_AFTER_S,
    RENEWED_TOGETHER,
    Lease,
    Leases,
    Settlement,
)
from chairlift_gateway.quota.local_law import LocalLaw, share_of
from chairlift_protocol.quota import MAX_BURST_MS, Limits, LimitsError

bounds = st.none() | st.integers(0, 1_000_000)
limits = st.builds(Limits, bounds, bounds, st.none() | st.integers(0, 1000),
                   st.integers(1, MAX_BURST_MS), st.booleans())  # fmt: skip


def lease(name: str, holder: str = "acme/interactive", renewed_at_s: float = 0.0) -> Lease:
    return Lease(holder, "*/interactive", name, 10, renewed_at_s)


@given(limits)
def test_limits_are_read_as_they_were_written(stated: Limits) -> None:
    assert Limits.from_json(stated.to_json()) == stated


def test_unknown_limits_are_a_newer_writers_and_absent_ones_bound_nothing() -> None:
    assert Limits.from_json('{"of_tomorrow": 1}') == Limits()


@pytest.mark.parametrize(
    "body",
    [
        [], 1, {"tokens_per_minute": -1}, {"tokens_per_minute": "7"}, {"concurrency": 1.5},
        {"requests_per_minute": True}, {"burst_ms": 0}, {"burst_ms": MAX_BURST_MS + 1},
    ],
)  # fmt: skip
def test_limits_that_say_nothing_are_refused(body: Any) -> None:
    with pytest.raises(LimitsError):
        Limits.from_json(json.dumps(body))
    with pytest.raises(LimitsError):
        Limits.from_json(json.dumps(body)[:-1] + "?")


@given(limits, st.integers(1, 50))
def test_shares_together_are_no_more_than_the_limit_or_one_each(
    whole: Limits, num_gateways: int
) -> None:
    share = share_of(whole, num_gateways)
    assert not share.may_borrow
    for name in ("tokens_per_minute", "requests_per_minute", "concurrency"):
        part, bound = getattr(share, name), getattr(whole, name)
        if bound is None:
            assert part is None
        else:
            assert part * num_gateways <= max(bound, num_gateways)
            assert (part > 0) == (bound > 0)


def test_what_runs_counts_against_the_share_and_an_outage_fills_no_bucket_anew() -> None:
    law, share = LocalLaw(), Limits(tokens_per_minute=600, burst_ms=60_000, concurrency=2)
    first = law.reserve("a", share, Progress("r2", 100, 0), [Progress("r1", 300, 0)], 0)
    assert (first.status, first.tokens_left) == (Status.ADMITTED, 200)
    assert law.reserve("a", share, Progress("r3", 1, 0), [], 1).status is Status.CONCURRENCY
    law.settle("a", share, "r1", 300, 2)
    law.settle("a", share, "r2", 300, 2)
    later = law.reserve("a", share, Progress("r4", 1, 0), [], 3)
    assert (later.status, later.number) == (Status.TOKENS, 97)


def test_the_breaker_opens_at_failures_in_a_row_and_only_closing_closes_it() -> None:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN - 1):
        assert not breaker.failed()
    breaker.succeeded()
    assert [breaker.failed() for _ in range(FAILURES_TO_OPEN)] == [False, True]
    breaker.succeeded()
    assert breaker.is_open and not breaker.failed()
    pauses_s = [breaker.next_pause_s() for _ in range(8)]
    assert pauses_s == sorted(pauses_s) and pauses_s[-1] == LONGEST_PAUSE_S
    breaker.close()
    assert not breaker.is_open and breaker.failed(at_once=True)


def test_leases_are_renewed_by_holder_in_time_and_a_bounded_number_at_once() -> None:
    leases = Leases()
    for number in range(RENEWED_TOGETHER + 5):
        leases.add(lease(f"r{number}"))
    leases.add(lease("other", "zeta/batch"))
    leases.add(lease("young", renewed_at_s=RENEW_AFTER_S))
    groups = list(leases.due(RENEW_AFTER_S))
    assert sorted(len(group) for group in groups) == [1, 5, RENEWED_TOGETHER]
    assert all(len({each.holder for each in group}) == 1 for group in groups)
    assert "young" not in {each.request_id for group in groups for each in group}
    assert sum(map(len, leases.due(0.0, all_of_them=True))) == RENEWED_TOGETHER + 7


def test_a_lease_is_settled_once() -> None:
    leases, one = Leases(), lease("r1")
    leases.add(one)
    assert leases.remove(one)
    assert not leases.remove(one)
    assert leases.of(one.holder) == []


def test_debts_to_redis_are_bounded_and_let_go_when_it_would_not_know_them_any_more() -> None:
    leases = Leases()
    for number in range(MAX_OWED + 10):
        leases.owe(Settlement(lease(f"r{number}"), 5, made_at_s=0.0))
    assert leases.num_owed == MAX_OWED
    assert len(list(leases.pay(1.0))) == MAX_OWED
    assert leases.num_owed == 0
    leases.owe(Settlement(lease("old"), 5, made_at_s=0.0))
    assert list(leases.pay(LATE_MS / 1000)) == []
