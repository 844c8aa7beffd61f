"""The gateway's way to Redis, where the test is Redis: what is sent when, and whose a reply is."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import hiredis
import pytest

from chairlift_gateway.quota import connection, store, wire
from chairlift_gateway.quota.connection import RedisAddress, open_client
from chairlift_gateway.quota.script import SCRIPT
from chairlift_gateway.quota.store import MAX_BATCH, Call, RedisFailure, Store
from chairlift_protocol.quota import QuotaKeys

pytestmark = pytest.mark.anyio

LOADED = b"+sha\r\n"


def admitted(number: int) -> bytes:
    return b"*6\r\n+admitted\r\n:%d\r\n+\r\n+\r\n:1\r\n+\r\n" % number


def refused(text: str) -> bytes:
    return f"-{text}\r\n".encode()


class RedisEnd:
    """Redis' end of one connection, after the handshake."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def shake_hands(self) -> None:
        assert [command[0] for command in await self.read()] == [b"HELLO"]
        self.answer(b"%1\r\n+proto\r\n:3\r\n")

    async def read(self, num_at_least: int = 1) -> list[list[bytes]]:
        """What has been written; nothing once the gateway has closed."""
        parser, commands = hiredis.Reader(), list[list[bytes]]()
        while len(commands) < num_at_least and (data := await self._reader.read(1 << 20)):
            parser.feed(data)
            commands += iter(parser.gets, False)
        return commands

    async def is_closed(self) -> bool:
        async with asyncio.timeout(5):
            return not await self.read()

    def answer(self, *replies: bytes) -> None:
        self.writer.write(b"".join(replies))

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class Side:
    """A store, what it said of its batches, and the ends of its connections."""

    def __init__(self, port: int, ends: asyncio.Queue[RedisEnd]) -> None:
        self.failures: list[str] = []
        self.num_successes = 0
        self.client = open_client(RedisAddress(f"redis://127.0.0.1:{port}/0"))
        self.store = Store(self.client, QuotaKeys("team/chat"), self.failures.append, self._succeed)
        self.ends = ends

    def _succeed(self) -> None:
        self.num_successes += 1

    def ask(self, name: str = "r") -> Call:
        return self.store.submit("acme/interactive", "*/interactive", "reserve", name, 10, 1000)

    async def end(self) -> RedisEnd:
        async with asyncio.timeout(5):
            return await self.ends.get()

    async def connected(self) -> RedisEnd:
        """With nothing in flight."""
        call, end = self.ask("first"), await self.end()
        await end.read()
        end.answer(admitted(0))
        await number(call)
        return end

    async def served(self, end: RedisEnd) -> None:
        call = self.ask("another")
        assert [command[-3] for command in await end.read()] == [b"another"]
        end.answer(admitted(42))
        assert await number(call) == 42


async def number(call: Call) -> int:
    async with asyncio.timeout(5):
        outcome, _ = await call.future
    return outcome.number


async def why(call: Call) -> str:
    with pytest.raises(RedisFailure) as failure:
        await number(call)
    return str(failure.value)


@pytest.fixture
async def side(stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Side]:
    for module in (connection, wire):
        monkeypatch.setattr(module, "TIMEOUT_S", 5.0)
    ends: asyncio.Queue[RedisEnd] = asyncio.Queue()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stack.callback(writer.close)
        end = RedisEnd(reader, writer)
        await end.shake_hands()
        ends.put_nowait(end)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    stack.callback(server.close)
    side = Side(server.sockets[0].getsockname()[1], ends)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(side.store.work())
        yield side
        side.store.close()
    await side.client.aclose()


@pytest.fixture
def impatient(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "TIMEOUT_S", 0.02)


async def test_a_call_is_written_before_submit_returns(side: Side) -> None:
    end = await side.connected()
    call = side.ask("second")
    assert call.is_sent
    ((command, *rest),) = await end.read()
    assert (command, rest[-3:]) == (b"EVALSHA", [b"second", b"10", b"1000"])
    end.answer(admitted(7))
    assert await number(call) == 7 and side.num_successes == 2


async def test_what_is_submitted_meanwhile_goes_in_one_write_each_in_its_place(side: Side) -> None:
    end = await side.connected()
    calls = [side.ask(f"r{n}") for n in range(2 + MAX_BATCH)]
    assert [call.is_sent for call in calls] == [True] + (1 + MAX_BATCH) * [False]
    assert len(await end.read()) == 1
    end.answer(admitted(0))
    assert [command[-3] for command in await end.read(MAX_BATCH)] == [
        f"r{n}".encode() for n in range(1, 1 + MAX_BATCH)
    ]
    assert not calls[-1].is_sent
    end.answer(*(admitted(n) for n in range(1, 1 + MAX_BATCH)))
    assert len(await end.read()) == 1
    end.answer(admitted(1 + MAX_BATCH))
    assert [await number(call) for call in calls] == list(range(2 + MAX_BATCH))
    assert side.num_successes == 4


