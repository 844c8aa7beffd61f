"""What an engine takes in: how many may wait, how long, and how much is held meanwhile."""

from __future__ import annotations

import asyncio
import json
import resource
from collections import Counter
from contextlib import ExitStack

import aiohttp
import pytest

from chairlift_engine.server.body_reader import BodyMemory
from chairlift_engine.server.door import Bounds

GATEWAY = {"x-chairlift-internal-token": "internal secret"}
LONG = {"model": "echo", "prompt": "abcdef", "max_tokens": 100, "ignore_eos": True}


def headers(**fields: object) -> str:
    given = {**GATEWAY, **{f"x-chairlift-{k.replace('_', '-')}": v for k, v in fields.items()}}
    return "".join(f"{name}: {value}\r\n" for name, value in given.items())


def answer_of(connection) -> tuple[int, dict[str, str], str]:
    with connection, connection.makefile("r") as received:
        head, _, body = received.read().partition("\n\n")
    status, *lines = head.splitlines()
    return int(status.split()[1]), dict(line.split(": ", 1) for line in lines), body


def refused(engine, reason: str) -> float:
    return engine.metric(f'chairlift_requests_refused_total{{reason="{reason}"}}')


def missed(engine, deadline: str) -> float:
    return engine.metric(f'chairlift_deadlines_missed_total{{deadline="{deadline}"}}')


@pytest.fixture
def full(start_engine, eventually):
    """One request holds the only slot, two wait, and no more may."""
    engine = start_engine(batch_size=1, bounds=Bounds(max_waiting=2))
    engine.runner.hold()
    with ExitStack() as connections:
        for number in range(3):
            connections.enter_context(engine.open_raw("/v1/completions", LONG))
            eventually(lambda number=number: engine.serving.bridge.num_open == number + 1)
            if number == 0:
                engine.runner.allow(1)
                eventually(lambda: engine.server.replica.load.num_running == 1)
        yield engine


def test_a_full_queue_is_503_with_retry_after_and_counted(full, eventually) -> None:
    answer = full.complete("x")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "queue_full"
    assert int(answer.headers["retry-after"]) >= 1
    assert refused(full, "queue_full") == 1
    assert full.client.get("/health/ready").status_code == 200  # full is not unready
    full.runner.release()
    eventually(lambda: full.server.replica.num_in_flight == 0)
    assert full.complete("x").status_code == 200


def test_batch_work_that_waits_shuts_no_interactive_request_out(full, eventually) -> None:
    batch = headers(**{"class": "batch"})
    waiting = []
    for number in range(2):
        waiting.append(full.open_raw("/v1/completions", LONG, batch))
        eventually(lambda number=number: full.serving.bridge.num_open == number + 4)
    status, _, body = answer_of(full.open_raw("/v1/completions", LONG, batch))
    assert (status, json.loads(body)["error"]["code"]) == (503, "queue_full")
    full.runner.release()
    assert [answer_of(connection)[0] for connection in waiting] == [200, 200]


def test_an_order_that_does_not_fit_as_a_whole_is_refused_as_a_whole(full) -> None:
    everything_open = full.serving.bridge.num_open
    full.runner.release()
    answer = full.complete(["a"] * 40)
    assert answer.json()["error"]["code"] == "queue_full"
    assert full.serving.bridge.num_open <= everything_open


def test_one_tenants_flood_leaves_room_in_the_queue_for_others(start_engine, eventually) -> None:
    engine = start_engine(batch_size=1, bounds=Bounds(max_waiting=9))
    engine.runner.hold()
    with ExitStack() as connections:
        for number in range(9):  # one runs, eight ninths wait
            connection = engine.open_raw("/v1/completions", LONG, headers(tenant="greedy"))
            connections.enter_context(connection)
            eventually(lambda number=number: engine.serving.bridge.num_open == number + 1)
            if number == 0:
                engine.runner.allow(1)
                eventually(lambda: engine.server.replica.load.num_running == 1)
        flood = engine.open_raw("/v1/completions", LONG, headers(tenant="greedy"))
        status, _, body = answer_of(flood)
        assert (status, json.loads(body)["error"]["code"]) == (429, "tenant_queue_full")
        modest = engine.open_raw("/v1/completions", LONG, headers(tenant="modest"))
        eventually(lambda: engine.serving.bridge.num_open == 10)
        engine.runner.release()
        assert answer_of(modest)[0] == 200


def test_a_tenant_at_its_cap_is_429_with_retry_after_and_others_are_not(
    start_engine, eventually
) -> None:
    engine = start_engine(batch_size=2)
    policy = engine.admin.get("/admin/policy").json()["desired"]
    policy |= {"generation": [1, 0], "tenants": {"greedy": {"slots": 1, "waiting": 1}}}
    assert engine.admin.patch("/admin/policy", content=json.dumps(policy)).status_code == 200
    engine.runner.hold()
    greedy = []
    for number in range(2):  # one runs, one waits
        greedy.append(engine.open_raw("/v1/completions", LONG, headers(tenant="greedy")))
        eventually(lambda number=number: engine.serving.bridge.num_open == number + 1)
        engine.runner.allow(1)
    eventually(lambda: engine.server.replica.load.num_running == 1)
    status, fields, body = answer_of(
        engine.open_raw("/v1/completions", LONG, headers(tenant="greedy"))
    )
    assert (status, json.loads(body)["error"]["code"]) == (429, "tenant_queue_full")
    assert json.loads(body)["error"]["type"] == "rate_limit_error"
    assert int(fields["retry-after"]) >= 1
    assert refused(engine, "tenant_queue_full") == 1
    engine.runner.release()
    modest = engine.open_raw("/v1/completions", LONG, headers(tenant="modest"))
    assert [answer_of(connection)[0] for connection in (modest, *greedy)] == [200, 200, 200]


