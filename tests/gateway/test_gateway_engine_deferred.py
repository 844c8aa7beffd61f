"""What waits on a connection to an engine, to be passed on or to be sent, and its end meanwhile."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from chairlift_gateway.engine_http import (
    MAX_LATER_BYTES,
    PIECE_BYTES,
    AnswerHead,
    EngineConnection,
    EngineFailed,
)

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\n"
HELLO = OK + b"Content-Length: 5\r\n\r\nhello"
UNTIL_CLOSED = OK + b"X-A: 1\r\n\r\nhello"
ASKED = b"GET / HTTP/1.1\r\n\r\n"


class HeldTurns:
    """What takes its turn when the test says so."""

    def __init__(self) -> None:
        self.pieces: list[Callable[[], None]] = []

    def take(self, piece: Callable[[], None]) -> None:
        self.pieces.append(piece)

    def run(self) -> None:
        while self.pieces:
            self.pieces.pop(0)()


class Taken:
    """What came of an answer."""

    def __init__(self) -> None:
        self.heads: list[AnswerHead] = []
        self.parts: list[bytes] = []
        self.ends: list[bool] = []

    def begin(self, head: AnswerHead, connection: EngineConnection) -> Callable[..., None]:
        self.heads.append(head)
        return self.take

    def take(self, data: bytes, is_end: bool) -> None:
        self.parts.append(data)
        self.ends.append(is_end)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)


class Direct:
    """A connection without its pool."""

    def __init__(self) -> None:
        self.turns = HeldTurns()
        self.lost: list[EngineConnection] = []

    async def open(self, engine: Any) -> EngineConnection:
        parts = urlsplit(engine.url)
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: EngineConnection(self.lost.append, self.turns),  # type: ignore[arg-type]
            parts.hostname, parts.port,
        )  # fmt: skip
        return connection

    def socket_of(self, connection: EngineConnection) -> socket.socket:
        told: socket.socket = connection._transport.get_extra_info("socket")
        return told


@pytest.fixture
def direct() -> Direct:
    return Direct()


async def test_what_waits_for_its_turn_when_its_request_is_cancelled_is_dropped(
    start_scripted: Any, direct: Direct, until: Any
) -> None:
    async def script(side: Any) -> None:
        await side.request()
        await side.say(HELLO[:-3], HELLO[-3:])
        await side.hung_up()

    connection = await direct.open(await start_scripted(script))
    taken = Taken()
    outcome = connection.ask(ASKED, b"", taken.begin)
    await until(lambda: bool(direct.turns.pieces))
    outcome.cancel()
    assert not connection.is_reusable
    connection.close()
    await until(lambda: direct.lost == [connection])
    direct.turns.run()
    assert (taken.body, taken.ends) == (b"he", [False])


async def test_an_engine_that_goes_on_after_a_cancelled_request_is_hung_up_on(
    start_scripted: Any, direct: Direct, until: Any
) -> None:
    async def script(side: Any) -> None:
        await side.request()
        await side.say(HELLO[:-3])
        await cancelled.wait()
        await side.say(HELLO[-3:])
        await side.hung_up()

    cancelled = asyncio.Event()
    connection = await direct.open(await start_scripted(script))
    taken = Taken()
    outcome = connection.ask(ASKED, b"", taken.begin)
    await until(lambda: bool(taken.heads))
    outcome.cancel()
    cancelled.set()
    await until(lambda: direct.lost == [connection])
    direct.turns.run()
    assert taken.ends == [False]


async def test_what_waits_for_its_turn_when_the_connection_ends_is_passed_on_once(
    start_scripted: Any, direct: Direct
) -> None:
    async def script(side: Any) -> None:
        await side.request()
        await side.say(UNTIL_CLOSED[:-3], UNTIL_CLOSED[-3:-1], UNTIL_CLOSED[-1:])

    connection = await direct.open(await start_scripted(script))
    taken = Taken()
    await asyncio.wait_for(connection.ask(ASKED, b"", taken.begin), 5)
    assert direct.turns.pieces
    direct.turns.run()
    assert (taken.body, taken.ends[-1], taken.ends.count(True)) == (b"hello", True, 1)


async def test_much_that_waits_is_passed_on_at_once_and_a_turn_left_over_does_no_harm(
    start_scripted: Any, direct: Direct, until: Any
) -> None:
    num_bytes = 4 * MAX_LATER_BYTES
    large = bytes(range(256)) * (num_bytes // 256)

    async def script(side: Any) -> None:
        while True:
            await side.request()
            await side.say(OK + b"Content-Length: %d\r\n\r\n" % num_bytes)
            for start in range(0, num_bytes, 1000):
                await side.say(large[start : start + 1000])

    connection = await direct.open(await start_scripted(script))
    for _ in range(2):
        taken = Taken()
        outcome = connection.ask(ASKED, b"", taken.begin)
        await until(lambda taken=taken: len(taken.body) > 2 * MAX_LATER_BYTES)
        assert direct.turns.pieces
        while not outcome.done():
            await asyncio.sleep(0)
            direct.turns.run()
        assert (taken.body == large, taken.ends.count(True)) == (True, 1)
        assert connection.is_reusable
        # One of this answer's, which comes in the next one's time.
        direct.turns.take(connection._parse_later)


async def test_a_turn_left_over_passes_nothing_on_before_the_head(
    start_scripted: Any, direct: Direct, until: Any
) -> None:
    async def script(side: Any) -> None:
        for _ in range(2):
            await side.request()
            await side.say(HELLO[:-3], HELLO[-3:])

    connection = await direct.open(await start_scripted(script))
    first, second = Taken(), Taken()
    outcome = connection.ask(ASKED, b"", first.begin)
    await until(lambda: bool(direct.turns.pieces))
    left_over = direct.turns.pieces[0]
    direct.turns.run()
    assert outcome.done() and connection.is_reusable
    outcome = connection.ask(ASKED, b"", second.begin)
    left_over()
    await until(lambda: bool(direct.turns.pieces))
    left_over()
    assert outcome.done()
    direct.turns.run()
    assert (first.body, second.body) == (b"hello", b"hello")


async def test_a_paused_answer_is_read_no_further_until_it_is_resumed(
    start_scripted: Any, direct: Direct, until: Any
) -> None:
    part = b"x" * 2**16
    num_said = 0

    async def script(side: Any) -> None:
        nonlocal num_said
        await side.request()
        await side.say(OK + b"Content-Length: %d\r\n\r\n" % (500 * len(part)))
        for _ in range(500):
            await side.say(part)
            num_said += 1

    connection = await direct.open(await start_scripted(script))
    taken = Taken()

    def begin(head: AnswerHead, connection: EngineConnection) -> Callable[..., None]:
        connection.pause()
        connection.pause()
        return taken.begin(head, connection)

    outcome = connection.ask(ASKED, b"", begin)
    await until(lambda: bool(taken.heads))
    num_before = -1
    while num_before != num_said:  # until the kernel's buffers are full
        num_before = num_said
        await asyncio.sleep(0.05)
    assert num_said < 500 and len(taken.body) < 2**20
    connection.resume()
    while not outcome.done():
        await asyncio.sleep(0)
        direct.turns.run()
    assert len(taken.body) == 500 * len(part)


LONG = bytes(60_000_000)


async def read_nothing(side: Any) -> None:
    await asyncio.Event().wait()


async def test_a_connection_whose_last_request_is_still_being_sent_asks_nothing_more(
    start_scripted: Any, direct: Direct
) -> None:
    async def script(side: Any) -> None:
        await side.say(HELLO)
        await side.hung_up()

    connection = await direct.open(await start_scripted(script))
    buffers = direct.socket_of(connection)
    # The rest of so short a body waits in the transport alone.
    buffers.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    taken = Taken()
    await asyncio.wait_for(connection.ask(ASKED, bytes(PIECE_BYTES), taken.begin), 5)
    assert taken.body == b"hello"
    assert not connection.is_reusable


async def test_what_is_still_to_be_sent_when_its_connection_closes_is_not_sent(
    start_scripted: Any, direct: Direct, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    connection = await direct.open(await start_scripted(read_nothing))
    outcome = connection.ask(ASKED, LONG, Taken().begin)
    connection.resume_writing()
    connection.close()
    await until(lambda: direct.lost == [connection])
    with pytest.raises(EngineFailed):
        await outcome
    assert not caplog.records  # asyncio's, of writes to what is closed


async def test_a_body_that_cannot_be_sent_on_ends_its_connection_once(
    start_scripted: Any, direct: Direct, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(side: Any) -> None:
        while await side.reader.read(2**20):
            pass

    connection = await direct.open(await start_scripted(script))
    resume = connection.resume_writing

    def break_and_resume() -> None:
        direct.socket_of(connection).shutdown(socket.SHUT_WR)
        resume()

    monkeypatch.setattr(connection, "resume_writing", break_and_resume)
    with pytest.raises(EngineFailed, match="Broken pipe"):
        await asyncio.wait_for(connection.ask(ASKED, LONG, Taken().begin), 5)
    assert direct.lost == [connection]
