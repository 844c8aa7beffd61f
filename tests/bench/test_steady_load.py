from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from chairlift_bench import steady_load
from chairlift_bench.steady_load import Steady, plan

LOADS = st.builds(
    Steady,
    requests_per_s=st.floats(0.1, 20.0),
    duration_s=st.floats(1.0, 30.0),
    prompt_chars=st.integers(1, 300),
    max_tokens=st.integers(1, 64),
    seed=st.integers(0, 9),
)


@given(LOADS)
def test_arrivals_are_in_order_inside_the_time_and_no_two_prompts_begin_alike(
    load: Steady,
) -> None:
    requests = plan(load)
    due = [request.due_s for request in requests]
    assert due == sorted(due) and all(0 < at < load.duration_s for at in due)
    prompts = [request.prompt for request in requests]
    assert len(set(prompts)) == len(prompts)
    assert all(len(prompt) >= load.prompt_chars for prompt in prompts)
    assert requests == plan(load)


def test_the_rate_is_met_on_the_long_run() -> None:
    assert len(plan(Steady(5.0, 400.0, 10, 8, seed=1))) == pytest.approx(2000, rel=0.1)


@pytest.mark.parametrize("fails", [False, True], ids=["served", "refused"])
def test_the_last_line_says_what_came_of_it_and_the_exit_code_whether_all_went_well(
    chat_server: Any, script: Any, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if fails:
            return web.Response(status=503, text="no replica")
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (script.word("Hi"), script.finish(), script.usage(9, 1), script.done):
            await response.write(piece)
        return response

    async def run() -> int:
        async with chat_server(handler) as url:
            arguments = [url, "m", "--requests-per-s", "200", "--duration-s", "0.1"]
            return await asyncio.to_thread(steady_load.main, arguments)

    exit_code = asyncio.run(run())
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["num_requests"] > 0
    assert (exit_code, summary["num_failed"]) == ((1, summary["num_requests"]) if fails else (0, 0))
    assert fails is ("HTTP 503: no replica" in summary["errors"])
