from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_gateway.choice import (
    LOAD_FACTOR,
    RUNNING_TOKENS,
    WORTH,
    Candidate,
    Demand,
    Memory,
    Replica,
    Stated,
    affinity,
    chosen,
    predicted_waits,
)
from chairlift_protocol.wire import RequestClass

INTERACTIVE = RequestClass.INTERACTIVE
REPLICAS = tuple(Replica(f"r{i}", f"http://127.0.0.1:{9000 + i}") for i in range(8))
PLENTY = 10**9

counts = st.integers(0, 40)
tokens = st.integers(0, 30_000)
statements = st.builds(
    Stated, num_requests=counts, queued_tokens=tokens, free_kv_tokens=st.integers(0, 100_000)
)
demands = st.builds(
    Demand,
    request_class=st.just(INTERACTIVE),
    prompt_tokens=tokens,
    prefix=st.none() | st.integers(0, 2**32 - 1),
)
memories = st.builds(Memory, replica=st.sampled_from(REPLICAS), prompt_tokens=tokens)


def candidate(
    index: int,
    num_requests: int = 0,
    queued_tokens: int = 0,
    stated: Stated | None = None,
    is_avoided: bool = False,
    last_turn: int = 0,
) -> Candidate:
    return Candidate(REPLICAS[index], num_requests, queued_tokens, stated, is_avoided, last_turn)


@st.composite
def candidate_lists(draw: st.DrawFn, min_size: int = 0) -> list[Candidate]:
    indices = draw(st.lists(st.sampled_from(range(8)), unique=True, min_size=min_size))
    return [
        candidate(
            index, draw(counts), draw(tokens), draw(st.none() | statements), draw(st.booleans()),
            draw(st.integers(0, 20)),
        )
        for index in indices
    ]  # fmt: skip


def choose(candidates: list[Candidate], demand: Demand, memory: Memory | None = None) -> Candidate:
    found = chosen(candidates, demand, memory)
    assert found is not None
    return found


@given(candidate_lists(), demands, st.none() | memories)
def test_an_avoided_replica_is_chosen_only_where_there_is_no_other(
    candidates: list[Candidate], demand: Demand, memory: Memory | None
) -> None:
    found = chosen(candidates, demand, memory)
    assert (found is None) == (not candidates)
    if found is not None and found.is_avoided:
        assert all(each.is_avoided for each in candidates)


@given(candidate_lists(min_size=1), demands)
def test_without_a_prefix_the_least_wait_is_chosen_and_of_equals_whose_turn_is_longest_ago(
    candidates: list[Candidate], demand: Demand
) -> None:
    candidates = [replace(each, is_avoided=False) for each in candidates]
    found = choose(candidates, replace(demand, prefix=None))
    waits = dict(zip(candidates, predicted_waits(candidates, demand), strict=True))
    least = min(waits.values())
    assert waits[found] == least
    assert found.last_turn == min(each.last_turn for each in candidates if waits[each] == least)


@given(candidate_lists(min_size=1), demands, st.none() | memories)
def test_a_replica_far_over_the_mean_load_is_never_chosen_for_affinity(
    candidates: list[Candidate], demand: Demand, memory: Memory | None
) -> None:
    candidates = [replace(each, is_avoided=False) for each in candidates]
    found = choose(candidates, demand, memory)
    waits = dict(zip(candidates, predicted_waits(candidates, demand), strict=True))
    bound = LOAD_FACTOR * sum(waits.values()) / len(waits)
    spared = 0
    if memory is not None and memory.replica == found.replica:
        spared = min(memory.prompt_tokens, demand.prompt_tokens)
    assert waits[found] <= bound + WORTH * spared + 1e-6


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), counts, tokens)
def test_equal_prefixes_go_to_the_same_replica_while_loads_are_balanced(
    prefix: int, num_replicas: int, num_requests: int, queued_tokens: int
) -> None:
    demand = Demand(INTERACTIVE, 500, prefix)
    turns = [
        choose(
            [
                candidate(i, num_requests, queued_tokens, last_turn=(i + shift) % num_replicas)
                for i in range(num_replicas)
            ],
            demand,
        ).replica
        for shift in range(num_replicas)
    ]
    assert len(set(turns)) == 1


