from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from chairlift_gateway import engine_pool, relay
from chairlift_protocol.load import Load
from chairlift_protocol.wire import LOAD_HEADER, WAITED_MS_HEADER

pytestmark = pytest.mark.anyio

HELD = "chairlift_gateway_requests_held"


def stating(num_running: int = 0, draining: bool = False) -> dict[str, str]:
    return {LOAD_HEADER: Load(num_running, 0, 0, 0, 0.0, (0, 0), draining).to_header()}


async def test_a_request_with_no_replica_is_held_until_one_appears(
    start_engine: Any, start_gateway: Any, write_endpoints: Any
) -> None:
    gateway = await start_gateway()
    engine = await start_engine()
    asking = asyncio.create_task(gateway.client.post(gateway.url + "/v1/completions", data=b"{}"))
    await gateway.until_sample(1, HELD, "interactive")
    began_s = time.monotonic()
    await asyncio.sleep(0.05)
    write_endpoints(engine)
    async with await asking as answer:
        assert answer.status == 200
    assert int(engine.requests[0].headers[WAITED_MS_HEADER]) >= 50
    assert time.monotonic() - began_s < 1.5
    assert (await gateway.samples())[HELD, "interactive"] == 0


async def test_a_hold_is_bounded_in_time_and_number(start_gateway: Any) -> None:
    gateway = await start_gateway(hold_s=0.4, hold_max=1)
    asking = asyncio.create_task(gateway.client.post(gateway.url + "/v1/completions", data=b"{}"))
    await gateway.until_sample(1, HELD, "interactive")
    async with gateway.post() as refused:
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) > 0
        assert "as many requests wait as may" in (await refused.json())["error"]["message"]
    async with await asking as expired:
        assert expired.status == 503
        assert int(expired.headers["retry-after"]) > 0
        assert "became ready within 0.4 s" in (await expired.json())["error"]["message"]
    samples = await gateway.samples()
    assert samples[HELD, "interactive"] == 0
    assert samples["chairlift_requests_received_total", "interactive"] == 2
    assert samples["chairlift_gateway_responses_total", "interactive", "503"] == 2


async def test_batch_requests_wait_longer_and_take_no_interactive_place(
    start_gateway: Any, start_engine: Any, write_endpoints: Any
) -> None:
    gateway = await start_gateway(hold_s=0.2, batch_hold_s=30.0, hold_max=1)
    url = gateway.url + "/batch/v1/completions"
    asking = asyncio.create_task(gateway.client.post(url, data=b"{}"))
    await gateway.until_sample(1, HELD, "batch")
    async with gateway.post() as expired:
        assert expired.status == 503
        assert "became ready within 0.2 s" in (await expired.json())["error"]["message"]
    engine = await start_engine()
    engine.lend_share = 1.0
    write_endpoints(engine)
    async with await asking as answer:
        assert answer.status == 200


async def test_a_held_client_that_leaves_frees_its_place(start_gateway: Any) -> None:
    gateway = await start_gateway(hold_max=1)
    asking = asyncio.create_task(gateway.client.post(gateway.url + "/v1/completions", data=b"{}"))
    await gateway.until_sample(1, HELD, "interactive")
    asking.cancel()
    await gateway.until_sample(0, HELD, "interactive")


async def test_a_replica_that_cannot_be_reached_is_passed_over(
    start_engine: Any, start_gateway: Any, unused_url: str
) -> None:
    engine = await start_engine(name="r1")
    gateway = await start_gateway(SimpleNamespace(name="r0", url=unused_url), engine)
    for _ in range(3):
        async with gateway.post() as answer:
            assert answer.status == 200
    assert len(engine.requests) == 3
    # It is avoided after its first failure, not tried first by every request.
    samples = await gateway.samples()
    assert samples["chairlift_gateway_upstream_failures_total", "before_answer"] == 1
    assert samples["chairlift_gateway_responses_total", "interactive", "200"] == 3


async def test_a_connection_cut_before_the_first_byte_is_tried_elsewhere_with_the_same_body(
    start_engine: Any, start_gateway: Any
) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    bad, good = await start_engine(cut), await start_engine(name="r1")
    gateway = await start_gateway(bad, good)
    async with gateway.post(data=b'{"prompt": "a"}') as answer:
        assert answer.status == 200
    assert bad.bodies == good.bodies == [b'{"prompt": "a"}']


async def test_two_failures_end_in_503_and_there_is_no_third_try(
    start_engine: Any, start_gateway: Any
) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    engines = [await start_engine(cut, name=f"r{i}") for i in range(3)]
    gateway = await start_gateway(*engines)
    async with gateway.post() as answer:
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        assert (await answer.json())["error"]["code"] == "upstream_unreachable"
    assert sum(len(engine.requests) for engine in engines) == 2


