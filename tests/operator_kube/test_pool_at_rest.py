"""A pool with nothing to do costs next to nothing, and is back within a turn."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from chairlift_e2e.fake_engine import GATEWAY_PORT
from chairlift_protocol.wire import RequestClass

GATEWAY = "/apis/apps/v1/namespaces/team/deployments/chat-gateway"
POOL = "/apis/chairlift.dev/v1alpha1/namespaces/team/inferencepools/chat"
Turned = Any  # conftest's


async def rested(pool: Turned) -> Any:
    """A pool of one engine that has been idle for long; its engine."""
    pool.set_spec()
    await pool.until(lambda: pool.status.get("interactive", {}).get("policyGeneration"))
    await pool.turn(20)
    return next(iter(pool.kube.engines("chat-interactive").values()))


async def looks(pool: Turned, engine: Any, num_turns: int) -> int:
    """How often an engine's metrics are read in so many turns."""
    before = engine.num_shown
    await pool.turn(num_turns)
    return int(engine.num_shown - before)


async def arrive(pool: Turned, num_requests: int) -> None:
    """And whoever listens to the first gateway has heard of it."""
    pool.kube.gateway().receive(num_requests)
    await unheard(pool)


async def unheard(pool: Turned) -> None:
    silence = pool.tools.listening._silences.get(f"http://{pool.kube.gateway().ip}:{GATEWAY_PORT}")
    if silence is not None:
        async with asyncio.timeout(5):
            await asyncio.wait({silence.waiting})


def test_a_gateway_of_a_pool_at_rest_is_asked_nothing_while_it_is_silent(run: Any) -> None:
    async def body(pool: Turned) -> None:
        engine, gateway = await rested(pool), pool.kube.gateway()
        await pool.turn(6)
        async with asyncio.timeout(5):
            while not gateway.num_listening:
                await asyncio.sleep(0.001)
        before = gateway.num_shown
        assert await looks(pool, engine, 72) == 2
        assert gateway.num_listening == 1
        assert gateway.num_shown - before == 2  # with the whole looks

    run(body)


def test_gateways_that_cannot_keep_silent_are_asked_each_tick(run: Any) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec()
        await pool.turn(2)
        gateway = pool.kube.gateway()
        gateway.has_page = False
        engine = await rested(pool)
        before = gateway.num_shown
        assert await looks(pool, engine, 36) == 1
        assert gateway.num_shown - before == 36
        await arrive(pool, 3)
        assert await looks(pool, engine, 1) == 1

    run(body)


def test_engines_of_a_pool_at_rest_are_asked_every_three_minutes(run: Any) -> None:
    async def body(pool: Turned) -> None:
        engine = await rested(pool)
        assert await looks(pool, engine, 72) == 2  # six minutes
        assert pool.condition("MetricsAvailable")["reason"] == "Idle"

    run(body)


def test_the_first_arrival_is_seen_by_the_next_turn(run: Any) -> None:
    async def body(pool: Turned) -> None:
        engine = await rested(pool)
        engine.num_in_flight = 2
        await arrive(pool, 3)
        assert await looks(pool, engine, 1) == 1
        signals = {s["name"].split("/")[1]: s for s in pool.status["signals"]}
        assert signals["running"]["value"] == "2"
        assert await looks(pool, engine, 6) == 6

    run(body)


def test_arrivals_before_a_rush_are_known_as_well_as_if_engines_had_been_asked(run: Any) -> None:
    async def body(pool: Turned) -> None:
        await rested(pool)
        for _ in range(4):
            await arrive(pool, 30)
            await pool.turn()
        arrivals = pool.controller._loop.memory.scaling.arrivals
        now_s = arrivals.points[-1][0]
        assert {b[0] - a[0] for a, b in pairwise(arrivals.points)} == {5.0}
        assert arrivals.rate_per_s(RequestClass.INTERACTIVE, now_s) == pytest.approx(6.0)

    run(body)


def test_any_change_ends_the_rest(run: Any) -> None:
    async def body(pool: Turned) -> None:
        engine = await rested(pool)
        pool.set_spec(gateway={"replicas": 3})
        await pool.controller.reconcile(pool.body)
        assert await looks(pool, engine, 1) == 1

    run(body)


def test_its_own_status_coming_back_ends_no_rest(run: Any) -> None:
    async def body(pool: Turned) -> None:
        engine = await rested(pool)
        await pool.turn(12)
        before = engine.num_shown
        for _ in range(11):
            await pool.controller.reconcile({**pool.body, "status": pool.status})
            await pool.turn()
        assert engine.num_shown - before <= 1

    run(body)


def test_a_gateway_that_does_not_answer_ends_the_rest(run: Any) -> None:
    async def body(pool: Turned) -> None:
        engine = await rested(pool)
        await pool.turn()  # listens to it
        await pool.kube.gateway().stop()
        await unheard(pool)
        assert await looks(pool, engine, 3) == 3

    run(body)


def test_a_status_that_is_only_older_is_written_every_ten_minutes(run: Any) -> None:
    async def body(pool: Turned) -> None:
        await rested(pool)
        before = len(pool.kube.writes)
        await pool.turn(360)  # half an hour
        assert 2 <= len(pool.kube.writes) - before <= 3

    run(body)


def test_what_could_not_be_written_is_tried_again_before_a_pool_rests(run: Any) -> None:
    async def body(pool: Turned) -> None:
        engine = await rested(pool)
        pool.kube.refuses[POOL] = "the status is refused"
        await pool.turn(132)  # a status is written every ten minutes, by a whole look
        assert await looks(pool, engine, 3) == 3

    run(body)


def test_what_the_server_refuses_is_tried_at_each_turn(run: Any) -> None:
    """Somebody may raise a quota: nothing of the pool changes then."""

    async def body(pool: Turned) -> None:
        engine = await rested(pool)
        pool.kube.refuses[GATEWAY] = "exceeded quota"
        pool.set_spec(gateway={"replicas": 3})
        await pool.controller.reconcile(pool.body)
        assert await looks(pool, engine, 24) == 24
        assert "exceeded quota" in pool.condition("Reconciled")["message"]

    run(body)


def test_children_are_compared_again_only_when_something_changed(run: Any) -> None:
    async def body(pool: Turned) -> None:
        await rested(pool)
        tended: list[Any] = []
        pool.controller._tender.tend = lambda *a, **k: tended.append(a)
        await pool.controller.reconcile(pool.body)
        assert tended == []

    run(body)
