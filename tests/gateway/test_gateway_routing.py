from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift_gateway.choice import Demand, Replica
from chairlift_gateway.ejection import AVOID_S, PROBED_FROM
from chairlift_gateway.routing import MAX_MEMORIES, STATEMENT_FRESH_S, Router, Ticket
from chairlift_protocol.load import Load
from chairlift_protocol.wire import RequestClass

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
ANY, ANY_BATCH = Demand(INTERACTIVE), Demand(BATCH)
PLENTY = 10**9

REPLICAS = tuple(Replica(f"r{i}", f"http://127.0.0.1:{9000 + i}") for i in range(4))


def load(
    num_running: int = 0,
    num_waiting: int = 0,
    draining: bool = False,
    share: float = 0.0,
    waiting_prefill_tokens: int = 0,
) -> Load:
    return Load(num_running, num_waiting, waiting_prefill_tokens, PLENTY, share, (0, 0), draining)


def router_of(num_replicas: int) -> Router:
    router = Router()
    router.replace(REPLICAS[:num_replicas])
    return router


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(0, 50)), max_size=60), st.integers(1, 4))
def test_alone_it_keeps_in_flight_counts_within_one_of_each_other_as_requests_arrive(
    steps: list[int | None], num_replicas: int
) -> None:
    """None: a request arrives. A number: that one of those in flight ends."""
    router = router_of(num_replicas)
    in_flight: list[Ticket] = []
    for now_s, step in enumerate(steps):
        if step is None:
            counts = {each: sum(t.replica == each for t in in_flight) for each in router.replicas}
            chosen = router.choose(ANY, float(now_s))
            assert chosen is not None and counts[chosen] == min(counts.values())
            in_flight.append(router.begin(chosen, ANY))
            # The engine counts ours only: nothing of it may be counted twice.
            router.learn(chosen, load(num_running=counts[chosen] + 1), float(now_s))
        elif in_flight:
            router.end(in_flight.pop(step % len(in_flight)))
        for replica in router.replicas:
            assert router.num_in_flight(replica) == sum(t.replica == replica for t in in_flight)


def test_equals_take_turns() -> None:
    router = router_of(3)
    chosen = []
    for _ in range(6):
        replica = router.choose(ANY, 0.0)
        assert replica is not None
        router.end(router.begin(replica, ANY))
        chosen.append(replica)
    assert chosen == [*REPLICAS[:3], *REPLICAS[:3]]


def test_a_long_prompt_counts_until_its_first_token_and_its_request_until_the_end() -> None:
    router = router_of(2)
    first, second = router.replicas
    long = router.begin(first, Demand(INTERACTIVE, prompt_tokens=10_000))
    for _ in range(3):
        router.begin(second, ANY)
    assert router.choose(ANY, 0.0) == second
    router.begun(long)
    assert router.choose(ANY, 0.0) == first
    for _ in range(3):
        router.begin(first, ANY)
    assert router.choose(ANY, 0.0) == second
    router.end(long)
    router.begin(second, ANY)
    assert router.choose(ANY, 0.0) == first


def test_of_an_answer_that_comes_as_a_whole_the_replica_tells_that_its_prompt_began() -> None:
    router = router_of(2)
    first, second = router.replicas
    old, new = (router.begin(first, Demand(INTERACTIVE, tokens, None, True)) for tokens in (9, 8))
    stream = router.begin(first, Demand(INTERACTIVE, 7))
    router.learn(first, load(num_running=2, num_waiting=1, waiting_prefill_tokens=8), 0.0)
    assert [old.queued_tokens, new.queued_tokens, stream.queued_tokens] == [0, 8, 7]
    router.learn(second, load(), 0.0)
    router.learn(first, load(num_running=3), 0.0)
    assert [new.queued_tokens, stream.queued_tokens] == [0, 7]


