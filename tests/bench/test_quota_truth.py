from __future__ import annotations

import pytest

from chairlift_bench.quota_truth import Redis, Verdict, judge, read_journal

LIVED = ["ask a t/c 50\n", "grant a 50 in_redis\n", "seen a 20\n", "settle a 30\n"]
KILLED = ["ask k t/c 50\n", "grant k 50 in_redis\n", "seen k 80\n", "settle k 9"]


def verdict(used: int, expired: dict[str, int], *killed: str, num_leases: int = 0) -> Verdict:
    told = read_journal(LIVED, is_killed=False) | read_journal(killed, is_killed=True)
    return judge(told, Redis({"t/c": used}, expired, num_leases))


@pytest.mark.parametrize(("used", "drift"), [(30, 0), (29, 1), (80, 50), (0, 30)])
def test_a_request_whose_gateway_lived_is_charged_what_it_settled(used: int, drift: int) -> None:
    assert verdict(used, {}).drift_tokens == drift


@pytest.mark.parametrize(("charged", "num_unbounded"), [(50, 0), (80, 0), (49, 1), (81, 1)])
def test_a_killed_one_is_charged_between_its_reservation_and_what_it_had_used(
    charged: int, num_unbounded: int
) -> None:
    found = verdict(30 + charged, {"k": charged}, *KILLED)
    assert (found.num_killed, found.num_unbounded_killed) == (1, num_unbounded)
    assert found.drift_tokens == 0


def test_a_killed_one_that_redis_admitted_and_never_charged_is_found() -> None:
    assert verdict(30, {}, *KILLED).num_unbounded_killed == 1


def test_what_a_killed_gateway_admitted_without_redis_may_have_reached_it_or_not() -> None:
    local = ["ask k t/c 50\n", "grant k 50 local\n", "settle k 40\n"]
    assert [verdict(used, {}, *local).drift_tokens for used in (30, 70, 71, 29)] == [0, 0, 1, 1]


def test_leases_that_are_left_are_told() -> None:
    assert verdict(30, {}, num_leases=3).num_leases == 3
