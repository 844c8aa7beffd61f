"""The law in Redis against the law in Python, operation by operation, on a clock of the test's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from chairlift_gateway.quota.law import UNIT, Account, Outcome, Progress, Status
from chairlift_gateway.quota.script import SCRIPT, outcome_of, script_keys
from chairlift_protocol.quota import MAX_TOKENS, Limits, QuotaKeys, default_holder, holder_of
from chairlift_protocol.wire import RequestClass

KEYS = QuotaKeys("test/law")
HOLDER = holder_of("acme", RequestClass.INTERACTIVE)
DEFAULT = default_holder(RequestClass.INTERACTIVE)
CLOCK = "chairlift:{test/law}:clock"
# The same script, but for where it reads the time.
CLOCKED = SCRIPT.replace("redis.call('TIME')", f"redis.call('LRANGE', '{CLOCK}', 0, 1)")


class RedisLaw:
    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.run = client.register_script(CLOCKED)

    def begin(self, limits: Limits) -> None:
        self.client.flushall()
        self.limit(limits)

    def limit(self, limits: Limits) -> None:
        self.client.hset(KEYS.limits, HOLDER, limits.to_json())

    def set_idle(self, is_idle: bool) -> None:
        if is_idle:
            self.client.set(KEYS.idle, "1")
        else:
            self.client.delete(KEYS.idle)

    def lower(self, rate: object, holder: str = HOLDER) -> None:
        if rate is None:
            self.client.delete(KEYS.rate(holder))
        else:
            self.client.set(KEYS.rate(holder), str(rate))

    def __call__(self, now_ms: int, operation: str, *arguments: Any) -> Outcome:
        return self.answer(now_ms, operation, *arguments)[0]

    def answer(self, now_ms: int, operation: str, *arguments: Any) -> tuple[Outcome, str]:
        self.client.delete(CLOCK)
        self.client.rpush(CLOCK, now_ms // 1000, now_ms % 1000 * 1000)
        keys = script_keys(KEYS, HOLDER, DEFAULT)
        return outcome_of(self.run(keys=keys, args=[operation, HOLDER, DEFAULT, *arguments]))

    def account(self, name: str) -> int:
        return int(self.client.hget(KEYS.account(HOLDER), name) or 0)


@pytest.fixture
def law(shared_redis: Any) -> Iterator[RedisLaw]:
    with shared_redis.client() as client:
        yield RedisLaw(client)


names = st.sampled_from(["a", "b", "c", "d"])
tokens = st.integers(0, 400)
any_tokens = tokens | st.sampled_from([-1, MAX_TOKENS, MAX_TOKENS + 1, 10**17, 10**400])
limits = st.builds(
    Limits,
    st.none() | st.sampled_from([0, 1, 100, 6_000, 1_000_000]),
    st.none() | st.sampled_from([0, 1, 60, 6_000]),
    st.none() | st.integers(0, 3),
    st.sampled_from([1, 1_000, 30_000, 600_000]),
    st.booleans(),
)
rates = st.none() | st.sampled_from([1, 50, 100, 5_999, 6_000, 2_000_000])
operations = st.one_of(
    st.tuples(st.just("reserve"), names, any_tokens, st.sampled_from([10, 1_000, 30_000])),
    st.tuples(st.just("settle"), names, any_tokens, st.booleans()),
    st.tuples(st.just("renew"), st.lists(st.tuples(names, any_tokens, any_tokens), max_size=3)),
    st.tuples(st.just("sweep")),
    st.tuples(st.just("idle"), st.booleans()),
    st.tuples(st.just("limit"), limits),
    st.tuples(st.just("lower"), rates),
)
# Back as well: clocks are set. Beyond ten minutes too, where late settlements are forgotten.
steps_ms = st.sampled_from([0, 1, 9, 10, 500, 1_000, 31_000, 599_000, 700_000, -5_000])


def _in_force(stated: Limits, rate: int | None) -> Limits:
    """While a rate is told."""
    known = stated.tokens_per_minute
    if known is None or rate is None or rate >= known:
        return stated
    return replace(stated, tokens_per_minute=rate, lowered_from=known)


@example(
    Limits(concurrency=1),
    [(0, ("reserve", "b", 0, 10)), (10, ("reserve", "a", 0, 10)), (1_000, ("sweep",)),
     (599_000, ("reserve", "a", 0, 10)), (-5_000, ("settle", "b", 0, False))],
)  # fmt: skip
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(limits, st.lists(st.tuples(steps_ms, operations), max_size=25))
def test_redis_and_python_agree_on_every_outcome(
    law: RedisLaw, first: Limits, history: list[tuple[int, tuple[Any, ...]]]
) -> None:
    law.begin(first)
    account, stated, rate, is_idle, now_ms = Account(), first, None, False, 1_800_000_000_000
    for step_ms, (operation, *arguments) in history:
        now_ms += step_ms
        in_force = _in_force(stated, rate)
        if operation == "idle":
            is_idle = arguments[0]
            law.set_idle(is_idle)
        elif operation == "limit":
            stated = arguments[0]
            law.limit(stated)
        elif operation == "lower":
            rate = arguments[0]
            law.lower(rate)
        elif operation == "reserve":
            name, cost, lease_ms = arguments
            expected = account.reserve(in_force, name, cost, lease_ms, now_ms, is_idle=is_idle)
            assert law(now_ms, "reserve", name, cost, lease_ms) == expected
        elif operation == "settle":
            name, used, may_be_unknown = arguments
            expected = account.settle(in_force, name, used, now_ms, may_be_unknown=may_be_unknown)
            assert law(now_ms, "settle", name, used, int(may_be_unknown)) == expected
        elif operation == "renew":
            running = [Progress(*each) for each in arguments[0]]
            expected = account.renew(in_force, running, 5_000, now_ms)
            flat = [part for each in arguments[0] for part in each]
            assert law(now_ms, "renew", 5_000, *flat) == expected
        else:
            assert law(now_ms, "sweep") == account.sweep(in_force, now_ms)
        assert law.account("used") == account.num_used
        assert law.account("reserved") == account.num_reserved
        assert law.account("refused") == account.num_refused


@given(
    st.integers(1, 10_000), st.integers(1, 60_000), st.lists(tokens, min_size=1, max_size=40),
    st.lists(st.integers(0, 2_000), min_size=40, max_size=40),
)  # fmt: skip
def test_a_hard_limit_admits_no_more_than_a_burst_and_the_rate(
    rate: int, burst_ms: int, costs: list[int], pauses_ms: list[int]
) -> None:
    """Whoever uses what it reserved; one request may exceed the burst, on credit."""
    account, now_ms, admitted = Account(), 0, 0
    bound = Limits(tokens_per_minute=rate, burst_ms=burst_ms)
    for number, cost in enumerate(costs):
        now_ms += pauses_ms[number]
        if account.reserve(bound, str(number), cost, 10**9, now_ms).status is Status.ADMITTED:
            admitted += cost
    allowed = max(UNIT, rate * burst_ms) + rate * now_ms
    assert admitted * UNIT <= allowed + max(costs) * UNIT


@given(st.lists(st.tuples(tokens, tokens), max_size=30), st.booleans())
def test_what_a_borrower_owes_never_exceeds_a_full_bucket(
    requests: list[tuple[int, int]], is_idle: bool
) -> None:
    account = Account()
    borrower = Limits(tokens_per_minute=100, burst_ms=60_000, may_borrow=True)
    for number, (cost, used) in enumerate(requests):
        left = account.reserve(borrower, str(number), cost, 1_000, 0, is_idle=is_idle)
        assert left.tokens_left is not None and left.tokens_left >= -100
        if is_idle:
            assert left.status is Status.ADMITTED
        left = account.settle(borrower, str(number), used, 0)
        assert left.tokens_left is not None and left.tokens_left >= -100


@given(st.lists(st.tuples(tokens, tokens), max_size=30))
def test_charged_is_what_was_used_whatever_was_reserved(requests: list[tuple[int, int]]) -> None:
    account, bound = Account(), Limits(tokens_per_minute=1_000_000, burst_ms=600_000)
    full = account.sweep(bound, 0).tokens_left
    for number, (cost, used) in enumerate(requests):
        account.reserve(bound, str(number), cost, 1_000, 0)
        account.settle(bound, str(number), used, 0)
        assert account.settle(bound, str(number), used, 0).status is Status.GONE
    total = sum(used for _, used in requests)
    assert account.num_used == total
    assert full is not None and account.sweep(bound, 0).tokens_left == full - total


LEASED = Limits(tokens_per_minute=60_000, concurrency=1)


def test_a_killed_request_is_charged_its_reservation_once_its_lease_ends() -> None:
    account = Account()
    account.reserve(LEASED, "killed", 100, 30_000, 0)
    assert account.reserve(LEASED, "next", 10, 30_000, 29_999).status is Status.CONCURRENCY
    assert account.reserve(LEASED, "next", 10, 30_000, 30_000).status is Status.ADMITTED
    assert account.num_used == 100


def test_a_killed_request_is_charged_what_it_had_used_at_its_last_renewal_if_that_was_more() -> (
    None
):
    account = Account()
    account.reserve(LEASED, "killed", 100, 30_000, 0)
    account.renew(LEASED, [Progress("killed", 100, 250)], 30_000, 20_000)
    account.sweep(LEASED, 49_999)
    assert (account.num_leases, account.num_used) == (1, 0)
    account.sweep(LEASED, 50_000)
    assert (account.num_leases, account.num_used) == (0, 250)


def test_a_settlement_after_the_lease_has_ended_corrects_the_charge() -> None:
    """A clock that leapt, or a gateway that stood still."""
    account = Account()
    account.reserve(LEASED, "late", 100, 30_000, 0)
    account.sweep(LEASED, 40_000)
    assert account.num_used == 100
    assert account.settle(LEASED, "late", 7, 50_000).status is Status.SETTLED
    assert account.num_used == 7


def test_a_renewal_after_the_lease_has_ended_revives_it() -> None:
    account = Account()
    account.reserve(LEASED, "late", 100, 30_000, 0)
    account.renew(LEASED, [Progress("late", 100, 5)], 30_000, 40_000)
    assert (account.num_leases, account.num_used) == (1, 0)
    account.settle(LEASED, "late", 9, 50_000)
    assert (account.num_leases, account.num_used) == (0, 9)


def test_what_redis_has_forgotten_is_entered_again_by_a_renewal() -> None:
    account = Account()
    account.renew(LEASED, [Progress("running", 100, 20)], 30_000, 0)
    assert account.num_leases == 1
    assert account.settle(LEASED, "running", 60, 1).status is Status.SETTLED
    assert account.num_used == 60


def test_a_command_that_comes_after_the_settlement_it_was_sent_before_changes_nothing() -> None:
    """A server that was paused reads what clients have long given up on."""
    account = Account()
    account.settle(LEASED, "r", 30, 0, may_be_unknown=True)
    assert account.reserve(LEASED, "r", 100, 30_000, 1).status is Status.GONE
    account.renew(LEASED, [Progress("r", 100, 20)], 30_000, 2)
    assert account.settle(LEASED, "r", 30, 3, may_be_unknown=True).status is Status.GONE
    assert (account.num_leases, account.num_used) == (0, 30)


def test_a_request_larger_than_a_full_bucket_is_admitted_by_a_full_one_and_owes_the_rest() -> None:
    account, small = Account(), Limits(tokens_per_minute=600, burst_ms=1_000)
    assert account.reserve(small, "large", 500, 1_000, 0).tokens_left == -490
    assert account.reserve(small, "next", 1, 1_000, 0).number == 49_100


def test_who_owes_tokens_may_still_ask_for_none(law: RedisLaw) -> None:
    account, bound = Account(), Limits(tokens_per_minute=600, burst_ms=1_000)
    law.begin(bound)
    for name, cost, status in (
        ("large", 500, Status.ADMITTED),
        ("next", 1, Status.TOKENS),
        ("none", 0, Status.ADMITTED),
    ):
        outcome = law(0, "reserve", name, cost, 1_000)
        assert outcome == account.reserve(bound, name, cost, 1_000, 0)
        assert (outcome.status, outcome.tokens_left) == (status, -490)


def test_who_has_no_tokens_at_all_may_not_ask_for_none_either_unless_it_borrows(
    law: RedisLaw,
) -> None:
    for borrower in (False, True):
        account, nothing = Account(), Limits(tokens_per_minute=0, may_borrow=borrower)
        law.begin(nothing)
        for name, is_idle in (("busy", False), ("idle", True)):
            law.set_idle(is_idle)
            outcome = law(0, "reserve", name, 0, 1_000)
            assert outcome == account.reserve(nothing, name, 0, 1_000, 0, is_idle=is_idle)
            assert (outcome.status is Status.ADMITTED) == (borrower and is_idle)


def test_a_clock_set_back_neither_fills_nor_stops_the_bucket() -> None:
    account, bound = Account(), Limits(tokens_per_minute=600, burst_ms=60_000)
    account.reserve(bound, "a", 600, 1_000, 100_000)
    assert account.sweep(bound, 50_000).tokens_left == 0
    assert account.sweep(bound, 51_000).tokens_left == 10


def test_without_a_word_on_limits_redis_admits_nobody_and_changes_nothing(law: RedisLaw) -> None:
    law.client.flushall()
    assert law(0, "reserve", "a", 1, 1_000) == Outcome(Status.UNKNOWN, 0)
    assert set(law.client.keys()) == {CLOCK}


@pytest.mark.parametrize("text", ["", "{", '"x"', "7"])
def test_limits_that_cannot_be_read_are_unknown(law: RedisLaw, text: str) -> None:
    law.client.flushall()
    law.client.hset(KEYS.limits, HOLDER, text)
    assert law(0, "reserve", "a", 1, 1_000) == Outcome(Status.UNKNOWN, 1)


def test_a_tenant_without_limits_of_its_own_takes_the_default(law: RedisLaw) -> None:
    law.client.flushall()
    law.client.hset(KEYS.limits, DEFAULT, Limits(concurrency=1).to_json())
    assert law(0, "reserve", "a", 1, 1_000).status is Status.ADMITTED
    assert law(0, "reserve", "b", 1, 1_000).status is Status.CONCURRENCY


@pytest.mark.parametrize(
    ("stated", "rate", "in_force"),
    [
        (1_000, 400, Limits(400, lowered_from=1_000)),
        (1_000, 1_000, Limits(1_000)),
        (1_000, 5_000, Limits(1_000)),
        (1_000, None, Limits(1_000)),
        (0, 400, Limits(0)),
        (None, 400, Limits()),
        (1_000, "0", Limits(1_000)),
        (1_000, "-1", Limits(1_000)),
        (1_000, "nan", Limits(1_000)),
        (1_000, "-inf", Limits(1_000)),
        (1_000, "a few", Limits(1_000)),
    ],
)
def test_a_rate_lowers_what_is_set_and_does_nothing_else(
    law: RedisLaw, stated: int | None, rate: object, in_force: Limits
) -> None:
    law.begin(Limits(stated))
    law.lower(rate)
    _, text = law.answer(0, "sweep")
    assert Limits.from_json(text) == in_force
    assert law.client.hget(KEYS.limits, HOLDER) == Limits(stated).to_json()


def test_a_lowered_rate_holds_for_the_next_request_and_ends_with_its_key(law: RedisLaw) -> None:
    law.begin(Limits(tokens_per_minute=6_000, burst_ms=60_000))
    law.lower(600)
    assert law(0, "reserve", "a", 600, 1_000).tokens_left == 0
    refused = law(1_000, "reserve", "b", 20, 1_000)
    assert (refused.status, refused.number) == (Status.TOKENS, 1_000)
    law.lower(None)
    assert law(1_200, "reserve", "b", 20, 1_000).status is Status.ADMITTED


@pytest.mark.parametrize("cost", [500, 8_000, 20_000])
def test_a_borrower_whose_rate_is_lowered_uses_no_more_than_that_and_its_own_burst(
    law: RedisLaw, cost: int
) -> None:
    """However large its requests are: what they use beyond the lowered bucket is owed."""
    stated = Limits(tokens_per_minute=60_000, burst_ms=30_000, may_borrow=True)
    law.begin(stated)
    law.lower(1_250)
    account, in_force, used = Account(), replace(stated, tokens_per_minute=1_250), 0
    in_force = replace(in_force, lowered_from=60_000)
    num_minutes = 10
    for now_ms in range(0, num_minutes * 60_000, 30_000):
        name = f"r{now_ms}"
        outcome = law(now_ms, "reserve", name, cost, 30_000)
        assert outcome == account.reserve(in_force, name, cost, 30_000, now_ms)
        if outcome.status is Status.ADMITTED:
            used += cost
            settled = law(now_ms, "settle", name, cost, 0)
            assert settled == account.settle(in_force, name, cost, now_ms)
    assert used <= 625 + 1_250 * num_minutes + cost


def test_a_lease_that_another_release_ended_without_counting_it_is_not_held_for_ever(
    law: RedisLaw,
) -> None:
    law.begin(Limits(tokens_per_minute=60_000))
    law(0, "reserve", "killed", 700, 30_000)
    law(0, "reserve", "b", 100, 30_000)
    law.client.zrem(KEYS.leases(HOLDER), "killed")
    law(1_000, "settle", "b", 100, 0)
    assert law.account("reserved") == 0


def test_a_tenant_without_limits_of_its_own_is_lowered_with_the_default_alone(
    law: RedisLaw,
) -> None:
    law.client.flushall()
    law.client.hset(KEYS.limits, DEFAULT, Limits(1_000).to_json())
    law.lower(100)  # of limits that it has no more
    assert Limits.from_json(law.answer(0, "sweep")[1]) == Limits(1_000)
    law.lower(400, DEFAULT)
    assert Limits.from_json(law.answer(0, "sweep")[1]) == Limits(400, lowered_from=1_000)
    law.limit(Limits(2_000))
    assert Limits.from_json(law.answer(0, "sweep")[1]) == Limits(100, lowered_from=2_000)


def test_an_account_at_rest_expires_and_a_debtors_later(law: RedisLaw) -> None:
    law.begin(Limits(tokens_per_minute=60, burst_ms=1_000))
    law(0, "reserve", "a", 0, 1_000)
    rest_ms = law.client.pttl(KEYS.account(HOLDER))
    assert 0 < rest_ms <= 3_600_000
    law(0, "settle", "a", 600, 0)
    assert 4_100_000 < law.client.pttl(KEYS.account(HOLDER)) <= 4_200_000
    assert law.client.pttl(KEYS.limits) == -1


@pytest.mark.parametrize("rate", [1, 1_000_000_000])
@pytest.mark.parametrize("number", [MAX_TOKENS, 10**17, 10**20, 10**400])
@pytest.mark.parametrize("operation", ["reserve", "settle", "renew"])
def test_no_number_costs_a_tenant_its_account(
    law: RedisLaw, rate: int, number: int, operation: str
) -> None:
    law.begin(Limits(tokens_per_minute=rate))
    arguments = {
        "reserve": ("a", number, 30_000),
        "settle": ("a", number, 1),
        "renew": (30_000, "a", number, number),
    }
    assert law(0, operation, *arguments[operation]).number in (0, MAX_TOKENS)
    if operation != "settle":
        law(0, "settle", "a", number, 0)
    assert law.account("used") == MAX_TOKENS
    assert 0 < law.client.pttl(KEYS.account(HOLDER)) <= 31_536_000_000
    refused = law(0, "reserve", "b", 1, 30_000)
    assert refused.status is Status.TOKENS
    assert law(refused.number, "reserve", "b", 1, 30_000).status is Status.ADMITTED


def test_nobody_owes_more_than_the_fullest_bucket_holds(law: RedisLaw) -> None:
    law.begin(Limits(tokens_per_minute=6_000))
    for number in range(20):
        law(0, "settle", str(number), MAX_TOKENS, 1)
    assert law(0, "sweep").tokens_left == -MAX_TOKENS


def test_the_index_names_who_must_be_swept_and_when(law: RedisLaw) -> None:
    law.begin(Limits())
    law(1_000, "reserve", "a", 5, 30_000)
    law(2_000, "reserve", "b", 5, 30_000)
    assert law.client.zscore(KEYS.leasing, HOLDER) == 31_000
    law(2_500, "settle", "a", 5, 0)
    law(31_000, "sweep")
    assert law.client.zscore(KEYS.leasing, HOLDER) == 32_000
    law(32_000, "sweep")
    assert law.client.zscore(KEYS.leasing, HOLDER) == 632_000
    law(632_000, "sweep")
    assert law.client.zcard(KEYS.leasing) == 0
    assert law.account("used") == 10


def test_all_keys_of_a_pool_lie_in_one_slot(start_redis: Any) -> None:
    server = start_redis("--cluster-enabled", "yes")
    with server.client() as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        while client.execute_command("CLUSTER", "INFO").split()[0] != "cluster_state:ok":
            pass
        client.hset(KEYS.limits, HOLDER, Limits(concurrency=1).to_json())
        run = client.register_script(SCRIPT)
        keys = script_keys(KEYS, HOLDER, DEFAULT)
        reply = run(keys=keys, args=["reserve", HOLDER, DEFAULT, "a", 5, 1_000])
        assert outcome_of(reply)[0].status is Status.ADMITTED