async def test_a_lone_replica_that_died_is_waited_for_by_its_successor(
    start_engine: Any, start_gateway: Any, write_endpoints: Any, unused_url: str
) -> None:
    gateway = await start_gateway(SimpleNamespace(name="r0", url=unused_url))
    async with asyncio.TaskGroup() as tasks:
        asking = [
            tasks.create_task(gateway.client.post(gateway.url + "/v1/completions", data=b"{}"))
            for _ in range(5)
        ]
        # That others fail as well is no reason to try the dead one again.
        await gateway.until_sample(5, HELD, "interactive")
        engine = await start_engine()
        write_endpoints(engine)
    assert [task.result().status for task in asking] == [200] * 5
    assert len(engine.requests) == 5


async def test_a_draining_replicas_503_goes_elsewhere_and_nothing_more_goes_there(
    start_engine: Any, start_gateway: Any
) -> None:
    async def draining(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503, headers=stating(draining=True))

    leaving, staying = await start_engine(draining), await start_engine(name="r1")
    gateway = await start_gateway(leaving, staying)
    for _ in range(4):
        async with gateway.post() as answer:
            assert answer.status == 200
    assert (len(leaving.requests), len(staying.requests)) == (1, 4)


async def test_a_lone_busy_replicas_503_is_the_answer(
    start_engine: Any, start_gateway: Any
) -> None:
    async def full(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503, body=b"full", headers={"retry-after": "3", **stating(9)})

    engine = await start_engine(full)
    gateway = await start_gateway(engine)
    async with gateway.post() as answer:
        assert (answer.status, await answer.read()) == (503, b"full")
        assert answer.headers["retry-after"] == "3"
        assert LOAD_HEADER not in answer.headers
    assert len(engine.requests) == 1


async def test_requests_go_where_least_is_stated_and_what_cannot_be_read_is_not_idle(
    start_engine: Any, start_gateway: Any
) -> None:
    async def crowded(request: web.Request) -> web.StreamResponse:
        return web.Response(headers=stating(num_running=50))

    async def idle(request: web.Request) -> web.StreamResponse:
        return web.Response(headers=stating())

    async def mumbling(request: web.Request) -> web.StreamResponse:
        return web.Response(headers={LOAD_HEADER: '{"num_running": 1e999}'})

    engines = [await start_engine(crowded, "r0"), await start_engine(idle, "r1")]
    engines.append(await start_engine(mumbling, "r2"))
    gateway = await start_gateway(*engines)
    for _ in range(9):
        async with gateway.post() as answer:
            assert answer.status == 200
    assert [len(engine.requests) for engine in engines] == [1, 8, 0]


async def test_scaling_up_and_down_under_traffic_never_shows_an_error(
    start_engine: Any, start_gateway: Any, write_endpoints: Any
) -> None:
    """Replicas that leave the list still finish; ones that are gone are never asked again."""

    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.02)
        return web.Response(headers=stating())

    engines = [await start_engine(slow, f"r{i}") for i in range(3)]
    gateway = await start_gateway(engines[0])
    statuses: Counter[int] = Counter()
    stop = asyncio.Event()

    async def traffic() -> None:
        while not stop.is_set():
            async with gateway.post() as answer:
                statuses[answer.status] += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(traffic())
        for listed in (engines, engines[2:], engines[1:2]):
            write_endpoints(*listed)
            before = [len(engine.requests) for engine in engines]
            async with asyncio.timeout(3):
                while any(
                    len(engine.requests) < before[engines.index(engine)] + 3 for engine in listed
                ):
                    await asyncio.sleep(0.01)
        stop.set()
    assert set(statuses) == {200}


def test_an_idle_connection_is_given_up_before_an_engine_closes_it() -> None:
    import uvicorn

    engine_default_s = uvicorn.Config("unused:app").timeout_keep_alive
    assert engine_pool.KEEPALIVE_S < engine_default_s


async def test_a_replica_that_accepts_but_hangs_up_is_not_confused_with_a_client_that_leaves(
    start_engine: Any, start_gateway: Any
) -> None:
    """A listener that closes every connection at once, as a proxy before a dead pod does."""

    def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    listener = socket.create_server(("127.0.0.1", 0))
    async with await asyncio.start_server(close, sock=listener):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        gateway = await start_gateway(
            SimpleNamespace(name="r0", url=url), await start_engine(name="r1")
        )
        async with gateway.post() as answer:
            assert answer.status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/detokenize"])
