"""What a silent gateway counted is known without asking it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from chairlift_e2e.fake_engine import GATEWAY_PORT, FakeGateway, address
from chairlift_operator.http_asking import EngineError
from chairlift_operator.kube import listening as module
from chairlift_operator.kube.listening import UNREAD_S, Listening


class Heard:
    """A gateway, and what listens to it at a time that a test sets."""

    def __init__(self, session: aiohttp.ClientSession, gateway: FakeGateway) -> None:
        self.now_s = 0.0
        self.gateway, self.url = gateway, f"http://{gateway.ip}:{GATEWAY_PORT}"
        self.listening = Listening(session, lambda: self.now_s)

    async def received(self) -> float:
        return sum(count.num_received for count in await self.listening.read(self.url))

    async def until(self, probe: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not probe():
                await asyncio.sleep(0.001)

    def is_silent(self) -> bool:
        silence = self.listening._silences.get(self.url)
        return silence is not None and not silence.waiting.done()


@asynccontextmanager
async def heard() -> AsyncIterator[Heard]:
    gateway = FakeGateway(address(4000))
    await gateway.start()
    async with aiohttp.ClientSession() as session:
        try:
            yield Heard(session, gateway)
        finally:
            await gateway.stop()


def runs(body: Callable[[Heard], Awaitable[None]]) -> None:
    async def main() -> None:
        async with heard() as world:
            await body(world)

    asyncio.run(main())


def test_silence_is_asked_for_once_and_broken_by_an_arrival() -> None:
    async def body(world: Heard) -> None:
        assert [await world.received() for _ in range(5)] == [0.0] * 5
        await world.until(lambda: world.gateway.num_listening == 1)
        world.gateway.receive(3)
        await world.until(lambda: not world.is_silent())
        assert await world.received() == 3
        assert world.is_silent()

    runs(body)


def test_what_arrives_between_the_count_and_the_wait_is_not_missed() -> None:
    async def body(world: Heard) -> None:
        await world.received()  # the wait has not reached the gateway yet
        world.gateway.receive()
        await world.until(lambda: not world.is_silent())
        assert await world.received() == 1

    runs(body)


def test_silence_that_ran_its_time_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One question for another minute; what was counted stays known meanwhile."""
    monkeypatch.setattr("chairlift_operator.gateway_client.SILENCE_S", 0)
    questions = []

    async def body(world: Heard) -> None:
        monkeypatch.setattr(module, "read_arrivals", counting(module.read_arrivals, questions))
        for _ in range(4):
            assert await world.received() == 0
            await world.until(lambda: not world.is_silent())
        assert len(questions) == 1

    runs(body)


def counting(ask: Any, questions: list[str]) -> Any:
    async def asked(session: aiohttp.ClientSession, url: str) -> Any:
        questions.append(url)
        return await ask(session, url)

    return asked


def test_a_gateway_that_ends_is_known_by_the_next_look() -> None:
    async def body(world: Heard) -> None:
        await world.received()
        await world.until(lambda: world.gateway.num_listening == 1)
        await world.gateway.stop()
        await world.until(lambda: not world.is_silent())
        with pytest.raises(EngineError, match="arrivals failed"):
            await world.received()

    runs(body)


def test_a_gateway_without_the_page_is_asked_each_time() -> None:
    async def body(world: Heard) -> None:
        world.gateway.has_page = False
        for number in range(3):
            world.gateway.receive()
            assert await world.received() == number + 1
        assert not world.is_silent() and world.gateway.num_shown == 3

    runs(body)


def test_whoever_is_not_asked_about_any_more_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.001)

    async def body(world: Heard) -> None:
        running = asyncio.create_task(world.listening.run())
        await world.received()
        waiting = world.listening._silences[world.url].waiting
        world.now_s = UNREAD_S - 1
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await world.received()  # and is kept for as long again
        world.now_s += UNREAD_S - 1
        await asyncio.sleep(0.05)
        assert not waiting.done()
        world.now_s += 2
        await world.until(waiting.cancelled)
        assert not world.listening._silences
        await world.received()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert not world.listening._silences

    runs(body)


def test_an_answer_that_is_none_is_no_silence() -> None:
    """A proxy between may say 200 to anything."""

    async def body(world: Heard) -> None:
        async def page(request: web.Request) -> web.Response:
            return web.Response(text="<html>", headers={"etag": "x"})

        app = web.Application()
        app.router.add_get("/{path:.*}", page)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, address(4001), GATEWAY_PORT).start()
        world.url = f"http://{address(4001)}:{GATEWAY_PORT}"
        with pytest.raises(EngineError, match="metrics of the gateway"):
            await world.received()
        await runner.cleanup()

    runs(body)