def test_batch_prompts_that_wait_are_no_wait_for_interactive_ones() -> None:
    router = router_of(2)
    first, second = router.replicas
    router.begin(first, Demand(BATCH, prompt_tokens=10_000))
    router.begin(second, Demand(INTERACTIVE, prompt_tokens=500))
    assert router.choose(ANY, 0.0) == first
    for replica in (first, second):
        router.learn(replica, load(num_running=1, share=1.0), 0.0)
    assert router.choose(ANY_BATCH, 0.0) == second


def test_what_other_gateways_sent_counts_until_the_statement_is_old() -> None:
    router = router_of(2)
    first, second = router.replicas
    ticket = router.begin(first, ANY)
    router.learn(first, load(num_running=5, num_waiting=2), now_s=0.0)
    router.learn(second, load(), now_s=0.0)
    router.end(ticket)
    for _ in range(3):
        router.begin(second, ANY)
    assert router.choose(ANY, 1.0) == second
    assert router.choose(ANY, STATEMENT_FRESH_S + 0.1) == first


def test_the_prompts_that_others_wait_with_count_and_ours_not_twice() -> None:
    router = router_of(2)
    first, second = router.replicas
    ticket = router.begin(first, Demand(INTERACTIVE, prompt_tokens=3_000))
    router.learn(first, load(num_waiting=1, waiting_prefill_tokens=3_000), 0.0)
    router.learn(second, load(num_running=1, waiting_prefill_tokens=2_000), 0.0)
    assert router.choose(ANY, 0.0) == second
    router.end(ticket)
    assert router.choose(ANY, 0.0) == first


def test_a_replica_that_says_nothing_is_not_preferred_to_one_that_is_known_to_be_idle() -> None:
    router = router_of(3)
    idle, busy, _ = router.replicas
    router.learn(busy, load(num_running=30), 0.0)
    router.learn(idle, load(), 0.0)
    ticket = router.begin(idle, ANY)
    assert router.choose(ANY, 0.0) == idle
    router.end(ticket)


def test_a_replica_that_says_it_drains_gets_nothing_and_one_that_failed_only_without_another() -> (
    None
):
    router = router_of(2)
    first, second = router.replicas
    router.begin(second, ANY)
    router.failed(first, now_s=0.0)
    assert router.choose(ANY, AVOID_S - 0.1) == second
    assert router.choose(ANY, AVOID_S + 0.1) == first
    router.learn(second, load(draining=True), now_s=0.0)
    assert router.choose(ANY, AVOID_S - 0.1) == first
    assert router.choose(ANY, 0.0, excluding=first) is None
    assert router.num_routable(INTERACTIVE, 0.0) == 1


def test_one_that_fails_again_and_again_is_out_until_a_probe_or_an_answer() -> None:
    router = router_of(2)
    first, second = router.replicas
    now_s = 0.0
    for _ in range(PROBED_FROM):
        now_s += 100
        router.failed(first, now_s)
    now_s += 100
    router.begin(second, ANY)
    assert router.choose(ANY, now_s) == second
    assert router.due_for_probe(now_s) == [first]
    router.failed(first, now_s)
    assert router.due_for_probe(now_s) == []
    router.succeeded(first)
    assert router.choose(ANY, now_s) == first
    assert router.due_for_probe(now_s + 1000) == []


def test_one_that_never_states_its_load_gets_only_so_much_at_the_same_time() -> None:
    router = Router(max_unstated=2)
    router.replace(REPLICAS[:1])
    replica = REPLICAS[0]
    tickets = [router.begin(replica, ANY) for _ in range(2)]
    assert router.choose(ANY, 0.0) is None and router.num_routable(INTERACTIVE, 0.0) == 0
    router.end(tickets[0])
    assert router.choose(ANY, 0.0) == replica
    router.begin(replica, ANY)
    router.learn(replica, load(num_running=2), 0.0)
    # It is known to have a queue; that the statement ages does not change this.
    assert router.choose(ANY, 0.0) == router.choose(ANY, 10 * STATEMENT_FRESH_S) == replica