async def test_an_answer_larger_than_the_gateway_holds_is_no_failure_of_its_replica(
    start_engine: Any, start_gateway: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def large(request: web.Request) -> web.StreamResponse:
        return web.json_response({"prompt": "x" * 2000})

    monkeypatch.setattr(relay, "LONGEST_WHOLE_ANSWER_BYTES", 1000)
    engines = [await start_engine(large, name=name) for name in ("r0", "r1")]
    gateway = await start_gateway(*engines)
    async with gateway.post(path) as answer:
        assert answer.status == 502
        error = (await answer.json())["error"]
        assert error["code"] == "upstream_answer_too_large"
        assert "1000 bytes" in error["message"]
    assert sum(len(engine.requests) for engine in engines) == 1
    samples = await gateway.samples()
    assert samples["chairlift_gateway_replicas_left_out", "interactive"] == 0
    assert samples["chairlift_gateway_upstream_failures_total", "in_answer"] == 0


async def test_a_replica_that_keeps_failing_is_out_until_a_probe_finds_it_answering(
    start_engine: Any, start_gateway: Any, until: Any
) -> None:
    async def crash(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500, headers=stating())

    async def fine(request: web.Request) -> web.StreamResponse:
        return web.Response(headers=stating())

    failing, good = await start_engine(crash), await start_engine(fine, name="r1")
    gateway = await start_gateway(failing, good)
    router = gateway.gateway.router
    replica = router.replicas[0]
    for ago_s in (1000, 500):
        router.failed(replica, time.monotonic() - ago_s)
    async with gateway.post() as answer:
        assert answer.status == 500  # the third in a row
    # Long enough for a slow machine to ask five times before a probe is due.
    for later_s in (10, 30):
        router.failed(replica, time.monotonic() + later_s)
    for _ in range(5):
        async with gateway.post() as answer:
            assert answer.status == 200
    assert len(failing.requests) == 1
    assert (await gateway.samples())["chairlift_gateway_replicas_left_out", "interactive"] == 1
    router.succeeded(replica)
    router.failed(replica, time.monotonic() - 1000)
    router.failed(replica, time.monotonic() - 500)
    router.failed(replica, time.monotonic() - 100)
    failing.handler = fine
    # Nobody's request finds out, but a probe of its load.
    await until(lambda: not router.due_for_probe(time.monotonic()))
    assert len(failing.requests) == 1
    for _ in range(4):
        async with gateway.post() as answer:
            assert answer.status == 200
    assert len(failing.requests) > 1


async def test_a_replica_that_breaks_off_its_answers_is_avoided_as_one_that_gives_none(
    start_engine: Any, start_gateway: Any, sse: Any, token: Any
) -> None:
    async def break_off(request: web.Request) -> web.StreamResponse:
        response = await sse(request)
        await response.write(token("a"))
        assert request.transport is not None
        request.transport.abort()
        return response

    bad, good = await start_engine(break_off), await start_engine(name="r1")
    gateway = await start_gateway(bad, good)
    async with gateway.post() as answer:
        assert b"upstream_failed" in await answer.read()
    for _ in range(3):
        async with gateway.post() as answer:
            assert answer.status == 200
    assert (len(bad.requests), len(good.requests)) == (1, 3)


async def test_one_that_states_no_load_gets_only_so_much_at_once_and_the_rest_is_held(
    start_engine: Any, start_gateway: Any, until: Any
) -> None:
    let_go = asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        await let_go.wait()
        return web.Response()

    engine = await start_engine(wait)
    gateway = await start_gateway(engine, replica_concurrency=2)
    async with asyncio.TaskGroup() as tasks:
        asking = [
            tasks.create_task(gateway.client.post(gateway.url + "/v1/completions", data=b"{}"))
            for _ in range(5)
        ]
        await gateway.until_sample(3, HELD, "interactive")
        await until(lambda: len(engine.requests) == 2)
        let_go.set()
    assert [task.result().status for task in asking] == [200] * 5


async def test_requests_of_one_conversation_go_to_one_replica(
    start_engine: Any, start_gateway: Any
) -> None:
    engines = [await start_engine(name=f"r{i}") for i in range(3)]
    gateway = await start_gateway(*engines)
    history = "I have a question. " * 200
    for _ in range(6):
        async with gateway.post(json={"messages": [{"content": history}]}, data=None) as answer:
            assert answer.status == 200
        history += "And another one. " * 50
    assert sorted(len(engine.requests) for engine in engines) == [0, 0, 6]
