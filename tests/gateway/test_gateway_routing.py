from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift_gateway.routing import (
    AVOID_S,
    STATEMENT_FRESH_S,
    Candidate,
    Replica,
    Router,
    least_loaded,
)
from chairlift_protocol.load import Load
from chairlift_protocol.wire import RequestClass

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH

REPLICAS = tuple(Replica(f"r{i}", f"http://127.0.0.1:{9000 + i}") for i in range(4))

candidates = st.lists(
    st.builds(
        Candidate,
        replica=st.sampled_from(REPLICAS),
        num_requests=st.integers(0, 5),
        is_avoided=st.booleans(),
        last_turn=st.integers(0, 20),
    ),
    max_size=6,
)


def load(
    num_running: int = 0, num_waiting: int = 0, draining: bool = False, share: float = 0.0
) -> Load:
    return Load(num_running, num_waiting, 0, 0, share, (0, 0), draining)


def router_of(num_replicas: int) -> Router:
    router = Router()
    router.replace(REPLICAS[:num_replicas])
    return router


@given(candidates)
def test_the_choice_is_least_loaded_and_avoided_only_without_another(
    given_candidates: list[Candidate],
) -> None:
    chosen = least_loaded(given_candidates)
    if chosen is None:
        assert not given_candidates
        return
    usable = [each for each in given_candidates if not each.is_avoided] or given_candidates
    fewest = min(each.num_requests for each in usable)
    assert chosen in usable
    assert chosen.num_requests == fewest
    assert chosen.last_turn == min(e.last_turn for e in usable if e.num_requests == fewest)


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(0, 50)), max_size=60), st.integers(1, 4))
def test_alone_it_keeps_in_flight_counts_within_one_of_each_other_as_requests_arrive(
    steps: list[int | None], num_replicas: int
) -> None:
    """None: a request arrives. A number: that one of those in flight ends."""
    router = router_of(num_replicas)
    in_flight: list[Replica] = []
    for now_s, step in enumerate(steps):
        if step is None:
            counts = {each: in_flight.count(each) for each in router.replicas}
            chosen = router.choose(INTERACTIVE, float(now_s))
            assert chosen is not None and counts[chosen] == min(counts.values())
            router.begin(chosen)
            in_flight.append(chosen)
            # The engine counts ours only: nothing of it may be counted twice.
            router.learn(chosen, load(num_running=in_flight.count(chosen)), float(now_s))
        elif in_flight:
            router.end(in_flight.pop(step % len(in_flight)))
        for replica in router.replicas:
            assert router.num_in_flight(replica) == in_flight.count(replica)


def test_equals_take_turns() -> None:
    router = router_of(3)
    chosen = []
    for _ in range(6):
        replica = router.choose(INTERACTIVE, 0.0)
        assert replica is not None
        router.begin(replica)
        router.end(replica)
        chosen.append(replica)
    assert chosen == [*REPLICAS[:3], *REPLICAS[:3]]


def test_what_other_gateways_sent_counts_until_the_statement_is_old() -> None:
    router = router_of(2)
    first, second = router.replicas
    router.begin(first)
    router.learn(first, load(num_running=5, num_waiting=2), now_s=0.0)
    router.end(first)
    for _ in range(3):
        router.begin(second)
    assert router.choose(INTERACTIVE, 1.0) == second
    assert router.choose(INTERACTIVE, STATEMENT_FRESH_S + 0.1) == first


def test_a_replica_that_says_it_drains_gets_nothing_and_one_that_failed_only_without_another() -> (
    None
):
    router = router_of(2)
    first, second = router.replicas
    router.begin(second)
    router.avoid(first, now_s=0.0)
    assert router.choose(INTERACTIVE, AVOID_S - 0.1) == second
    assert router.choose(INTERACTIVE, AVOID_S + 0.1) == first
    router.learn(second, load(draining=True), now_s=0.0)
    assert router.choose(INTERACTIVE, AVOID_S - 0.1) == first
    assert router.choose(INTERACTIVE, 0.0, excluding=first) is None
    assert router.num_routable(INTERACTIVE, 0.0) == 1


def test_a_replica_that_left_the_list_is_forgotten_once_its_last_request_ended() -> None:
    router = router_of(2)
    first, second = router.replicas
    router.begin(first)
    assert router.replace([second])
    assert router.choose(INTERACTIVE, 0.0) == second
    router.end(first)
    assert router.num_in_flight(first) == 0
    assert not router.replace([second])
    assert router.replace([])
    assert router.choose(INTERACTIVE, 0.0) is None


def test_a_name_at_another_address_starts_with_a_clean_account() -> None:
    router = router_of(1)
    old = router.replicas[0]
    router.avoid(old, 0.0)
    moved = Replica(old.name, "http://127.0.0.1:9999")
    assert router.replace([moved])
    assert router.choose(INTERACTIVE, 0.0) == moved
    assert router.num_in_flight(moved) == 0


def test_each_class_goes_to_its_replicas_and_batch_work_also_to_those_that_lend() -> None:
    lender = Replica("interactive-0", "http://127.0.0.1:1")
    own = Replica("batch-0", "http://127.0.0.1:2", BATCH)
    router = Router()
    router.replace([lender, own])
    assert router.choose(INTERACTIVE, 0.0, excluding=lender) is None
    assert router.choose(BATCH, 0.0, excluding=own) is None  # whether the other lends is unknown
    assert router.unstated(0.0) == [lender]
    router.begin(lender)
    router.learn(lender, load(num_running=1, share=0.0), 0.0)
    assert router.unstated(0.0) == []
    assert router.choose(BATCH, 1.0, excluding=own) is None
    assert (router.num_routable(BATCH, 1.0), router.num_routable(INTERACTIVE, 1.0)) == (1, 1)
    router.learn(lender, load(num_running=1, share=0.5), 2.0)
    router.begin(own)
    router.begin(own)
    assert router.choose(BATCH, 3.0) == lender
    assert router.choose(BATCH, 3.0 + STATEMENT_FRESH_S) == own  # the statement has aged
