from __future__ import annotations

import asyncio
import os
import signal

import pytest

from chairlift_cli.stopping import stop_signals, until


def test_the_first_signal_asks_and_the_second_insists() -> None:
    async def run() -> None:
        with stop_signals() as stopping:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(stopping.asked.wait(), 1)
            assert not stopping.insisted.is_set() and stopping.number == signal.SIGTERM
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(stopping.insisted.wait(), 1)
            assert stopping.number == signal.SIGTERM

    asyncio.run(run())


def test_work_is_cancelled_and_awaited_when_the_event_comes_first() -> None:
    cleaned_up = False

    async def work() -> None:
        nonlocal cleaned_up
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up = True

    async def run() -> bool:
        event = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, event.set)
        return await until(event, work())

    assert asyncio.run(run()) is False and cleaned_up


def test_work_that_ends_or_fails_says_so() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    async def run() -> None:
        assert await until(asyncio.Event(), asyncio.sleep(0)) is True
        with pytest.raises(ValueError, match="broken"):
            await until(asyncio.Event(), fail())

    asyncio.run(run())
