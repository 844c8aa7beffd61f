"""Batch work on interactive replicas: it may fill every slot, as long as nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_operator.batch_share import (
    FIRST_DWELL_S,
    LEAST_SHARE,
    Lending,
    LendingInput,
    LendingState,
    Served,
    lend,
)
from chairlift_operator.memory import Memory
from chairlift_operator.plan import plan
from chairlift_operator.snapshot import Snapshot
from chairlift_operator.spec import Batch, BatchReplicaBounds, Borrowing, Objective, Slo
from chairlift_operator.step_time import StepCosts
from chairlift_operator.windows import Attainment, wilson_bounds

Make = Callable[..., Any]

REFERENCE = StepCosts(8e-3, 0.06e-3, 0.045e-3, 5e-8)
LAPTOP = StepCosts(85e-3, 1.5e-3, 2.5e-3, 2e-8)
BORROWING = Batch(borrowing=Borrowing())


def scaled(factor: float) -> StepCosts:
    c = REFERENCE
    return StepCosts(c.fixed_s * factor, c.decode_s * factor, c.prefill_s * factor, c.kv_s * factor)


def seen(bad: float, count: float = 200.0, low_sample: bool = False) -> Attainment:
    return Attainment(bad, *wilson_bounds(bad, count), count, count, 60.0, low_sample)


GOOD, BAD, AWFUL = seen(0.0), seen(0.12), seen(0.5)


def lending(
    current: float = 0.8, rested_s: float = 1e6, settled: bool = True, **served: Any
) -> Lending:
    fine = Served(GOOD, GOOD, GOOD, GOOD, is_idle=False, has_borrowers=True)
    return lend(
        LendingInput(
            current=current,
            max_share=0.8,
            served=replace(fine, **served),
            slo=Slo(Objective(1.0), Objective(0.05)),
            settled=settled,
            may_grow=True,
            state=LendingState(moved_at_s=1e6 - rested_s),
            now_s=1e6,
        )
    )


# -- the law ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "share", "reason"),
    [
        ({}, 0.8, "bounds"),
        ({"gaps_just_now": AWFUL}, 0.0, "50 % of gaps over 50 ms in 60 s"),
        ({"first_tokens_just_now": AWFUL, "settled": False}, 0.0, "50 % of first tokens over 1000"),
        ({"gaps_just_now": AWFUL, "has_borrowers": False}, 0.8, "bounds"),
        ({"gaps": BAD}, 0.4, "12 % of gaps over 50 ms in 60 s, step tokens and batch size are at"),
        ({"first_tokens": BAD, "current": 0.15}, 0.1, "12 % of first tokens"),
        ({"first_tokens": BAD, "current": 0.1}, 0.1, "bounds"),
        ({"gaps_just_now": AWFUL, "current": 0.1}, 0.1, "bounds"),
        ({"gaps": BAD, "settled": False}, 0.8, "bounds"),
        ({"gaps": BAD, "rested_s": 5.0}, 0.8, "bounds"),
        ({"current": 0.2}, 0.4, "objectives met for 15 s"),
        ({"current": 0.2, "first_tokens": seen(0.0, 9, True)}, 0.4, "objectives met for 15 s"),
        ({"current": 0.2, "rested_s": 10.0}, 0.2, "bounds"),
        ({"current": 0.0, "rested_s": 5.0}, 0.1, "batch work's own share"),
        ({"current": 0.0, "rested_s": 5.0, "gaps_just_now": AWFUL}, 0.1, "own share"),
        ({"current": 0.1}, 0.25, "objectives met"),
        ({"current": 0.1, "oldest_waiting_s": 0.2}, 0.1, "bounds"),
        ({"current": 0.75}, 0.8, "objectives met"),
        ({"current": 0.4, "gaps": None, "first_tokens": None}, 0.4, "bounds"),
        ({"current": 0.0, "first_tokens": BAD, "is_idle": True}, 0.8, "no interactive work"),
        ({"oldest_waiting_s": 0.2}, 0.4, "a request has waited 0.2 s of the 1.0 s"),
        ({"oldest_waiting_s": 0.2, "settled": False}, 0.4, "a request has waited"),
        ({"oldest_waiting_s": 0.2, "borrowed_share": 0.5}, 0.25, "a request has waited"),
        ({"oldest_waiting_s": 0.2, "borrowed_share": 0.1}, 0.15, "a request has waited"),
        ({"oldest_waiting_s": 0.2, "current": 0.15}, 0.15, "bounds"),
        ({"gaps": BAD, "borrowed_share": 0.5}, 0.25, "12 % of gaps"),
        ({"gaps": BAD, "borrowed_share": 0.1}, 0.1, "12 % of gaps"),
        ({"oldest_waiting_s": 0.2, "rested_s": 5.0}, 0.8, "bounds"),
        ({"oldest_waiting_s": 0.05}, 0.8, "bounds"),
        ({"current": 0.2, "gaps": seen(0.0, 9, True)}, 0.4, "met for 30 s"),
        ({"current": 0.2, "gaps": seen(0.0, 9, True), "rested_s": 20.0}, 0.2, "bounds"),
    ],
)
def test_the_share_falls_for_a_reason_and_comes_back_after_a_rest(
    given_: dict[str, Any], share: float, reason: str
) -> None:
    outcome = lending(**given_)
    assert outcome.share == share
    assert reason in outcome.reason


def test_an_emergency_takes_all_for_a_tick_and_leaves_a_tenth_however_long_it_lasts() -> None:
    fine = Served(AWFUL, AWFUL, AWFUL, AWFUL, is_idle=False, has_borrowers=True)
    state, share, shares = LendingState(), 0.8, []
    for tick in range(6):
        here = LendingInput(share, 0.8, fine, Slo(), True, True, state, 1000.0 + 5 * tick)
        outcome = lend(here)
        state, share = outcome.state, outcome.share
        shares.append(share)
    assert shares == [0.0, 0.1, 0.1, 0.1, 0.1, 0.1]
    little = LendingInput(0.0, 0.05, fine, Slo(), True, True, state, 2000.0)
    assert lend(little).share == 0.05


def test_a_share_that_fell_for_a_queue_alone_is_whole_again_soon_after_the_queue_is_gone() -> None:
    fine = Served(GOOD, GOOD, GOOD, GOOD, is_idle=False, has_borrowers=True)
    here = LendingInput(0.8, 0.8, fine, Slo(), True, True, LendingState(), now_s=1000.0)
    fell = lend(replace(here, served=replace(fine, oldest_waiting_s=0.3)))
    assert fell.share == 0.4
    shares = {}
    for after_s in (5, 15, 20, 25):
        later = replace(here, current=0.4, state=fell.state, now_s=1000.0 + after_s)
        shares[after_s] = lend(later).share
    assert shares == {5: 0.4, 15: 0.4, 20: 0.8, 25: 0.8}


def test_a_share_that_had_to_fall_again_rests_longer_each_time() -> None:
    state, now_s, rests = LendingState(), 0.0, []
    fine = Served(GOOD, GOOD, GOOD, GOOD, is_idle=False, has_borrowers=True)
    for _ in range(3):
        now_s += 1000
        base = LendingInput(0.5, 0.8, fine, Slo(), True, True, state, now_s)
        raised = lend(base)
        assert raised.share == 0.8
        missed = replace(base, current=0.6, served=replace(fine, gaps=BAD), state=raised.state)
        state = lend(replace(missed, now_s=now_s + 20)).state
        rests.append(state.dwell_s)
    assert rests == [2 * FIRST_DWELL_S, 4 * FIRST_DWELL_S, 8 * FIRST_DWELL_S]


ATTAINED = st.one_of(
    st.none(),
    st.builds(seen, st.floats(0, 1), st.sampled_from([1.0, 20.0, 300.0]), low_sample=st.booleans()),
)


@given(
    current=st.floats(0, 1),
    max_share=st.floats(0.1, 1),
    served=st.builds(Served, ATTAINED, ATTAINED, ATTAINED, ATTAINED, st.booleans(), st.booleans()),
    settled=st.booleans(),
    may_grow=st.booleans(),
    rested_s=st.floats(0, 1000),
)
def test_the_share_stays_in_bounds_and_never_rises_on_what_is_not_known(
    current: float,
    max_share: float,
    served: Served,
    settled: bool,
    may_grow: bool,
    rested_s: float,
) -> None:
    state = LendingState(moved_at_s=1000.0 - rested_s)
    outcome = lend(
        LendingInput(current, max_share, served, Slo(), settled, may_grow, state, 1000.0)
    )
    assert 0 <= outcome.share <= max_share
    blind = served.gaps is None and served.first_tokens is None and not served.is_idle
    if blind or rested_s < FIRST_DWELL_S:
        assert outcome.share <= max(current, LEAST_SHARE)  # which is batch work's own
    if not may_grow:
        assert outcome.share <= current
    assert outcome.share in (0.0, current) or outcome.share >= min(LEAST_SHARE, max_share)


# -- the loop --------------------------------------------------------------------------------------


def _share_bad(ticks: list[Any]) -> float:
    return sum(t.bad for t in ticks) / max(1.0, sum(t.good + t.bad for t in ticks))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("costs", "arrivals_per_s", "least_batch_tokens_per_s"),
    [
        (REFERENCE, 2.0, 1500),
        (REFERENCE, 5.0, 1000),
        (scaled(0.45), 5.0, 3500),
        (scaled(1.6), 3.0, 500),
        (LAPTOP, 0.3, 10),
    ],
)
def test_an_endless_backlog_beside_moderate_load_leaves_the_objective_alone(
    make_pool: Make,
    make_engine: Make,
    make_lengths: Make,
    close_loop: Make,
    costs: StepCosts,
    arrivals_per_s: float,
    least_batch_tokens_per_s: float,
    seed: int,
) -> None:
    work: dict[str, Any] = {"arrivals_per_s": arrivals_per_s, "batch_backlog": True, "seed": seed}
    if costs is LAPTOP:
        lengths = make_lengths(60, 40)
        engine = make_engine(costs, itl_ms=300, lengths=lengths, kv_tokens=65536, **work)
        pool = make_pool(itl_s=0.3, batch=(1, 64), step=(32, 2048), batch_work=BORROWING)
    else:
        engine, pool = make_engine(costs, **work), make_pool(batch_work=BORROWING)
    ticks = list(close_loop(pool, engine, Memory.start(), 300.0))
    settled = [t for t in ticks if t.at_s > 60]
    assert _share_bad(settled) <= 0.05
    assert engine.first_bad <= 0.05 * (engine.first_good + engine.first_bad)
    reports = [t.plan.replicas[0] for t in settled]
    assert min(r.batch_size for r in reports) >= 16
    assert min(r.step_tokens for r in reports) >= 64
    assert engine.batch_tokens / 300 >= least_batch_tokens_per_s
    assert sum(len(t.plan.decisions) for t in settled) <= 25


def test_a_machine_that_turns_slow_takes_the_slots_back_and_lends_them_again_later(
    make_pool: Make, make_engine: Make, close_loop: Make
) -> None:
    pool = make_pool(batch_work=BORROWING)
    engine = make_engine(REFERENCE, arrivals_per_s=2.0, batch_backlog=True)
    *_, last = close_loop(pool, engine, Memory.start(), 120.0)
    assert last.plan.replicas[0].batch_share == 0.8
    engine.costs = scaled(2.5)
    slow = list(close_loop(pool, engine, last.plan.memory, 240.0))
    taken = next(t for t in slow if t.plan.replicas[0].batch_share == 0.0)
    # A tick comes at the end of a step, so up to one of them late.
    assert taken.at_s - last.at_s <= BORROWING.borrowing.return_within_s + 0.1
    sentences = [d.sentence for t in slow for d in t.plan.decisions if d.field == "batchShare"]
    assert sentences[0].startswith("batch share 0.8→0: ")
    engine.costs = REFERENCE
    back = list(close_loop(pool, engine, slow[-1].plan.memory, 900.0))
    assert back[-1].plan.replicas[0].batch_share == 0.8
    assert _share_bad(back[12:]) <= 0.05


def test_without_borrowing_an_interactive_replica_lends_nothing(
    make_pool: Make, make_engine: Make, close_loop: Make
) -> None:
    pool = make_pool(batch_work=Batch(replicas=BatchReplicaBounds(0, 1)))
    engine = make_engine(REFERENCE, arrivals_per_s=2.0, batch_backlog=True)
    *_, last = close_loop(pool, engine, Memory.start(), 30.0)
    assert last.plan.replicas[0].batch_share == 0.0
    assert engine.num_batch == 0


def test_a_spec_without_batch_work_leaves_it_all_that_is_left_over(
    make_pool: Make, make_engine: Make, close_loop: Make
) -> None:
    engine = make_engine(REFERENCE, arrivals_per_s=None, batch_backlog=True)
    ticks = list(close_loop(make_pool(), engine, Memory.start(), 60.0))
    assert {t.plan.replicas[0].batch_share for t in ticks} == {1.0}


# -- static scheduling -----------------------------------------------------------------------------


def test_static_scheduling_takes_the_largest_batch_tunes_nothing_and_says_so_once(
    make_pool: Make, make_engine: Make, close_loop: Make
) -> None:
    engine = make_engine(REFERENCE)
    ticks = list(close_loop(make_pool(scheduling="Static"), engine, Memory.start(), 60.0))
    assert (engine.policy.batch_size, engine.policy.step_tokens) == (256, 2048)
    assert engine.policy.scheduling == "static"
    sentences = [d.sentence for t in ticks for d in t.plan.decisions]
    assert sum("nothing is tuned" in s for s in sentences) >= 1
    assert not any(t.plan.decisions or t.plan.actions for t in ticks[1:])
    assert ticks[-1].plan.replicas[0].held == "static scheduling: nothing is tuned"


def test_a_pool_turned_back_to_continuous_is_tuned_from_where_it_stands(
    make_pool: Make, make_engine: Make
) -> None:
    engine = make_engine(REFERENCE)
    memory, fields = Memory.start(), []
    for tick, scheduling in enumerate(["Static", "Static", "Continuous", "Continuous"]):
        engine.run_until(5.0 * (tick + 1))
        snapshot = Snapshot("default/chat", engine.now_s, (engine.snapshot(),))
        made = plan(make_pool(scheduling=scheduling), snapshot, memory, engine.now_s)
        memory = made.memory
        for action in made.actions:
            engine.policy = action.policy
        fields.append([d.sentence for d in made.decisions if d.field == "scheduling"])
    assert engine.policy.scheduling == "continuous"
    assert not fields[1] and not fields[3]
    assert fields[2][0].startswith("scheduling static→continuous: the spec asks for continuous")