@given(st.integers(2, 8), st.data())
def test_when_a_replica_leaves_only_its_own_prefixes_move(
    num_replicas: int, data: st.DataObject
) -> None:
    gone = data.draw(st.integers(0, num_replicas - 1))
    prefix = data.draw(st.integers(0, 2**32 - 1))
    before = [candidate(i) for i in range(num_replicas)]
    after = [candidate(i) for i in range(num_replicas) if i != gone]
    demand = Demand(INTERACTIVE, 500, prefix)
    was = choose(before, demand).replica
    assert was == REPLICAS[gone] or choose(after, demand).replica == was


def test_prefixes_spread_over_the_replicas() -> None:
    owners = [max(REPLICAS[:4], key=lambda r: affinity(prefix, r.name)) for prefix in range(4000)]
    assert all(800 < owners.count(replica) < 1200 for replica in REPLICAS[:4])


@given(st.lists(statements, min_size=1, max_size=6), demands)
def test_a_replica_that_states_nothing_counts_as_loaded_as_the_others_in_the_mean(
    stated: list[Stated], demand: Demand
) -> None:
    known = [replace(each, free_kv_tokens=PLENTY) for each in stated]
    *waits, unknown = predicted_waits(
        [*(candidate(i, stated=each) for i, each in enumerate(known)), candidate(7)], demand
    )
    assert unknown == pytest.approx(sum(waits) / len(waits))


@given(candidate_lists(min_size=1), demands, st.data())
def test_more_work_anywhere_never_makes_that_replica_look_shorter(
    candidates: list[Candidate], demand: Demand, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(candidates) - 1))
    before = predicted_waits(candidates, demand)
    each = candidates[index]
    busier = [
        replace(each, num_requests=each.num_requests + 1),
        replace(each, queued_tokens=each.queued_tokens + 100),
    ]
    if each.stated is not None:
        more = each.stated.queued_tokens + 100
        busier.append(replace(each, stated=replace(each.stated, queued_tokens=more)))
        less = each.stated.free_kv_tokens // 2
        busier.append(replace(each, stated=replace(each.stated, free_kv_tokens=less)))
    for changed in busier:
        after = predicted_waits([*candidates[:index], changed, *candidates[index + 1 :]], demand)
        assert after[index] >= before[index]


def test_a_prompt_goes_back_where_it_was_while_waiting_there_costs_less_than_computing_it() -> None:
    demand = Demand(INTERACTIVE, 4000, prefix=5)
    home = max(range(3), key=lambda i: affinity(5, REPLICAS[i].name))
    other = (home + 1) % 3
    memory = Memory(REPLICAS[other], prompt_tokens=3000)
    idle = [candidate(i) for i in range(3)]
    assert choose(idle, demand).replica == REPLICAS[home]
    assert choose(idle, demand, memory).replica == REPLICAS[other]
    for queued_tokens, goes_back in ((6000, True), (20_000, False)):
        queued = [candidate(i, queued_tokens=queued_tokens * (i == other)) for i in range(3)]
        assert (choose(queued, demand, memory).replica == REPLICAS[other]) is goes_back


def test_a_full_kv_memory_is_a_wait_and_a_running_request_some_tokens_of_one() -> None:
    roomy, full = Stated(0, 0, free_kv_tokens=10_000), Stated(0, 0, free_kv_tokens=1_000)
    waits = predicted_waits(
        [candidate(0, 1, stated=roomy), candidate(1, stated=full)], Demand(INTERACTIVE, 4_000)
    )
    assert waits == [RUNNING_TOKENS, 3_000]
