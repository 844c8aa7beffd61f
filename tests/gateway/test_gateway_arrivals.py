"""The page that answers once something arrives."""

from __future__ import annotations

import asyncio
import time
from itertools import islice
from typing import Any

import pytest

from chairlift_gateway.arrivals import MAX_WAITING
from chairlift_protocol import metrics

pytestmark = pytest.mark.anyio
PATH = "/arrivals"


async def told(gateway: Any, tag: str | None = None, prefer: str = "wait=20") -> tuple[int, str]:
    headers = {"Prefer": prefer, **({"If-None-Match": tag} if tag else {})}
    async with gateway.client.get(gateway.url + PATH, headers=headers) as response:
        await response.read()
        return response.status, response.headers["etag"]


async def test_it_shows_what_metrics_show_of_arrivals(
    start_engine: Any, start_gateway: Any
) -> None:
    gateway = await start_gateway(await start_engine())
    async with gateway.post():
        pass
    async with gateway.client.get(gateway.url + PATH) as response:
        page = await response.text()
    assert f'{metrics.REQUESTS_RECEIVED}{{class="interactive"}} 1.0' in page
    assert f'{metrics.GATEWAY_HELD}{{class="batch"}} 0.0' in page
    series = [line for line in page.splitlines() if not line.startswith("#")]
    assert len(series) == 4


async def test_it_answers_at_once_whoever_knows_nothing_or_something_older(
    start_engine: Any, start_gateway: Any
) -> None:
    gateway = await start_gateway(await start_engine())
    status, first = await told(gateway)
    async with gateway.post():
        pass
    assert status == 200
    for tag in (first, '"of-another-process"'):
        status, later = await told(gateway, tag)
        assert (status, later == first) == (200, False)


@pytest.mark.parametrize("prefer", ["", "wait=0", "wait=soon", "respond-async", "wait=-3"])
async def test_without_a_wait_it_says_at_once_that_nothing_is_new(
    start_engine: Any, start_gateway: Any, prefer: str
) -> None:
    gateway = await start_gateway(await start_engine())
    _, tag = await told(gateway)
    begun_s = time.monotonic()
    assert await told(gateway, tag, prefer) == (304, tag)
    assert time.monotonic() - begun_s < 5


@pytest.mark.parametrize("prefer", ["wait=1", "respond-async, wait=1"])
async def test_a_wait_without_news_ends_with_what_was_known(
    start_engine: Any, start_gateway: Any, prefer: str
) -> None:
    gateway = await start_gateway(await start_engine())
    _, tag = await told(gateway)
    begun_s = time.monotonic()
    assert await told(gateway, tag, prefer) == (304, tag)
    assert time.monotonic() - begun_s >= 0.9


async def test_an_arrival_ends_the_wait_before_it_is_answered(
    start_engine: Any, never: Any, start_gateway: Any
) -> None:
    """Also one that a gateway must hold."""

    for engines in ([await start_engine(never)], []):
        gateway = await start_gateway(*engines)
        _, tag = await told(gateway)
        waiting = asyncio.create_task(told(gateway, tag))
        asking = asyncio.create_task(
            gateway.client.post(gateway.url + "/v1/completions", data=b"{}")
        )
        status, newer = await waiting
        assert (status, newer == tag) == (200, False)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_nobody_waits_for_a_gateway_that_drains(
    start_engine: Any, start_gateway: Any
) -> None:
    gateway = await start_gateway(await start_engine())
    _, tag = await told(gateway)
    waiting = asyncio.create_task(told(gateway, tag))
    await asyncio.sleep(0.05)
    begun_s = time.monotonic()
    gateway.gateway.begin_drain()
    assert await waiting == (304, tag)
    assert await told(gateway, tag) == (304, tag)
    assert time.monotonic() - begun_s < 5


async def test_few_wait_and_others_are_answered_as_if_they_did_not_want_to(
    start_engine: Any, start_gateway: Any
) -> None:
    gateway = await start_gateway(await start_engine())
    _, tag = await told(gateway)
    waiting = [asyncio.create_task(told(gateway, tag)) for _ in range(3 * MAX_WAITING)]
    at_once = [await each for each in islice(asyncio.as_completed(waiting), 2 * MAX_WAITING)]
    assert at_once == [(304, tag)] * 2 * MAX_WAITING
    async with gateway.post():
        pass
    later = [each for each in await asyncio.gather(*waiting) if each[0] == 200]
    assert len(later) == MAX_WAITING and len(set(later)) == 1
    assert await told(gateway, later[0][1], "wait=1") == (304, later[0][1])
