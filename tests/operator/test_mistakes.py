"""Three common mistakes are named in conditions, and only what is known raises or clears them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_operator.decisions import Condition, Truth
from chairlift_operator.exposition import SlotHolder
from chairlift_operator.memory import Memory
from chairlift_operator.mistakes import BATCH_SIZE, MISTAKES, SLOTS, STEP_TOKENS
from chairlift_operator.plan import plan
from chairlift_operator.snapshot import ReplicaSnapshot, Snapshot
from chairlift_operator.step_time import StepCosts

Make = Callable[..., Any]
REFERENCE = StepCosts(8e-3, 0.06e-3, 0.045e-3, 5e-8)
DEAR_DECODES = StepCosts(8e-3, 0.3e-3, 0.045e-3, 5e-8)
NO_HARDWARE = StepCosts(80e-3, 0.3e-3, 0.045e-3, 5e-8)
CALM, SATURATED = 3.0, None


def _told(made: Any) -> dict[str, Condition]:
    return {c.type: c for c in made.conditions if c.type in MISTAKES}


@pytest.fixture
def after(make_engine: Make, close_loop: Make) -> Make:
    """What a pool is told after two minutes of an engine that was given these knobs."""

    def conditions(
        pool: Any, costs: StepCosts, knobs: tuple[int, int], rate: float | None, **engine: Any
    ) -> dict[str, Condition]:
        served = make_engine(costs, arrivals_per_s=rate, **engine)
        batch_size, step_tokens = knobs
        served.policy = replace(
            served.policy,
            batch_size=batch_size,
            step_tokens=step_tokens,
            chunk_tokens=step_tokens,
            scheduling="static" if pool.spec.interactive.scheduling == "Static" else "continuous",
        )

        def with_prompts(seen: ReplicaSnapshot, now_s: float) -> ReplicaSnapshot:
            assert seen.sample is not None
            own, batch = seen.sample.classes
            num_prompts = served.first_good + served.first_bad
            own = replace(own, first_tokens=num_prompts, prompt_tokens=served.prompts)
            return replace(seen, sample=replace(seen.sample, classes=(own, batch)))

        (*_, last) = close_loop(pool, served, Memory.start(), 120.0, alter=with_prompts)
        return _told(last.plan)

    return conditions


@pytest.mark.parametrize(
    ("costs", "knobs", "prompt", "type", "reason"),
    [
        (DEAR_DECODES, (256, 512), 100.0, BATCH_SIZE, "TooManyDecodes"),
        (REFERENCE, (64, 8192), 2000.0, STEP_TOKENS, "LongPromptsNotChunked"),
        (REFERENCE, (256, 2048), 400.0, STEP_TOKENS, "ChunksTooLarge"),
    ],
)
def test_each_mistake_has_its_own_condition(
    after: Make,
    make_pool: Make,
    make_lengths: Make,
    costs: StepCosts,
    knobs: tuple[int, int],
    prompt: float,
    type: str,
    reason: str,
) -> None:
    told = after(
        make_pool(mode="Recommend"), costs, knobs, SATURATED, lengths=make_lengths(prompt=prompt)
    )
    assert (told[type].status, told[type].reason) == (Truth.TRUE, reason)
    other = STEP_TOKENS if type == BATCH_SIZE else BATCH_SIZE
    assert told[other].status is Truth.FALSE
    assert "set mode: Enforce, or lower" in told[type].message


@pytest.mark.parametrize(
    ("costs", "knobs", "rate"),
    [
        (REFERENCE, (64, 300), SATURATED),
        (REFERENCE, (256, 8192), CALM),  # large knobs that nothing fills are no mistake
        (NO_HARDWARE, (256, 8192), CALM),  # and no knob helps where no step is short enough
    ],
)
def test_without_a_mistake_none_is_named(
    after: Make, make_pool: Make, costs: StepCosts, knobs: tuple[int, int], rate: float | None
) -> None:
    told = after(make_pool(mode="Recommend"), costs, knobs, rate)
    assert {told[BATCH_SIZE].status, told[STEP_TOKENS].status} == {Truth.FALSE}


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"batch": (200, 256), "step": (600, 2048)}, "lower batchSize.min to"),
        ({"scheduling": "Static"}, "set scheduling: Continuous"),
    ],
)
def test_the_message_says_what_to_change(
    after: Make, make_pool: Make, make_lengths: Make, changes: dict[str, Any], advice: str
) -> None:
    lengths = make_lengths(prompt=100.0)
    told = after(make_pool(**changes), DEAR_DECODES, (256, 512), SATURATED, lengths=lengths)
    assert advice in told[BATCH_SIZE].message
    assert "without any prompt, against 50 ms" in told[BATCH_SIZE].message


def test_where_the_operator_may_decide_mistakes_go_away(after: Make, make_pool: Make) -> None:
    for costs in (REFERENCE, DEAR_DECODES):
        told = after(make_pool(), costs, (256, 2048), SATURATED)
        assert {told[BATCH_SIZE].status, told[STEP_TOKENS].status} == {Truth.FALSE}


@pytest.mark.parametrize("knobs", [(256, 8192), (64, 300)])
def test_what_is_not_known_neither_raises_nor_clears(
    make_pool: Make, make_engine: Make, close_loop: Make, knobs: tuple[int, int]
) -> None:
    engine = make_engine(REFERENCE)
    engine.policy = replace(engine.policy, batch_size=knobs[0], step_tokens=knobs[1])

    def blind(seen: ReplicaSnapshot, now_s: float) -> ReplicaSnapshot:
        return replace(seen, sample=None) if now_s > 60 else seen

    pool = make_pool(mode="Recommend")
    (*_, last) = close_loop(pool, engine, Memory.start(), 90.0, alter=blind)
    assert {c.status for c in _told(last.plan).values()} == {Truth.UNKNOWN}


def test_nothing_is_said_of_a_pool_at_rest(after: Make, make_pool: Make) -> None:
    told = after(make_pool(), REFERENCE, (256, 8192), 0.0)
    assert {(c.status, c.reason) for c in told.values()} == {(Truth.UNKNOWN, "Idle")}


Holding = tuple[str, float, float]  # tenant, slots, waiting requests of others


def _slots(make_pool: Make, make_engine: Make, holdings: Sequence[Holding | None]) -> Condition:
    """After five seconds of each, on an engine that runs ten requests."""
    engine, memory, made = make_engine(REFERENCE, arrivals_per_s=5.0), Memory.start(), None
    for holding in holdings:
        engine.run_until(engine.now_s + 5.0)
        holder = None if holding is None else SlotHolder(*holding)
        seen = engine.snapshot()
        sample = replace(seen.sample, num_running=10.0, slot_holder=holder)
        snapshot = Snapshot("chat", engine.now_s, (replace(seen, sample=sample),))
        made = plan(make_pool(), snapshot, memory, engine.now_s)
        memory = made.memory
    return _told(made)[SLOTS]


@pytest.mark.parametrize(
    ("holdings", "status"),
    [
        ([("team-a", 8.0, 3.0)] * 12, Truth.TRUE),
        ([("team-a", 8.0, 0.0)] * 12, Truth.FALSE),  # nobody else wants them
        ([("team-a", 5.0, 3.0)] * 12, Truth.FALSE),
        ([("team-a", 8.0, 3.0), ("team-b", 8.0, 3.0)] * 6, Truth.FALSE),
        ([("team-a", 8.0, 0.0)] * 10 + [("team-a", 8.0, 3.0)] * 2, Truth.FALSE),  # a moment
        ([("", 0.0, 3.0)] * 12, Truth.FALSE),
        ([("team-a", 8.0, 3.0)] * 2, Truth.UNKNOWN),
        ([None] * 12, Truth.UNKNOWN),
        ([("team-a", 8.0, 3.0)] * 11 + [None], Truth.UNKNOWN),
    ],
)
def test_one_tenant_on_most_slots_is_named_while_others_wait(
    make_pool: Make, make_engine: Make, holdings: list[Holding | None], status: Truth
) -> None:
    told = _slots(make_pool, make_engine, holdings)
    assert told.status is status
    if status is Truth.TRUE:
        assert "tenant team-a holds 8 of 10 slots in use while 3 requests" in told.message


@given(
    running=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9), max_size=6),
    waiting=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9), max_size=6),
)
def test_the_holder_holds_most_and_all_others_that_wait_are_counted(
    running: dict[str, int], waiting: dict[str, int]
) -> None:
    holder = SlotHolder.among(running, waiting)
    assert holder.num_running == max(running.values(), default=0)
    assert holder.num_others_waiting == sum(waiting.values()) - waiting.get(holder.tenant, 0)
