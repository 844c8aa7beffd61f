from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from chairlift_gateway import routing
from chairlift_gateway.holding import RELEASED_PER_REPLICA, HoldFull, Holding
from chairlift_gateway.metrics import GatewayMetrics
from chairlift_protocol.wire import RequestClass

pytestmark = pytest.mark.anyio

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH


async def settle() -> None:
    """Let every task run up to where it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_wake_lets_a_few_go_per_replica_and_interactive_ones_first() -> None:
    num_routable = 0
    holding = Holding(100, lambda _: num_routable, GatewayMetrics())
    let_go: list[RequestClass] = []

    async def wait(request_class: RequestClass) -> None:
        assert await holding.wait(request_class, 10.0)
        let_go.append(request_class)

    async with asyncio.TaskGroup() as tasks:
        for request_class in [BATCH] * 6 + [INTERACTIVE] * 6:
            tasks.create_task(wait(request_class))
        await settle()
        holding.release()
        await settle()
        assert let_go == [] and holding.num_held == 12
        num_routable = 1
        holding.release()
        await settle()
        assert let_go == [INTERACTIVE] * 6 + [BATCH] * (RELEASED_PER_REPLICA - 6)
    assert len(let_go) == 12 and holding.num_held == 0
    await holding.close()


async def test_it_is_bounded_in_number_and_time_and_leaves_nothing_behind() -> None:
    metrics = GatewayMetrics()
    holding = Holding(1, lambda _: 0, metrics)
    first = asyncio.create_task(holding.wait(INTERACTIVE, 10.0))
    await settle()
    with pytest.raises(HoldFull):
        await holding.wait(INTERACTIVE, 10.0)
    assert not await holding.wait(BATCH, 0.01)  # which has places of its own
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert holding.num_held == 0
    assert not await holding.wait(BATCH, 0.01)
    assert holding.num_held == 0
    assert b'chairlift_gateway_requests_held{class="batch"} 0.0' in metrics.exposition()


async def test_batch_work_waits_until_a_replica_begins_to_lend(
    start_engine: Callable[..., Any],
    start_gateway: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing, "STATEMENT_FRESH_S", 0.3)
    engine = await start_engine()
    engine.lend_share = 0.0
    gateway = await start_gateway(engine)

    async def ask() -> int:
        async with gateway.post("/batch/v1/completions") as response:
            return int(response.status)

    asking = asyncio.create_task(ask())
    await asyncio.wait({asking}, timeout=0.3)
    assert not asking.done() and engine.requests == []
    async with gateway.post("/v1/completions") as response:
        assert response.status == 200  # interactive work goes on
    engine.lend_share = 0.5
    assert await asking == 200
