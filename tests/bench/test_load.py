from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from chairlift_bench.load import Load, PlannedRequest
from chairlift_bench.outcomes import Outcome


def run_load(chat_server: Any, handler: Any, requests: list[PlannedRequest]) -> list[Outcome]:
    async def run() -> list[Outcome]:
        async with chat_server(handler) as url:
            return await Load(url, "m", patience_s=0.5).run(requests)

    return asyncio.run(run())


def replying(*pieces: bytes) -> Any:
    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    return handler


ONE = [PlannedRequest(0.0, "Hello?", 8)]


def test_a_complete_stream_yields_its_text_times_and_usage(chat_server: Any, script: Any) -> None:
    handler = replying(
        script.role,
        script.word("Hi"),
        script.word(" there"),
        script.word("."),
        script.finish("stop"),
        script.usage(9, 3),
        script.done,
    )
    (outcome,) = run_load(chat_server, handler, ONE)
    assert (outcome.error, outcome.text, outcome.finish_reason) == (None, "Hi there.", "stop")
    assert (outcome.prompt_tokens, outcome.output_tokens) == (9, 3)
    assert outcome.ttft_s is not None and len(outcome.gaps_s) == 2
    assert outcome.ttft_s + sum(outcome.gaps_s) <= outcome.elapsed_s


def test_every_way_to_break_a_stream_is_an_error_and_sent_once(
    chat_server: Any, script: Any
) -> None:
    word, finish, done = script.word("Hi"), script.finish(), script.done
    for pieces, needle in [
        ((word, finish), "without [DONE]"),
        ((word, done), "without a finish_reason"),
        ((word, script.error), "The engine failed."),
        ((word, b"data: {broken\n\n"), "JSONDecodeError"),
        ((), "without [DONE]"),
    ]:
        calls = []
        reply = replying(*pieces)

        async def handler(request: web.Request, reply: Any = reply, calls: Any = calls) -> Any:
            calls.append(request)
            return await reply(request)

        (outcome,) = run_load(chat_server, handler, ONE)
        assert outcome.error is not None and needle in outcome.error
        assert len(calls) == 1


def test_an_answer_without_text_has_its_end_as_first_token(chat_server: Any, script: Any) -> None:
    handler = replying(script.role, script.finish(), script.usage(9, 1), script.done)
    (outcome,) = run_load(chat_server, handler, ONE)
    assert outcome.error is None and outcome.ttft_s is not None and outcome.gaps_s == ()


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_a_refusal_carries_its_status_and_message(chat_server: Any, status: int) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, text="no room")

    (outcome,) = run_load(chat_server, handler, ONE)
    assert outcome.error == f"HTTP {status}: no room" and outcome.ttft_s is None


def test_a_server_that_is_not_there_and_one_that_never_ends_both_fail(
    chat_server: Any, script: Any
) -> None:
    (refused,) = asyncio.run(Load("http://127.0.0.1:9", "m").run(ONE))
    assert refused.error is not None

    async def stall(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(script.word("Hi"))
        await asyncio.Event().wait()
        return response

    (unfinished,) = run_load(chat_server, stall, ONE)
    assert unfinished.error is not None and "Timeout" in unfinished.error
    assert unfinished.text == "Hi"


def test_requests_leave_when_due_though_earlier_ones_are_unanswered(
    chat_server: Any, script: Any
) -> None:
    arrived: list[str] = []
    all_here = asyncio.Event()

    async def handler(request: web.Request) -> Any:
        arrived.append((await request.json())["messages"][0]["content"])
        if len(arrived) == 5:
            all_here.set()
        await all_here.wait()
        return await replying(script.word("x"), script.finish(), script.done)(request)

    requests = [PlannedRequest(0.02 * i, f"{i}", 4) for i in reversed(range(5))]
    outcomes = run_load(chat_server, handler, requests)
    assert arrived == ["0", "1", "2", "3", "4"]
    assert [o.error for o in outcomes] == [None] * 5


def test_a_closed_loop_holds_its_number_of_clients_and_stops_at_its_end(
    chat_server: Any, script: Any
) -> None:
    open_now = 0
    most_open = 0

    async def handler(request: web.Request) -> Any:
        nonlocal open_now, most_open
        open_now += 1
        most_open = max(most_open, open_now)
        await asyncio.sleep(0.01)
        response = await replying(script.word("x"), script.finish(), script.done)(request)
        open_now -= 1
        return response

    async def run() -> list[Outcome]:
        async with chat_server(handler) as url:
            endless = iter(lambda: ONE[0], None)
            return await Load(url, "m").run_closed(endless, num_clients=3, duration_s=0.2)

    outcomes = asyncio.run(run())
    assert most_open == 3
    assert len(outcomes) > 3 and all(o.error is None for o in outcomes)
