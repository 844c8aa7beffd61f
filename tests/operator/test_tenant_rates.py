"""Tenants' rates while interactive requests wait: batch work yields first, nobody is starved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_operator.quotas.key_ring import TenantKeys
from chairlift_operator.quotas.ledger import Counts, Ledger
from chairlift_operator.quotas.lowering import Lowering
from chairlift_operator.quotas.rates import (
    BATCH_FLOOR,
    PERSISTS_S,
    TOLD_S,
    Asker,
    Lowered,
    Strain,
    lower,
    water_level,
)
from chairlift_operator.quotas.roster import Roster
from chairlift_protocol.quota import Limits
from chairlift_protocol.wire import RequestClass

BATCH, INTERACTIVE = RequestClass.BATCH, RequestClass.INTERACTIVE
ROUND_S, TICK_S = 4.0, 5.0
CARRIED = 100_000.0


def batch(name: str, limit: int, demand: float | None, weight: float = 1.0) -> Asker:
    return Asker(f"{name}/batch", BATCH, limit, demand, weight)


def chat(name: str, limit: int, demand: float | None, weight: float = 1.0) -> Asker:
    return Asker(f"{name}/interactive", INTERACTIVE, limit, demand, weight)


class Rounds:
    """Rounds one after the other, of a pool that a controller looks at every 5 s."""

    def __init__(self, *askers: Asker, carried: float | None = CARRIED) -> None:
        self.askers: Sequence[Asker] = askers
        self.carried, self.batch_carried = carried, 0.0
        self.now_s = 1000.0
        self.lowered = Lowered()

    def pass_s(self, seconds: float, is_crowded: bool | None) -> Mapping[str, int]:
        for _ in range(round(seconds / ROUND_S)):
            self.now_s += ROUND_S
            seen_s = self.now_s - self.now_s % TICK_S
            strain = Strain(seen_s, is_crowded, self.carried, self.batch_carried)
            self.lowered = lower(self.askers, strain, self.lowered, self.now_s)
        return self.lowered.told


# -- what is drawn by weight -----------------------------------------------------------------------

askers_ = st.lists(
    st.builds(
        Asker,
        st.uuids().map(str),
        st.just(BATCH),
        st.integers(1, 1_000_000_000),
        st.none() | st.floats(allow_nan=True, allow_infinity=True),
        st.floats(0.001, 1000.0),
    ),
    min_size=1, max_size=12,
)  # fmt: skip


@given(askers_, st.floats(1.0, 1e9))
def test_what_is_granted_fills_the_budget_and_no_more(askers: list[Asker], budget: float) -> None:
    level = water_level(askers, budget)
    granted = math.fsum(min(a.asked, a.weight * level) for a in askers)
    assert granted == pytest.approx(min(budget, math.fsum(a.asked for a in askers)))


@given(askers_, st.floats(1.0, 1e9))
def test_nobody_is_granted_less_than_its_part_by_weight_unless_it_asks_for_less(
    askers: list[Asker], budget: float
) -> None:
    level, weights = water_level(askers, budget), math.fsum(a.weight for a in askers)
    for asker in askers:
        part = budget * asker.weight / weights
        assert min(asker.asked, asker.weight * level) >= min(asker.asked, part) * (1 - 1e-6)


@given(askers_, st.floats(1.0, 1e9), st.floats(1.0, 1e9), st.floats(0.0, 1e9))
def test_who_asks_for_more_gets_no_less_and_takes_nothing_but_from_others(
    askers: list[Asker], budget: float, smaller: float, more: float
) -> None:
    first, *others = askers
    greedy = replace(first, demand=first.asked + more)
    before, after = water_level(askers, budget), water_level([greedy, *others], budget)
    had, has = (min(a.asked, a.weight * at) for a, at in ((first, before), (greedy, after)))
    assert has >= had * (1 - 1e-6)
    assert after <= before * (1 + 1e-6)
    assert water_level(askers, min(budget, smaller)) <= before * (1 + 1e-6)


# -- from round to round ---------------------------------------------------------------------------


def test_nothing_is_lowered_while_nobody_waits_or_in_one_tick_alone() -> None:
    rounds = Rounds(batch("a", 60_000, None))
    assert not rounds.pass_s(60, is_crowded=False)
    strain = Strain(rounds.now_s, True, CARRIED, 0.0)
    for after_s in (0.0, 4.0, 8.0, 12.0):  # however many rounds see it
        rounds.lowered = lower(rounds.askers, strain, rounds.lowered, strain.at_s + after_s)
        assert not rounds.lowered.told
    later = replace(strain, at_s=strain.at_s + TICK_S)
    for after_s in (0.0, 4.0):
        rounds.lowered = lower(rounds.askers, later, rounds.lowered, later.at_s + 8.0 + after_s)
    assert rounds.lowered.told


def test_batch_rates_fall_by_a_fifth_in_ten_seconds_from_what_is_used() -> None:
    rounds = Rounds(batch("a", 1_000_000, 40_000))
    rounds.pass_s(12, is_crowded=True)
    first = rounds.lowered.rates["a/batch"]
    assert 0.8 * 40_000 <= first <= 40_000
    rounds.pass_s(20, is_crowded=True)
    assert rounds.lowered.rates["a/batch"] == pytest.approx(first * 0.8**2)


def test_a_limit_beyond_all_that_the_pool_carries_begins_there() -> None:
    rounds = Rounds(batch("a", 1_000_000_000, None))
    first = rounds.pass_s(12, is_crowded=True)["a/batch"]
    assert 0.8 * CARRIED <= first <= CARRIED


def test_batch_work_keeps_what_engines_guarantee_and_what_its_own_replicas_carry() -> None:
    rounds = Rounds(batch("a", 60_000, None), batch("b", 60_000, None, weight=3.0))
    told = rounds.pass_s(400, is_crowded=True)
    assert told == {"a/batch": 1250, "b/batch": 3750}
    assert sum(told.values()) == BATCH_FLOOR * CARRIED
    rounds.batch_carried = 20_000
    assert rounds.pass_s(400, is_crowded=True) == {"a/batch": 6250, "b/batch": 18_750}


def test_who_asks_for_little_is_left_alone_and_the_others_share_by_weight() -> None:
    rounds = Rounds(
        batch("light", 50_000, 1_000), batch("a", 50_000, None), batch("b", 50_000, None, 2.0)
    )
    told = rounds.pass_s(400, is_crowded=True)
    assert told["light/batch"] >= 1_000
    assert told["b/batch"] == pytest.approx(2 * told["a/batch"], abs=2)
    assert 1_000 + told["a/batch"] + told["b/batch"] == pytest.approx(5_000, abs=3)


def test_interactive_rates_fall_only_once_batch_work_has_nothing_left_to_yield() -> None:
    rounds = Rounds(batch("a", 60_000, None), chat("loud", 200_000, None), chat("calm", 9_000, 500))
    while rounds.lowered.floored_since_s is None:
        assert set(rounds.pass_s(4, is_crowded=True)) <= {"a/batch"}
        assert rounds.now_s < 1400
    assert set(rounds.pass_s(PERSISTS_S - 4, is_crowded=True)) == {"a/batch"}
    told = rounds.pass_s(400, is_crowded=True)
    assert set(told) == {"a/batch", "loud/interactive"}
    # All that the other does not ask for.
    assert told["loud/interactive"] == CARRIED - 500


def test_interactive_rates_fall_no_further_while_batch_work_has_something_to_yield() -> None:
    rounds = Rounds(batch("a", 20_000, None), chat("b", 90_000, None), chat("c", 90_000, None))
    while "b/interactive" not in (low := rounds.pass_s(4, is_crowded=True)):
        assert rounds.now_s < 1400
    assert low["b/interactive"] > CARRIED / 2  # and would fall further
    rounds.askers = [*rounds.askers, batch("new", 90_000, None)]
    assert rounds.pass_s(60, is_crowded=True)["b/interactive"] == low["b/interactive"]


def test_interactive_rates_wait_as_long_when_it_gets_crowded_again() -> None:
    rounds = Rounds(chat("b", 300_000, None))
    rounds.pass_s(PERSISTS_S, is_crowded=True)
    rounds.pass_s(20, is_crowded=False)
    assert not rounds.pass_s(PERSISTS_S, is_crowded=True)
    assert rounds.pass_s(20, is_crowded=True)


def test_an_interactive_tenant_keeps_its_part_of_the_capacity_by_weight() -> None:
    rounds = Rounds(chat("a", 500_000, None), chat("b", 500_000, None, weight=4.0))
    assert rounds.pass_s(600, is_crowded=True) == {
        "a/interactive": 20_000, "b/interactive": 80_000
    }  # fmt: skip
    rounds.askers = rounds.askers[:1]  # the part of one that is alone is all of it
    assert rounds.pass_s(4, is_crowded=True) == {"a/interactive": CARRIED}


def test_rates_come_back_by_a_fifth_in_ten_seconds_interactive_ones_first() -> None:
    rounds = Rounds(batch("a", 60_000, None), chat("b", 200_000, None), chat("c", 200_000, None))
    low = rounds.pass_s(600, is_crowded=True)
    assert set(low) == {"a/batch", "b/interactive", "c/interactive"}
    told = rounds.pass_s(20, is_crowded=False)
    assert told["b/interactive"] == pytest.approx(1.2**2 * low["b/interactive"], abs=1)
    assert told["a/batch"] == low["a/batch"]
    while told["b/interactive"] < CARRIED:
        assert told["a/batch"] == low["a/batch"]
        told = rounds.pass_s(4, is_crowded=False)
    assert rounds.pass_s(20, is_crowded=False)["a/batch"] > low["a/batch"]
    assert not rounds.pass_s(300, is_crowded=False)
    assert rounds.lowered.budget is None


@pytest.mark.parametrize("left", [80_000.0, 30_000.0, 8_000.0])
def test_batch_work_gets_what_interactive_work_leaves_give_or_take_a_step(left: float) -> None:
    """A pool in which requests wait whenever more is used than it carries."""
    rounds = Rounds(batch("a", 200_000, None), batch("b", 200_000, None, weight=3.0))
    used, uses = 0.0, []
    for _ in range(300):
        told = rounds.pass_s(ROUND_S, is_crowded=used > left)
        used = float(sum(told.get(asker.holder, asker.limit) for asker in rounds.askers))
        uses.append(used)
        if len(told) == 2 and len(uses) > 100:
            assert told["b/batch"] == pytest.approx(3 * told["a/batch"], rel=0.25)
    settled = uses[100:]
    assert 0.7 * left <= min(settled) and max(settled) <= 1.4 * left
    assert sum(settled) / len(settled) == pytest.approx(left, rel=0.1)


def test_batch_work_does_not_wait_for_interactive_limits_beyond_what_the_pool_carries() -> None:
    rounds = Rounds(batch("a", 60_000, None), chat("*", 10_000_000, None), chat("b", 10**9, None))
    low = rounds.pass_s(600, is_crowded=True)
    assert len(low) == 3
    told = rounds.pass_s(80, is_crowded=False)
    assert told["a/batch"] > 1.2**2 * low["a/batch"]
    assert told["b/interactive"] < 10**9


def test_a_high_limit_for_everybody_else_does_not_keep_a_tenants_batch_work_from_yielding() -> None:
    rounds = Rounds(batch("*", 10_000_000, None), batch("a", 60_000, 40_000))
    rounds.pass_s(12, is_crowded=True)
    assert rounds.lowered.rates["a/batch"] <= 40_000
    assert rounds.pass_s(60, is_crowded=True)["a/batch"] <= 0.8**5 * 40_000


def test_interactive_tenants_yield_where_nobody_knows_what_idle_batch_replicas_carry() -> None:
    for batches in ([], [batch("*", 10_000_000, None)]):
        rounds = Rounds(*batches, chat("b", 500_000, None))
        rounds.batch_carried = None
        assert rounds.pass_s(600, is_crowded=True) == {"b/interactive": CARRIED}


def test_where_batch_work_asks_and_its_replicas_are_not_known_nobody_yields() -> None:
    rounds = Rounds(batch("a", 60_000, None), chat("b", 500_000, None))
    rounds.batch_carried = None
    assert not rounds.pass_s(600, is_crowded=True)
    rounds.batch_carried = 0.0
    low = rounds.pass_s(40, is_crowded=True)
    rounds.batch_carried = None
    assert rounds.pass_s(100, is_crowded=True) == low


@pytest.mark.parametrize("noise", [0.85, 1.15])
def test_interactive_tenants_yield_although_what_the_pool_carries_is_told_with_noise(
    noise: float,
) -> None:
    rounds = Rounds(batch("a", 60_000, None), chat("b", 500_000, None))
    while rounds.lowered.floored_since_s is None:
        rounds.pass_s(4, is_crowded=True)
        assert rounds.now_s < 1400
    since_s = rounds.lowered.floored_since_s
    for number in range(20):
        rounds.carried = CARRIED * (noise if number % 2 else 1.0)
        rounds.pass_s(4, is_crowded=True)
    assert rounds.lowered.floored_since_s == since_s
    assert "b/interactive" in rounds.lowered.told


def test_interactive_tenants_yield_although_what_a_batch_tenant_asks_for_goes_up_and_down() -> None:
    loud, chats = batch("a", 60_000, None), chat("b", 500_000, None)
    rounds = Rounds(batch("light", 60_000, 1_000), loud, chats)
    while rounds.lowered.floored_since_s is None:
        rounds.pass_s(4, is_crowded=True)
        assert rounds.now_s < 1400
    since_s = rounds.lowered.floored_since_s
    rounds.pass_s(20, is_crowded=True)
    for number in range(20):
        light = batch("light", 60_000, 1_000 if number % 2 else 1_600)
        rounds.askers = (light, loud, chats)
        rounds.pass_s(4, is_crowded=True)
    assert rounds.lowered.floored_since_s == since_s


def test_while_nobody_knows_whether_requests_wait_rates_come_back_no_faster_than_they_may() -> None:
    rounds = Rounds(batch("a", 60_000, None))
    low = rounds.pass_s(60, is_crowded=True)["a/batch"]
    risen = rounds.pass_s(12, is_crowded=None)["a/batch"]
    assert risen == pytest.approx(1.2**1.2 * low, abs=1)
    assert rounds.pass_s(4, is_crowded=True)["a/batch"] < risen  # what was seen before counts still
    assert not rounds.pass_s(300, is_crowded=None)
    rounds.pass_s(4, is_crowded=True)
    assert rounds.lowered.budget is None  # by then one tick says nothing


def test_an_old_look_at_the_pool_says_nothing() -> None:
    rounds = Rounds(batch("a", 60_000, None))
    rounds.pass_s(60, is_crowded=True)
    old = Strain(rounds.now_s - TOLD_S - 1, True, CARRIED, 0.0)
    assert lower(rounds.askers, old, rounds.lowered, rounds.now_s).told == {}
    assert lower(rounds.askers, None, rounds.lowered, rounds.now_s).told == {}
    fresh = Strain(rounds.now_s + TOLD_S + 1, True, CARRIED, 0.0)
    assert lower(rounds.askers, fresh, rounds.lowered, fresh.at_s).told == {}  # begins anew


@pytest.mark.parametrize("carried", [None, math.nan, math.inf, 0.0, -1.0])
def test_without_a_model_nothing_falls_further_and_all_may_come_back(
    carried: float | None,
) -> None:
    rounds = Rounds(batch("a", 60_000, None), chat("b", 200_000, None), carried=carried)
    assert not rounds.pass_s(100, is_crowded=True)
    rounds.carried = CARRIED
    low = rounds.pass_s(40, is_crowded=True)
    rounds.carried = carried
    assert rounds.pass_s(60, is_crowded=True) == low
    assert rounds.pass_s(40, is_crowded=False)["a/batch"] > low["a/batch"]
    assert not rounds.pass_s(300, is_crowded=False)


def test_a_limit_that_was_lowered_meanwhile_is_what_counts() -> None:
    rounds = Rounds(batch("a", 60_000, None))
    assert rounds.pass_s(40, is_crowded=True)["a/batch"] > 20_000
    rounds.askers = [batch("a", 500, None)]
    rounds.carried = None
    assert not rounds.pass_s(4, is_crowded=True) and not rounds.lowered.rates


numbers = st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.floats(1.0, 1e7)
crowds = st.none() | st.booleans()


@given(
    st.lists(
        st.builds(
            Asker,
            st.sampled_from(["a/batch", "b/batch", "c/interactive", "d/interactive"]),
            st.none(),
            st.integers(1, 10_000_000),
            numbers,
            st.floats(0.001, 1000.0),
        ),
        max_size=4, unique_by=lambda asker: asker.holder,
    ),
    st.lists(st.tuples(crowds, numbers, numbers, st.floats(0.0, 30.0)), max_size=40),
)  # fmt: skip
def test_whatever_is_seen_rates_stay_within_what_is_set_and_fall_slowly(
    askers: list[Asker], history: list[tuple[bool | None, float | None, float | None, float]]
) -> None:
    askers = [replace(a, request_class=RequestClass(a.holder[2:])) for a in askers]
    before, now_s = Lowered(), 0.0
    for is_crowded, carried, batch_carried, passed_s in history:
        now_s += passed_s
        strain = Strain(now_s, is_crowded, carried, batch_carried)
        after = lower(askers, strain, before, now_s)
        calm = lower(askers, replace(strain, is_crowded=False), before, now_s)
        weights = sum(a.weight for a in askers if a.request_class is INTERACTIVE)
        for asker in askers:
            rate = after.rates.get(asker.holder, asker.limit)
            assert 1.0 <= rate <= asker.limit
            assert rate <= calm.rates.get(asker.holder, asker.limit) * (1 + 1e-9) or not is_crowded
            assert 1 <= after.told.get(asker.holder, asker.limit) <= asker.limit
            known = before.rates.get(asker.holder)
            if known is not None and is_crowded is not None:
                fallen = 0.8 ** (min(passed_s, 10.0) / 10.0)
                assert rate >= min(asker.limit, known * fallen) * (1 - 1e-9)
            has_part = is_crowded and carried is not None and 0 < carried < math.inf
            if asker.request_class is INTERACTIVE and has_part and rate < (known or asker.limit):
                assert carried is not None
                assert rate >= min(asker.limit, carried * asker.weight / weights) * (1 - 1e-9)
        before = after


# -- with what Redis tells -------------------------------------------------------------------------


NO_KEYS = TenantKeys({})


def _ledger(now_s: float, **rises: int) -> Ledger:
    """A minute of counters that end now. rises: by tenant, tokens a minute in batch work."""
    ledger = Ledger()
    for at_s in range(-60, 1, 5):
        used = {t: 10_000 + per_min * (at_s + 60) // 60 for t, per_min in rises.items()}
        counts = {f"{t}/batch": Counts(n, 0, 0, 0) for t, n in used.items()}
        ledger.note(now_s + at_s, counts)
    return ledger


def test_only_tenants_that_ask_and_have_a_limit_of_tokens_are_lowered() -> None:
    limits = {"*/batch": Limits(), "*/interactive": Limits(9_000), "open/batch": Limits(),
              "calm/batch": Limits(9_000), "none/batch": Limits(0)}  # fmt: skip
    limits |= {f"{name}/batch": Limits(80_000) for name in ("busy", "more")}
    roster = Roster(
        {h: bound.to_json() for h, bound in limits.items()}, NO_KEYS, weights={"more": 3.0}
    )
    lowering, now_s = Lowering(), 1000.0
    for _ in range(100):
        now_s += ROUND_S
        ledger = _ledger(now_s, busy=70_000, more=70_000, open=50_000, calm=0, none=5_000)
        lowering.turn(roster, ledger, Strain(now_s, True, CARRIED, 0.0), now_s, ROUND_S)
    assert lowering.rate("more/batch") == 3 * 1250 and lowering.rate("busy/batch") == 1250
    for holder in ("open/batch", "calm/batch", "none/batch", "new/batch", "*/interactive"):
        assert lowering.rate(holder) is None
    assert lowering.classes == {BATCH}


def test_tenants_without_a_quota_are_lowered_together_like_one_of_weight_one() -> None:
    limits = {"*/batch": Limits(80_000), "*/interactive": Limits(), "own/batch": Limits(80_000)}
    roster = Roster(
        {h: bound.to_json() for h, bound in limits.items()}, NO_KEYS, weights={"own": 4.0}
    )
    lowering, now_s = Lowering(), 1000.0
    for _ in range(100):
        now_s += ROUND_S
        strain = Strain(now_s, True, CARRIED, 0.0)
        told = lowering.turn(roster, _ledger(now_s, own=70_000), strain, now_s, ROUND_S)
    assert told == {"*/batch": 1000, "own/batch": 4000}
    assert lowering.rate("stranger/batch") == 1000


def test_requests_that_hold_tokens_and_refusals_are_demand_too() -> None:
    roster = Roster(
        {"a/batch": Limits(80_000).to_json(), "b/batch": Limits(80_000).to_json()}, NO_KEYS
    )
    for one, alone in ((Counts(0, 0, 3, 50_000), 50_000), (Counts(0, 2, 0, 0), 80_000)):
        ledger = Ledger()
        for at_s in range(0, 61, 5):
            ledger.note(at_s, {"a/batch": Counts(0, 0, 0) if at_s < 60 else one})
        lowering = Lowering()
        lowering.turn(roster, ledger, Strain(50.0, True, CARRIED, 0.0), 55.0, ROUND_S)
        for now_s in (60.0, 64.0):
            told = lowering.turn(roster, ledger, Strain(now_s, True, CARRIED, 0.0), now_s, ROUND_S)
        assert alone * 0.8 <= told["a/batch"] < alone


def test_demand_of_requests_that_an_earlier_gateway_does_not_count_is_not_zero() -> None:
    roster = Roster({"a/batch": Limits(80_000).to_json()}, NO_KEYS)
    ledger = Ledger()
    for at_s in range(0, 61, 5):
        ledger.note(at_s, {"a/batch": Counts(0, 0, 3, None)})
    lowering = Lowering()
    for now_s in (60.0, 64.0, 68.0):
        told = lowering.turn(roster, ledger, Strain(now_s, True, CARRIED, 0.0), now_s, ROUND_S)
    assert 0.8 * 80_000 <= told["a/batch"] < 80_000


def test_quotas_that_are_made_in_the_midst_of_congestion_take_no_part_before_they_ask() -> None:
    ledger = Ledger()
    ledger.note(1000.0, {"a/batch": Counts(500, 3, 1, 50)})
    for at_s in (1004.0, 1008.0, 1012.0):
        new = {f"n{number}/batch": Counts(700, 2, 0) for number in range(50)}
        ledger.note(at_s, {"a/batch": Counts(500, 3, 1, 50), **new})
        assert list(ledger.asking()) == ["a/batch"]
    ledger.note(1016.0, {"n7/batch": Counts(700, 3, 0)})
    assert list(ledger.asking()) == ["a/batch", "n7/batch"]


def test_what_was_told_is_in_force_for_as_long_as_it_may_hold() -> None:
    roster = Roster({"a/batch": Limits(80_000).to_json()}, NO_KEYS)
    lowering, now_s, strain = Lowering(), 1000.0, None

    def turn() -> Mapping[str, int]:
        return lowering.turn(roster, _ledger(now_s, a=70_000), strain, now_s, ROUND_S)

    for _ in range(3):
        now_s += ROUND_S
        strain = Strain(now_s, True, CARRIED, 0.0)
        told = turn()
    strain, seen_s = None, now_s
    for _ in range(3):
        now_s += ROUND_S
        assert not turn()
        assert lowering.rate("a/batch") == told["a/batch"] and lowering.classes == {BATCH}
    now_s = seen_s + TOLD_S + 1
    assert not turn()
    assert lowering.rate("a/batch") is None and not lowering.classes


def test_counters_that_could_not_be_read_lately_lower_nothing() -> None:
    roster = Roster({"a/batch": Limits(80_000).to_json()}, NO_KEYS)
    lowering = Lowering()
    for now_s in (1000.0, 1004.0, 1008.0, 1012.0):
        strain = Strain(now_s, True, CARRIED, 0.0)
        told = lowering.turn(roster, _ledger(1000.0, a=70_000), strain, now_s, ROUND_S)
    assert told
    assert not lowering.turn(
        roster, _ledger(1000.0, a=70_000), Strain(1016.0, True), 1016.0, ROUND_S
    )