def test_a_conversation_goes_back_to_where_it_was() -> None:
    router = router_of(4)
    homes = set()
    for turn in range(1, 6):
        demand = router.demand(INTERACTIVE, 600 * turn, list(range(turn)))
        replica = router.choose(demand, 0.0)
        assert replica is not None
        homes.add(replica)
        router.end(router.begin(replica, demand))
    assert len(homes) == 1
    home = homes.pop()
    demand = router.demand(INTERACTIVE, 4000, list(range(6)))
    router.replace([each for each in REPLICAS if each != home])
    elsewhere = router.choose(demand, 0.0)
    assert elsewhere is not None
    router.begin(elsewhere, demand)
    router.replace(REPLICAS)
    assert router.choose(demand, 0.0) == elsewhere


def test_what_a_cache_probably_holds_is_no_wait() -> None:
    router = router_of(2)
    demand = router.demand(INTERACTIVE, 5_000, [1, 2])
    home = router.choose(demand, 0.0)
    assert home is not None
    router.end(router.begin(home, demand))
    router.begin(home, router.demand(INTERACTIVE, 5_100, [1, 2, 3]))
    other = next(each for each in router.replicas if each != home)
    router.begin(other, Demand(INTERACTIVE, 200))
    assert router.choose(ANY, 0.0) == home


def test_a_prompt_does_not_go_back_to_a_cache_that_must_have_forgotten_it() -> None:
    router = router_of(2)
    first, second = router.replicas
    for replica in (first, second):
        router.learn(replica, replace(load(), free_kv_tokens=20_000), 0.0)
    talk = Demand(INTERACTIVE, 4_000, prefix=1)
    router.end(router.begin(first, talk))
    busy = router.begin(first, Demand(INTERACTIVE, 6_000))
    assert router.choose(talk, 0.0) == first
    router.end(router.begin(first, Demand(INTERACTIVE, 15_000)))
    assert router.choose(talk, 0.0) == second
    router.end(busy)


def test_only_so_many_conversations_are_remembered() -> None:
    router = router_of(2)
    for name in range(MAX_MEMORIES + 10):
        router.end(router.begin(REPLICAS[0], Demand(INTERACTIVE, 500, prefix=name)))
    assert len(router._memories) == MAX_MEMORIES


def test_a_replica_that_left_the_list_is_forgotten_once_its_last_request_ended() -> None:
    router = router_of(2)
    first, second = router.replicas
    ticket = router.begin(first, ANY)
    assert router.replace([second])
    assert router.choose(ANY, 0.0) == second
    router.end(ticket)
    assert router.num_in_flight(first) == 0
    assert not router.replace([second])
    assert router.replace([])
    assert router.choose(ANY, 0.0) is None


def test_a_name_at_another_address_starts_with_a_clean_account() -> None:
    router = router_of(1)
    old = router.replicas[0]
    router.failed(old, 0.0)
    moved = Replica(old.name, "http://127.0.0.1:9999")
    assert router.replace([moved])
    assert router.choose(ANY, 0.0) == moved
    assert router.num_in_flight(moved) == 0


def test_each_class_goes_to_its_replicas_and_batch_work_also_to_those_that_lend() -> None:
    lender = Replica("interactive-0", "http://127.0.0.1:1")
    own = Replica("batch-0", "http://127.0.0.1:2", BATCH)
    router = Router()
    router.replace([lender, own])
    assert router.choose(ANY, 0.0, excluding=lender) is None
    assert (
        router.choose(ANY_BATCH, 0.0, excluding=own) is None
    )  # whether the other lends is unknown
    assert router.unstated(0.0) == [lender]
    router.begin(lender, ANY)
    router.learn(lender, load(num_running=1, share=0.0), 0.0)
    assert router.unstated(0.0) == []
    assert router.choose(ANY_BATCH, 1.0, excluding=own) is None
    assert (router.num_routable(BATCH, 1.0), router.num_routable(INTERACTIVE, 1.0)) == (1, 1)
    router.learn(lender, load(num_running=1, share=0.5), 2.0)
    router.begin(own, ANY_BATCH)
    router.begin(own, ANY_BATCH)
    assert router.choose(ANY_BATCH, 3.0) == lender
    assert router.choose(ANY_BATCH, 3.0 + STATEMENT_FRESH_S) == own  # the statement has aged
