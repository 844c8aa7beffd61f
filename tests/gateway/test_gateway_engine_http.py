"""What an engine may say on a connection, byte by byte, and what it may not."""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from chairlift_gateway.engine_http import (
    MAX_HEAD_BYTES,
    AnswerHead,
    EngineConnection,
    EngineFailed,
)
from chairlift_gateway.engine_pool import EnginePool, EngineRequest, WholeAnswer

pytestmark = pytest.mark.anyio

GET = EngineRequest("GET", "/v1/models")


async def fetched(pool: EnginePool, engine: Any, request: EngineRequest = GET) -> WholeAnswer:
    return await pool.fetch(engine.url, request, within_s=5, max_bytes=2**20)


def bytewise(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


OK = b"HTTP/1.1 200 OK\r\n"
OLD = b"HTTP/1.0 200 OK\r\n"
HELLO = OK + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = OK + (
    b'Transfer-Encoding: chunked\r\n\r\n3;a=b;c="d"\r\nhel\r\n'
    b"002\r\nlo\r\n0;e\r\nX-Late: 1\r\nStatus: 500\r\n\r\n"
)
UNTIL_CLOSED = OK + b"X-A: 1\r\n\r\nhello"
EARLY_HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

# What is said, what that is, and whether the connection outlives it.
FRAMINGS = {
    "a length": (HELLO, 200, b"hello", True),
    "a length of nothing": (OK + b"content-length:0\r\n\r\n", 200, b"", True),
    "chunks": (CHUNKED, 200, b"hello", True),
    "no chunk": (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 200, b"", True),
    "until it is closed": (UNTIL_CLOSED, 200, b"hello", False),
    "nothing until it is closed": (OK + b"\r\n", 200, b"", False),
    "a length and a close": (OK + b"Connection: close\r\n" + HELLO[17:], 200, b"hello", False),
    "chunks and a close": (OK + b"Connection: close\r\n" + CHUNKED[17:], 200, b"hello", False),
    "1.0": (OLD + b"\r\nhello", 200, b"hello", False),
    "1.0 with a length": (OLD + b"Content-Length: 5\r\n\r\nhello", 200, b"hello", False),
    "1.0 that is kept": (OLD + b"Connection: keep-alive\r\n" + HELLO[17:], 200, b"hello", True),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
    "304 with a length": (b"HTTP/1.1 304\r\nContent-Length: 5\r\n\r\n", 304, b"", True),
    "100 first": (CONTINUE + HELLO, 200, b"hello", True),
    "103 and 100 first": (EARLY_HINTS + CONTINUE + CHUNKED, 200, b"hello", True),
    "103 until it is closed": (EARLY_HINTS + UNTIL_CLOSED, 200, b"hello", False),
    "no reason": (b"HTTP/1.1 299\r\nContent-Length: 2\r\n\r\nab", 299, b"ab", True),
}


@pytest.mark.parametrize("is_split", [False, True], ids=["at once", "split at every byte"])
@pytest.mark.parametrize(
    ("said", "status", "body", "is_kept"), FRAMINGS.values(), ids=FRAMINGS.keys()
)
async def test_an_answer_is_read_in_each_framing_and_its_connection_kept_where_it_may_be(
    start_scripted: Any, pool: EnginePool, said: bytes, status: int, body: bytes, is_kept: bool,
    is_split: bool,
) -> None:  # fmt: skip
    async def script(side: Any) -> None:
        while True:
            await side.request()
            await side.say(*(bytewise(said) if is_split else [said]))
            if not is_kept:
                return

    engine = await start_scripted(script)
    for _ in range(3):
        answer = await fetched(pool, engine)
        assert (answer.head.status, answer.body) == (status, body)
        names = [name for name, _ in answer.head.headers]
        assert len(names) == len(set(names)) and {b"link", b"x-late"}.isdisjoint(names)
    assert len(engine.connections) == (1 if is_kept else 3)


async def test_a_kept_connection_carries_nothing_over(
    start_scripted: Any, pool: EnginePool
) -> None:
    said = [
        OK + b"X-First: 1\r\nContent-Type: text/event-stream\r\nContent-Length: 5\r\n\r\nfirst",
        b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n3\r\ntwo\r\n0\r\n\r\n",
        OK + b"Content-Length: 0\r\n\r\n",
    ]
    asked = []

    async def script(side: Any) -> None:
        for each in said:
            asked.append(await side.request())
            await side.say(*bytewise(each))

    engine = await start_scripted(script)
    long = EngineRequest("POST", "/a", [(b"x-own", b"1")], b"x" * 300_000)
    first, second, third = [await fetched(pool, engine, each) for each in (long, GET, GET)]
    assert (first.head.status, first.body, first.head.is_event_stream) == (200, b"first", True)
    assert second.head == AnswerHead(404, [(b"transfer-encoding", b"chunked")])
    assert (second.body, second.head.is_event_stream) == (b"two", False)
    assert third == WholeAnswer(AnswerHead(200, [(b"content-length", b"0")]), b"")
    assert asked[0].endswith(b"\r\n\r\n" + long.body)
    host = urlsplit(engine.url).netloc.encode()
    assert asked[1] == asked[2] == b"GET /v1/models HTTP/1.1\r\nhost: %b\r\n\r\n" % host


BROKEN = {
    "garbage": b"\x00\xff not http \r\n\r\n",
    "a request": b"GET / HTTP/1.1\r\n\r\n",
    "a switch of protocols": b"HTTP/1.1 101 S\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nabc",
    "a bare 101": b"HTTP/1.1 101 S\r\n\r\nabc",
    "two status lines": OK + HELLO,
    "two lengths": OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "a length and chunks": OK + b"Content-Length: 5\r\n" + CHUNKED[17:],
    "a negative length": OK + b"Content-Length: -5\r\n\r\nhello",
    "no number for a length": OK + b"Content-Length: five\r\n\r\nhello",
    "a status that is no number": b"HTTP/1.1 2x0 OK\r\n\r\n",
    "a chunk without a size": OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello",
    "a chunk that is longer": OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n0\r\n\r\n",
    "a NUL in a header": OK + b"X: a\0b\r\n" + HELLO[17:],
    "a header in two lines": OK + b"X: a\r\n b\r\n" + HELLO[17:],
    "a header without an end": OK + b"X: " + b"a" * 2 * MAX_HEAD_BYTES,
    "headers without an end": OK + b"X: a\r\n" * (MAX_HEAD_BYTES // 4),
    "interim answers without an end": EARLY_HINTS * (MAX_HEAD_BYTES // 20),
    "more than was asked": HELLO + HELLO,
    "bytes behind the last answer": OK + b"Connection: close\r\n" + HELLO[17:] + b"junk",
}


@pytest.mark.parametrize("is_split", [False, True], ids=["at once", "in pieces"])
@pytest.mark.parametrize("said", BROKEN.values(), ids=BROKEN.keys())
async def test_an_answer_that_is_none_fails_its_request_and_ends_its_connection(
    start_scripted: Any, pool: EnginePool, said: bytes, is_split: bool
) -> None:
    hung_up = asyncio.Event()

    async def script(side: Any) -> None:
        await side.request()
        if engine.connections[1:]:
            await side.say(HELLO)
            return
        size = 1 + len(said) // 200 if is_split else len(said)
        try:
            await side.say(*(said[i : i + size] for i in range(0, len(said), size)))
        finally:
            await side.hung_up()
            hung_up.set()

    engine = await start_scripted(script)
    try:
        answer = await fetched(pool, engine)
    except EngineFailed as error:
        assert "no HTTP/1.1" in str(error) or "head is too long" in str(error)
    else:
        # Complete before there was more.
        assert is_split and answer.body == b"hello" and said.startswith((HELLO, OK + b"Conn"))
    await asyncio.wait_for(hung_up.wait(), 5)
    assert (await fetched(pool, engine)).body == b"hello"
    assert len(engine.connections) == 2


@pytest.mark.parametrize("how", ["closed", "reset"])
@pytest.mark.parametrize("said", [CONTINUE + HELLO, CHUNKED, UNTIL_CLOSED])
async def test_an_answer_that_ends_too_early_fails_wherever_it_ends(
    start_scripted: Any, pool: EnginePool, said: bytes, how: str
) -> None:
    lengths = itertools.count()

    async def script(side: Any) -> None:
        await side.request()
        part = said[: next(lengths)]
        await side.say(part[:-1], part[-1:])
        if how == "reset":
            side.reset()

    engine = await start_scripted(script)
    head_bytes = len(said) - len(b"hello")
    may_end_at = (
        range(head_bytes, len(said) + 1) if said is UNTIL_CLOSED and how == "closed" else ()
    )
    for length in range(len(said) + (said is UNTIL_CLOSED)):
        if length in may_end_at:
            assert (await fetched(pool, engine)).body == b"hello"[: length - head_bytes]
        else:
            with pytest.raises(EngineFailed, match="it closed the connection"):
                await fetched(pool, engine)


@pytest.mark.parametrize("said", [HELLO, CHUNKED, UNTIL_CLOSED], ids=["length", "chunks", "close"])
@pytest.mark.parametrize("num_first", [0, 20, -12])
async def test_an_answer_with_its_close_in_the_same_packet_is_whole(
    start_scripted: Any, pool: EnginePool, said: bytes, num_first: int
) -> None:
    async def script(side: Any) -> None:
        await side.request()
        await side.say(*filter(None, [said[:num_first]]))
        side.send(said[num_first:] if num_first else said)

    engine = await start_scripted(script)
    assert (await fetched(pool, engine)).body == b"hello"


@pytest.mark.parametrize("unasked", [HELLO, CONTINUE, b"x"])
async def test_what_an_engine_says_unasked_ends_its_connection_and_answers_nobody(
    start_scripted: Any, pool: EnginePool, unasked: bytes
) -> None:
    hung_up = asyncio.Event()

    async def script(side: Any) -> None:
        await side.request()
        is_first = not engine.connections[1:]
        await side.say(HELLO if is_first else OK + b"Content-Length: 3\r\n\r\nown")
        if is_first:
            await asked_once.wait()
            await side.say(unasked)
            await side.hung_up()
            hung_up.set()

    asked_once = asyncio.Event()
    engine = await start_scripted(script)
    assert (await fetched(pool, engine)).body == b"hello"
    asked_once.set()
    await asyncio.wait_for(hung_up.wait(), 2)  # sooner than one that is idle
    assert (await fetched(pool, engine)).body == b"own"


async def test_a_long_body_reaches_an_engine_that_reads_slowly_without_being_held_twice(
    start_scripted: Any, pool: EnginePool
) -> None:
    body = bytes(range(256)) * (60 * 4096)
    seen = []

    async def script(side: Any) -> None:
        await side.reader.readuntil(b"\r\n\r\n")
        position = 0
        while position < len(body):
            part = await side.reader.read(50_000)
            seen.append(part == body[position : position + len(part)])
            position += len(part)
            await asyncio.sleep(0)
        await side.say(HELLO)
        assert await side.request()
        await side.say(HELLO)

    engine = await start_scripted(script)
    tracemalloc.start()
    try:
        held_bytes = tracemalloc.get_traced_memory()[0]
        await pool.fetch(
            engine.url, EngineRequest("POST", "/", body=body), within_s=60, max_bytes=10
        )
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seen and all(seen)
    assert most_bytes - held_bytes < 8 * 2**20
    assert (await fetched(pool, engine)).body == b"hello"
    assert len(engine.connections) == 1


LONG = EngineRequest("POST", "/long", body=b"x" * 60_000_000)
TOO_LARGE = b"HTTP/1.1 413 Too Large\r\nContent-Length: 5\r\n\r\nlarge"


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        (TOO_LARGE, "not"),
        (TOO_LARGE, "half closed"),
        (TOO_LARGE, "closed"),
        (TOO_LARGE.replace(b"Content-Length: 5", b"X: a"), "half closed"),
    ],
)
async def test_an_answer_before_the_body_was_read_is_one_and_its_connection_asks_nothing_more(
    start_scripted: Any, pool: EnginePool, caplog: pytest.LogCaptureFixture, said: bytes, ends: str
) -> None:
    """Else the rest of that body would be in the next request."""

    async def script(side: Any) -> None:
        if engine.connections[1:]:
            assert (await side.request()).startswith(b"GET /v1/models")
            await side.say(HELLO)
            return
        assert (await side.reader.read(100)).startswith(b"POST /long")
        await side.say(said)
        if ends == "half closed":
            side.say_no_more()
        if ends != "closed":
            await asked_again.wait()

    asked_again = asyncio.Event()
    engine = await start_scripted(script)
    answer = await fetched(pool, engine, LONG)
    assert (answer.head.status, answer.body) == (413, b"large")
    assert (await fetched(pool, engine)).body == b"hello"
    asked_again.set()
    assert not caplog.records  # asyncio's, of one that writes on to a closed connection


async def test_an_engine_that_hangs_up_without_reading_the_body_is_not_waited_for(
    start_scripted: Any, pool: EnginePool
) -> None:
    async def script(side: Any) -> None:
        await side.reader.read(100)
        side.say_no_more()
        await failed.wait()

    failed = asyncio.Event()
    engine = await start_scripted(script)
    with pytest.raises(EngineFailed, match="it closed the connection"):
        await fetched(pool, engine, LONG)
    failed.set()


class Broken(Exception):
    """A gateway's own failure."""


@pytest.mark.parametrize("fails_in", ["the head", "a part", "a part that took its turn", "the end"])
async def test_what_takes_an_answer_and_raises_fails_only_that_request(
    start_scripted: Any, pool: EnginePool, fails_in: str
) -> None:
    async def script(side: Any) -> None:
        await side.request()
        if fails_in == "the end":
            await side.say(UNTIL_CLOSED)
            return
        await side.say(HELLO[:-3], HELLO[-3:-1])
        if engine.connections[2:]:
            await side.say(HELLO[-1:])
        await side.hung_up()
        num_hung_up.append(1)

    def begin(head: AnswerHead, connection: EngineConnection) -> Callable[..., None]:
        if fails_in == "the head":
            raise Broken
        return take

    def take(data: bytes, is_end: bool) -> None:
        parts.append(data)
        if fails_in == "a part" or is_end or (len(parts) > 1 and fails_in != "the end"):
            raise Broken

    num_hung_up: list[int] = []
    parts: list[bytes] = []
    engine = await start_scripted(script)
    for _ in range(2):
        parts.clear()
        with pytest.raises(Broken):
            await asyncio.wait_for(pool.ask(engine.url, GET, begin), 5)
    assert (await fetched(pool, engine)).body == b"hello"
    assert len(engine.connections) == 3


async def test_a_connection_that_was_paused_at_the_end_of_its_answer_serves_the_next_request(
    start_scripted: Any, pool: EnginePool
) -> None:
    """As the last part of a stream does whose client is slow."""

    async def script(side: Any) -> None:
        while await side.request():
            await side.say(HELLO[:-3], HELLO[-3:])

    def begin(head: AnswerHead, connection: EngineConnection) -> Callable[..., None]:
        return lambda data, is_end: connection.pause() if is_end else None

    engine = await start_scripted(script)
    await pool.ask(engine.url, GET, begin)
    assert (await fetched(pool, engine)).body == b"hello"
    assert len(engine.connections) == 1
