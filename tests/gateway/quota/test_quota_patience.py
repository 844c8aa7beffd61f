"""How long Redis is waited for, by the clock and by passes of the event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from chairlift_gateway.quota.patience import NUM_PASSES, Deadline, Patience

pytestmark = pytest.mark.anyio


async def test_a_deadline_on_a_loop_that_has_time_is_its_timeout() -> None:
    ended, began_s = asyncio.Event(), time.monotonic()
    Deadline(0.05, ended.set)
    await ended.wait()
    assert 0.05 <= time.monotonic() - began_s < 1


async def test_a_deadline_on_a_loop_that_has_none_is_so_many_passes() -> None:
    timeout_s, num_passes, ended = 0.002, 0, asyncio.Event()
    Deadline(timeout_s, ended.set)
    while not ended.is_set():
        time.sleep(timeout_s)
        num_passes += 1
        await asyncio.sleep(0)
    assert num_passes >= NUM_PASSES


async def test_a_deadline_that_is_cancelled_in_its_last_pass_does_not_end() -> None:
    ended: list[bool] = []
    for num_passes in range(NUM_PASSES):
        deadline = Deadline(0.0, lambda: ended.append(True))
        for _ in range(num_passes):
            await asyncio.sleep(0)
        deadline.cancel()
    for _ in range(2 * NUM_PASSES):
        await asyncio.sleep(0)
    assert not ended


async def test_patience_ends_what_takes_longer_and_leaves_alone_what_does_not() -> None:
    with pytest.raises(TimeoutError):
        async with Patience(0.01):
            await asyncio.Event().wait()
    async with Patience(0.01):
        await asyncio.sleep(0)
    await asyncio.sleep(0.03)