def test_without_a_queue_free_slots_are_still_used(start_engine) -> None:
    engine = start_engine(bounds=Bounds(max_waiting=0))
    assert engine.complete(["a"] * 4).status_code == 200
    assert engine.complete(["a"] * 5).status_code == 503


def test_a_request_not_started_in_its_time_gets_503_and_never_starts_prefill(
    start_engine, eventually
) -> None:
    engine = start_engine(batch_size=1, bounds=Bounds(queue_timeout_s=0.3))
    engine.runner.hold()
    running = engine.open_raw("/v1/completions", LONG)
    assert engine.runner.in_step.wait(5)
    waiting = engine.open_raw("/v1/completions", {**LONG, "prompt": [97] * 33, "stream": True})
    batch = engine.open_raw("/v1/completions", LONG, headers(**{"class": "batch"}))
    eventually(lambda: engine.serving.bridge.num_open == 3)
    # Two that were handed over, and what their and the running one's timers had to say.
    eventually(lambda: engine.serving.engine._commands.qsize() == 4)
    engine.runner.allow(1)
    status, fields, body = answer_of(waiting)
    assert (status, json.loads(body)["error"]["code"]) == (503, "queue_timeout")
    assert int(fields["retry-after"]) >= 1
    assert refused(engine, "queue_timeout") == missed(engine, "queue") == 1
    engine.runner.release()
    assert answer_of(running)[0] == 200
    assert answer_of(batch)[0] == 200  # batch work waits as long as it takes
    assert 33 not in engine.runner.computed
    assert engine.free_list() == frozenset(range(1, 65))


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_not_finished_in_the_time_its_client_has_left_ends_with_an_error(
    start_engine, eventually, stream
) -> None:
    engine = start_engine()
    engine.runner.hold()
    connection = engine.open_raw(
        "/v1/completions", {**LONG, "stream": stream}, headers(left_ms=800)
    )
    engine.runner.allow(2)
    eventually(lambda: engine.metric("chairlift_steps_total") == 2)
    eventually(lambda: engine.serving.engine._commands.qsize() > 0)  # its time is over
    engine.runner.allow(1)
    status, _, body = answer_of(connection)
    assert '"code":"deadline_exceeded"' in body and "[DONE]" not in body
    assert status == (200 if stream else 504)
    assert missed(engine, "total") == 1
    engine.runner.release()
    assert engine.free_list() == frozenset(range(1, 65))


def test_a_request_whose_time_is_over_when_it_comes_is_not_taken(engine) -> None:
    answer = engine.complete("x", headers={**GATEWAY, "x-chairlift-left-ms": "0"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_timeout")
    assert refused(engine, "queue_timeout") == missed(engine, "queue") == 1
    assert engine.metric("chairlift_steps_total") == 0


def test_time_that_suffices_changes_nothing(engine) -> None:
    answer = engine.complete("abc", headers={**GATEWAY, "x-chairlift-left-ms": "9000"})
    assert answer.json()["choices"][0]["text"] == "abc"
    assert missed(engine, "total") == missed(engine, "queue") == 0
    nonsense = engine.complete("abc", headers={**GATEWAY, "x-chairlift-left-ms": "soon"})
    assert nonsense.status_code == 400 and "left-ms" in nonsense.json()["error"]["message"]


def test_bodies_over_what_may_be_held_at_once_are_refused_and_given_back(engine) -> None:
    engine.server.replica.bodies = BodyMemory(max_bytes=1000)
    answer = engine.complete("x" * 1000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "busy")
    assert answer.headers["retry-after"] == "1"
    assert engine.complete("x" * 100).status_code == 200
    assert engine.complete("", max_tokens=1).status_code == 400
    assert engine.server.replica.bodies.held_bytes == 0
    assert refused(engine, "busy") == refused(engine, "invalid") == 1


def test_a_body_is_not_held_while_its_answer_is_generated(engine, eventually) -> None:
    engine.runner.hold()
    with engine.open_raw("/v1/completions", LONG):
        assert engine.runner.in_step.wait(5)
        assert engine.server.replica.bodies.held_bytes == 0
        engine.runner.release()
        eventually(lambda: engine.server.replica.num_in_flight == 0)


def test_five_hundred_connections_at_once_all_end_with_an_answer(start_engine, eventually) -> None:
    engine = start_engine(bounds=Bounds(max_waiting=50))
    most_waiting = 0

    async def ask(session: aiohttp.ClientSession, number: int) -> int:
        nonlocal most_waiting
        body = {"model": "echo", "prompt": f"abc{number}", "stream": number % 2 == 0}
        async with session.post(f"{engine.url}/v1/completions", json=body) as response:
            text = await response.text()
            load = json.loads(response.headers["x-chairlift-load"])
            most_waiting = max(most_waiting, load["num_waiting"])
            if response.status == 200:
                assert "[DONE]" in text if body["stream"] else json.loads(text)["choices"]
            else:
                assert int(response.headers["retry-after"]) >= 1
            return response.status

    async def storm() -> Counter[int]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            return Counter(await asyncio.gather(*(ask(session, number) for number in range(500))))

    num_files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files < 2048:  # both ends of every connection are in this process
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, most_files))
    statuses = asyncio.run(storm())
    assert set(statuses) <= {200, 503} and statuses[200] >= 50
    assert most_waiting <= 50 + 4  # and what the slots take
    assert refused(engine, "queue_full") == statuses[503]
    eventually(lambda: engine.server.replica.num_in_flight == 0)
    assert engine.free_list() == frozenset(range(1, 65))