async def test_what_may_wait_goes_with_what_is_asked_next_and_before_it(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LATER_S", 60.0)
    end = await side.connected()
    settled = [side.store.submit_later("a/b", "*/b", "settle", f"r{n}", 5, 0) for n in range(2)]
    assert not any(call.is_sent for call in settled)
    asked = side.ask("r2")
    assert all(call.is_sent for call in (*settled, asked))
    assert [command[-3] for command in await end.read(3)] == [b"r0", b"r1", b"r2"]
    end.answer(*(admitted(n) for n in range(3)))
    assert [await number(call) for call in (*settled, asked)] == [0, 1, 2]


async def test_what_may_wait_goes_soon_where_nothing_is_asked(side: Side) -> None:
    end = await side.connected()
    for _ in range(2):
        calls = [side.store.submit_later("a/b", "*/b", "settle", f"r{n}", 5, 0) for n in range(2)]
        assert len(await end.read(2)) == 2
        end.answer(admitted(0), admitted(1))
        assert [await number(call) for call in calls] == [0, 1]
    await side.store.emptied()


async def test_what_nobody_waits_for_any_more_is_not_sent(side: Side) -> None:
    end = await side.connected()
    first, left, last = side.ask("first"), side.ask("left"), side.ask("last")
    left.future.cancel()
    await end.read()
    end.answer(admitted(1))
    assert [command[-3] for command in await end.read()] == [b"last"]
    end.answer(admitted(2))
    assert (await number(first), await number(last), left.is_sent) == (1, 2, False)


async def test_replies_are_read_byte_by_byte(side: Side) -> None:
    end = await side.connected()
    calls = [side.ask(), side.ask(), side.ask()]
    await end.read()
    for byte in admitted(1):
        end.answer(bytes([byte]))
        await end.writer.drain()
        await asyncio.sleep(0)
    await end.read()
    replies = admitted(2) + admitted(3)
    end.answer(replies[:-1])
    assert await number(calls[0]) == 1
    assert not calls[1].future.done()
    end.answer(replies[-1:])
    assert [await number(call) for call in calls] == [1, 2, 3]


@pytest.mark.usefixtures("impatient")
async def test_a_late_answer_is_nobodys(side: Side) -> None:
    end = await side.connected()
    late = side.ask("late")
    await end.read()
    assert await why(late) == "TimeoutError: no answer in time"
    assert late.is_sent and side.failures == ["TimeoutError: no answer in time"]
    next_one = side.ask("next")
    end.answer(admitted(1))
    assert await end.is_closed()
    other_end = await side.end()
    await other_end.read()
    other_end.answer(admitted(2))
    assert await number(next_one) == 2


@pytest.mark.parametrize("excess", [admitted(2), admitted(2)[:3]])
async def test_a_reply_too_many_costs_its_batch_and_the_connection(
    side: Side, excess: bytes
) -> None:
    end = await side.connected()
    asked, waiting = side.ask(), side.ask()
    await end.read()
    end.answer(admitted(1), excess)
    assert await why(asked) == "ConnectionError: a reply that nobody asked for"
    assert await end.is_closed()
    end = await side.end()
    await end.read()
    end.answer(admitted(3))
    assert await number(waiting) == 3


@pytest.mark.parametrize("words", [b"+hello\r\n", b"nonsense\r\n"])
async def test_words_of_redis_while_nothing_is_asked_cost_the_connection_alone(
    side: Side, words: bytes
) -> None:
    end = await side.connected()
    end.answer(words)
    assert await end.is_closed()
    await side.connected()
    assert side.failures == []


async def test_pushes_are_passed_over(side: Side) -> None:
    end = await side.connected()
    call = side.ask()
    await end.read()
    end.answer(b">1\r\n+news\r\n", admitted(1), b">1\r\n+news\r\n")
    assert await number(call) == 1
    await side.served(end)


@pytest.mark.parametrize("leave", [lambda end: end.writer.close(), RedisEnd.reset])
async def test_a_connection_lost_while_idle_is_made_anew_and_nobody_notices(
    side: Side, leave: Callable[[RedisEnd], None], until: Callable[..., Awaitable[None]]
) -> None:
    leave(await side.connected())
    await until(lambda: side.store._wire is None)
    await side.connected()
    assert side.failures == []


async def test_nothing_is_sent_on_a_connection_that_redis_has_just_closed(side: Side) -> None:
    await side.connected()
    wire = side.store._wire
    assert wire is not None
    wire.eof_received()
    assert not side.ask().is_sent


async def test_an_encrypted_connection_that_redis_closes_is_noticed_while_idle(
    start_encrypted_redis: Any, pool_in: Any, gateway_on: Any, until: Any
) -> None:
    server, url, certificate = start_encrypted_redis()
    keeper = await gateway_on(RedisAddress(url, ca_path=certificate), pool_in(server))
    await until(lambda: keeper.store._wire is not None)
    server.stop()
    await until(lambda: keeper.store._wire is None)


@pytest.mark.parametrize("leave", [lambda end: end.writer.close(), RedisEnd.reset])
async def test_a_connection_lost_in_flight_fails_what_was_sent_at_once_and_nothing_else(
    side: Side, leave: Callable[[RedisEnd], None]
) -> None:
    end = await side.connected()
    sent, waiting = side.ask(), side.ask()
    await end.read()
    leave(end)
    assert (await why(sent)).startswith("Connection")
    end = await side.end()
    await end.read()
    end.answer(admitted(2))
    assert await number(waiting) == 2
    assert len(side.failures) == 1


async def test_a_script_lost_in_the_middle_of_a_batch_is_loaded_for_those_it_failed(
    side: Side,
) -> None:
    end = await side.connected()
    calls = [side.ask(f"r{n}") for n in range(5)]
    await end.read()
    end.answer(admitted(0))
    await end.read()
    lost = refused("NOSCRIPT No matching script.")
    end.answer(admitted(1), lost, admitted(3), lost)
    load, *again = await end.read(3)
    assert load == [b"SCRIPT", b"LOAD", SCRIPT.encode()]
    assert [command[-3] for command in again] == [b"r2", b"r4"]
    waiting = side.ask("waiting")
    assert not waiting.is_sent
    end.answer(LOADED, admitted(2), admitted(4))
    await end.read()
    end.answer(admitted(5))
    assert [await number(call) for call in [*calls, waiting]] == list(range(6))
    assert side.failures == []


@pytest.mark.parametrize("loaded", [refused("OOM no memory"), LOADED])
async def test_a_script_that_cannot_be_loaded_fails_its_calls_and_is_not_tried_for_ever(
    side: Side, loaded: bytes
) -> None:
    end, lost = await side.connected(), refused("NOSCRIPT No matching script.")
    call = side.ask()
    await end.read()
    end.answer(lost)
    await end.read()
    end.answer(loaded, lost)
    expected = "NOSCRIPT No matching script." if loaded == LOADED else "OOM no memory"
    assert await why(call) == f"ReplyError: {expected}"
    assert side.failures == [f"ReplyError: {expected}"]


async def test_an_error_stands_in_its_place_and_the_connection_stays(side: Side) -> None:
    end = await side.connected()
    calls = [side.ask() for _ in range(4)]
    await end.read()
    end.answer(admitted(0))
    await end.read()
    end.answer(refused("OOM no memory"), b"+what\r\n", admitted(3))
    assert await number(calls[3]) == 3
    assert await why(calls[1]) == "ReplyError: OOM no memory"
    assert (await why(calls[2])).startswith("ValueError")
    assert len(side.failures) == 1
    await side.served(end)


@pytest.mark.parametrize("code", ["NOAUTH", "LOADING", "READONLY"])
async def test_where_another_connection_may_fare_better_the_next_call_gets_one(
    side: Side, code: str
) -> None:
    end = await side.connected()
    call = side.ask()
    await end.read()
    end.answer(refused(f"{code} not here"))
    assert await why(call) == f"ReplyError: {code} not here"
    assert await end.is_closed()
    await side.connected()


async def test_what_cannot_be_written_costs_its_batch_and_is_not_sent(side: Side) -> None:
    end = await side.connected()
    call = side.ask("\ud800")
    assert (await why(call)).startswith("UnicodeEncodeError") and not call.is_sent
    await side.served(end)


async def test_a_store_that_is_closed_ends_with_what_is_in_flight_and_sends_nothing_more(
    side: Side,
) -> None:
    end = await side.connected()
    sent, waiting = side.ask(), side.ask()
    side.store.close()
    assert await why(waiting) == await why(side.ask()) == "the gateway ends"
    assert len(await end.read()) == 1
    end.answer(admitted(1))
    assert await number(sent) == 1
    assert await end.is_closed()
