"""How connections to engines are opened, kept and let go."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from chairlift_gateway import engine_pool
from chairlift_gateway.engine_http import AnswerHead, EngineConnection, EngineFailed
from chairlift_gateway.engine_pool import EnginePool, EngineRequest, WholeAnswer

pytestmark = pytest.mark.anyio

GET = EngineRequest("GET", "/v1/models?a=%20b")
HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"


async def fetched(pool: EnginePool, url: str, request: EngineRequest = GET) -> WholeAnswer:
    return await pool.fetch(url, request, within_s=5, max_bytes=2**20)


async def say_hello(side: Any) -> None:
    while await side.request():
        await side.say(HELLO)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("prefix", ["", "/pool/a", "/pool/a/"])
async def test_a_request_names_its_host_and_path_below_the_engines_url(
    start_scripted: Any, pool: EnginePool, host: str, prefix: str
) -> None:
    asked = []

    async def script(side: Any) -> None:
        while True:
            asked.append(await side.request())
            await side.say(HELLO)

    engine = await start_scripted(script, host=host)
    assert (await fetched(pool, engine.url + prefix)).body == b"hello"
    post = EngineRequest("POST", "/x", [(b"x-a", b"1"), (b"x-a", b"\xff")])
    assert (await fetched(pool, engine.url + prefix, post)).body == b"hello"
    authority = engine.url.removeprefix("http://").encode()
    path = prefix.rstrip("/").encode()
    assert asked == [
        b"GET %b/v1/models?a=%%20b HTTP/1.1\r\nhost: %b\r\n\r\n" % (path, authority),
        b"POST %b/x HTTP/1.1\r\nhost: %b\r\nx-a: 1\r\nx-a: \xff\r\ncontent-length: 0\r\n\r\n"
        % (path, authority),
    ]


@pytest.mark.parametrize(
    "host",
    ["no-such-name.invalid", "a..b", "a" * 64 + ".invalid", "xn--\N{SNOWMAN}.invalid", "[::ffff]"],
)
async def test_an_engine_whose_name_leads_nowhere_has_failed(pool: EnginePool, host: str) -> None:
    with pytest.raises(EngineFailed):
        await pool.fetch(f"http://{host}:9", GET, within_s=10, max_bytes=10)


async def test_an_engine_that_takes_no_connection_is_not_waited_for(
    pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_pool, "CONNECT_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as full:
        waiting = []
        try:
            with pytest.raises(TimeoutError):
                for _ in range(10):
                    waiting.append(socket.create_connection(full.getsockname(), timeout=0.2))
            url = f"http://127.0.0.1:{full.getsockname()[1]}"
            with pytest.raises(EngineFailed, match=r"no connection within 0\.1 s"):
                await fetched(pool, url)
        finally:
            for each in waiting:
                each.close()


async def test_a_header_of_two_lines_reaches_no_engine_and_takes_no_connection(
    start_scripted: Any, pool: EnginePool
) -> None:
    engine = await start_scripted(say_hello)
    for header in ((b"x", b"a\r\nb: c"), (b"x", b"a\0"), (b"x\n", b"a")):
        with pytest.raises(ValueError, match="one line of text"):
            await fetched(pool, engine.url, EngineRequest("GET", "/", [header]))
    assert not engine.connections
    assert (await fetched(pool, engine.url)).body == b"hello"


async def test_a_connection_is_for_one_request_at_a_time_and_for_one_engine(
    start_scripted: Any, pool: EnginePool
) -> None:
    engines = [await start_scripted(say_hello) for _ in range(2)]
    for _ in range(2):
        await asyncio.gather(*(fetched(pool, each.url) for each in engines * 3))
    assert [len(each.connections) for each in engines] == [3, 3]


async def test_a_connection_that_was_closed_while_idle_is_not_used(
    start_scripted: Any, pool: EnginePool
) -> None:
    hung_up = asyncio.Event()

    async def close_the_first(side: Any) -> None:
        await side.request()
        await side.say(HELLO)
        if not engine.connections[1:]:
            side.say_no_more()
        await side.hung_up()
        hung_up.set()

    engine = await start_scripted(close_the_first)
    assert (await fetched(pool, engine.url)).body == b"hello"
    await asyncio.wait_for(hung_up.wait(), 2)
    assert (await fetched(pool, engine.url)).body == b"hello"
    assert len(engine.connections) == 2


async def test_a_connection_whose_end_has_come_in_this_very_pass_is_not_used(
    start_scripted: Any, pool: EnginePool
) -> None:
    used: list[EngineConnection] = []

    def begin(head: AnswerHead, connection: EngineConnection) -> Callable[..., None]:
        used.append(connection)
        return lambda data, is_end: None

    engine = await start_scripted(say_hello)
    await pool.ask(engine.url, GET, begin)
    used[0].eof_received()
    assert (await fetched(pool, engine.url)).body == b"hello"
    assert len(engine.connections) == 2


async def test_a_connection_is_closed_once_it_was_idle_and_never_while_it_is_asked(
    start_scripted: Any, pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_pool, "KEEPALIVE_S", 0.2)
    one_is_closed = asyncio.Event()
    hung_up_s = []

    async def script(side: Any) -> None:
        is_slow = await side.request() != quick
        if is_slow:
            await one_is_closed.wait()
        await side.say(HELLO)
        await side.hung_up()
        hung_up_s.append(time.monotonic())
        one_is_closed.set()

    engine = await start_scripted(script)
    quick = b"GET / HTTP/1.1\r\nhost: %b\r\n\r\n" % engine.url.removeprefix("http://").encode()
    asking = asyncio.create_task(fetched(pool, engine.url))
    await fetched(pool, engine.url, EngineRequest("GET", "/"))
    idle_from_s = [time.monotonic()]
    assert (await asking).body == b"hello"
    idle_from_s.append(time.monotonic())
    one_is_closed.clear()
    await asyncio.wait_for(one_is_closed.wait(), 2)
    for since_s, until_s in zip(idle_from_s, hung_up_s, strict=True):
        assert 0.1 < until_s - since_s < 1.5


async def test_of_several_idle_connections_one_that_is_used_stays(
    start_scripted: Any, pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_pool, "KEEPALIVE_S", 0.3)
    num_closed = 0

    async def script(side: Any) -> None:
        nonlocal num_closed
        try:
            await say_hello(side)
        finally:
            num_closed += 1

    engine = await start_scripted(script)
    await asyncio.gather(*(fetched(pool, engine.url) for _ in range(3)))
    async with asyncio.timeout(5):
        while num_closed < 2:
            await fetched(pool, engine.url)
    for _ in range(10):
        await fetched(pool, engine.url)
    assert (len(engine.connections), num_closed) == (3, 2)


@pytest.mark.parametrize("said", [b"", HELLO[:9], HELLO[:-1], CHUNKED[:-2]])
async def test_a_cancelled_request_closes_its_connection(
    start_scripted: Any, pool: EnginePool, said: bytes
) -> None:
    is_waiting, hung_up = asyncio.Event(), asyncio.Event()

    async def script(side: Any) -> None:
        await side.request()
        if engine.connections[1:]:
            await side.say(HELLO)
            return
        await side.say(said[:40], said[40:])
        is_waiting.set()
        await side.hung_up()
        hung_up.set()

    engine = await start_scripted(script)
    asking = asyncio.create_task(fetched(pool, engine.url))
    await is_waiting.wait()
    asking.cancel()
    await asyncio.wait_for(hung_up.wait(), 2)
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await fetched(pool, engine.url)).body == b"hello"
    assert len(engine.connections) == 2


async def test_an_answer_that_is_not_wanted_ends_with_its_connection(
    start_scripted: Any, pool: EnginePool
) -> None:
    hung_up = asyncio.Event()

    async def script(side: Any) -> None:
        await side.request()
        await side.say(HELLO[:-1])
        await side.hung_up()
        hung_up.set()

    engine = await start_scripted(script)
    await asyncio.wait_for(pool.ask(engine.url, GET, lambda head, connection: None), 2)
    await asyncio.wait_for(hung_up.wait(), 2)


@pytest.mark.parametrize("said", [HELLO, CHUNKED])
async def test_what_is_fetched_is_bounded_in_size(
    start_scripted: Any, pool: EnginePool, said: bytes
) -> None:
    async def script(side: Any) -> None:
        while await side.request():
            await side.say(said[:-10], said[-10:])

    engine = await start_scripted(script)
    whole = await pool.fetch(engine.url, GET, within_s=5, max_bytes=5)
    assert whole.body == b"hello"
    with pytest.raises(EngineFailed, match="longer than 4 bytes"):
        await pool.fetch(engine.url, GET, within_s=5, max_bytes=4)
    assert (await fetched(pool, engine.url)).body == b"hello"
    assert len(engine.connections) == 2


@pytest.mark.parametrize("part", [b"", b"x"], ids=["silent", "slow"])
async def test_what_is_fetched_is_bounded_in_time(
    start_scripted: Any, pool: EnginePool, part: bytes
) -> None:
    hung_up = asyncio.Event()

    async def script(side: Any) -> None:
        try:
            await side.request()
            await side.say(b"HTTP/1.1 200 OK\r\n\r\n")
            while part:
                await side.say(part)
                await asyncio.sleep(0.01)
            await side.hung_up()
        finally:
            hung_up.set()

    engine = await start_scripted(script)
    began_s = time.monotonic()
    with pytest.raises(EngineFailed, match=r"not answer within 0\.1 s"):
        await pool.fetch(engine.url, GET, within_s=0.1, max_bytes=2**20)
    assert 0.09 < time.monotonic() - began_s < 2
    await asyncio.wait_for(hung_up.wait(), 2)


async def test_a_pool_that_is_closed_keeps_no_connection(start_scripted: Any) -> None:
    num_closed = 0
    may_answer = asyncio.Event()

    async def script(side: Any) -> None:
        nonlocal num_closed
        if (await side.request()).startswith(b"POST"):
            await may_answer.wait()
        await side.say(HELLO)
        await side.hung_up()
        num_closed += 1
        closed.set()

    pool, closed = EnginePool(), asyncio.Event()
    engine = await start_scripted(script)
    asking = asyncio.create_task(fetched(pool, engine.url, EngineRequest("POST", "/")))
    await fetched(pool, engine.url)
    pool.close()
    await asyncio.wait_for(closed.wait(), 2)
    assert num_closed == 1
    closed.clear()
    may_answer.set()
    assert (await asking).body == b"hello"
    await asyncio.wait_for(closed.wait(), 2)
    assert num_closed == 2
