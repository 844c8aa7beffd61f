"""What requests cost that end before their answer did: true use, however a client hangs up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from chairlift_engine.clock import MonotonicClock
from chairlift_engine.config import Capacity
from chairlift_engine.server.engine_server import EngineServer, LoadedModel, ServerSettings
from chairlift_engine.simulator import SimulatorRunner
from chairlift_engine.simulator_profile import Profile
from chairlift_engine.tokenizer import ByteTokenizer
from chairlift_gateway import estimate, metering, relay
from chairlift_gateway.metrics import GatewayMetrics
from chairlift_gateway.quota import leases, upkeep
from chairlift_protocol.wire import REQUEST_ID_HEADER

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("patient")]

PROMPT = "Snow"
PROMPT_TOKENS = 1 + len(PROMPT)  # a byte tokenizer's, with one for the beginning
STEP_MS = 5.0


@dataclass
class RealEngine:
    """The engine as it is, with a simulated model, in the test's event loop."""

    url: str
    server: EngineServer
    name: str = "r0"

    @property
    def num_made(self) -> int:
        """Tokens of all answers so far."""
        text = self.server.replica.serving.bridge.render_metrics().decode()
        name = "vllm:generation_tokens_total{"
        return int(float(next(ln for ln in text.splitlines() if ln.startswith(name)).split()[-1]))

    @property
    def num_running(self) -> int:
        load = self.server.replica.load
        return -1 if load is None else load.num_running

    @property
    def num_waiting(self) -> int:
        load = self.server.replica.load
        return -1 if load is None else load.num_waiting


@pytest.fixture
async def real_engine() -> AsyncIterator[RealEngine]:
    clock, tokenizer = MonotonicClock(), ByteTokenizer()
    profile = Profile(a_ms=STEP_MS, noise=0.0)
    capacity = Capacity(
        batch_size=8, step_tokens=256, num_blocks=2048, block_tokens=8, model_length_tokens=4096
    )
    loaded = LoadedModel(
        SimulatorRunner(profile, clock), tokenizer, capacity, tokenizer.eos_token_ids
    )
    server = EngineServer(
        ServerSettings("tiny", internal_token="pool-token"), lambda: loaded, clock
    )
    public, admin = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    bound = asyncio.Event()
    running = asyncio.create_task(server.run(public, admin, bound.set))
    await bound.wait()
    while server.replica.not_ready_because is not None:
        await asyncio.sleep(0.01)
    yield RealEngine(f"http://127.0.0.1:{public.getsockname()[1]}", server)
    server.stop()
    await running


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def breaks_once_told() -> tuple[asyncio.Event, Handler]:
    """An engine that ends the connection before its answer, once the event is set."""
    may_break = asyncio.Event()

    async def breaking(request: web.Request) -> web.StreamResponse:
        await may_break.wait()
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionError

    return may_break, breaking


@pytest.fixture
def hung(start_engine: Any, never: Any, metered: Any) -> Any:
    """An engine that never answers, and says that each request has `used` so much; the gateway
    before it, and its pool."""

    async def start(
        used: tuple[int, ...] | None = None, *, is_final: bool | None = True, limits: Any = None
    ) -> tuple[Any, Any, Any]:
        engine = await start_engine(never)
        engine.used, engine.is_final = used, is_final
        return engine, *await metered(engine, limits=limits)

    return start


@contextlib.asynccontextmanager
async def asking(gateway: Any, body: object, path: str = "/v1/completions") -> AsyncIterator[None]:
    """A client that leaves when this ends."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def ask() -> None:
        async with gateway.post(path, data=data) as answer:
            await answer.read()

    task = asyncio.create_task(ask())
    try:
        yield
    finally:
        task.cancel()


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_the_real_engine_is_charged_what_it_made(
    real_engine: RealEngine, metered: Any, until: Any, num_choices: int, is_stream: bool
) -> None:
    gateway, pool = await metered(real_engine)
    body = {
        "model": "tiny", "prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True,
        "n": num_choices, "stream": is_stream,
    }  # fmt: skip
    async with asking(gateway, body):
        await until(lambda: real_engine.num_made >= 60, within_s=30.0)
    await until(lambda: real_engine.num_running == 0)
    await until(lambda: pool.num_leases("acme") == 0)
    charged = pool.used("acme") - PROMPT_TOKENS
    assert charged == real_engine.num_made >= 60


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_at_whichever_token_a_client_leaves_all_that_was_made_is_charged_once(
    real_engine: RealEngine, metered: Any, until: Any, num_choices: int, is_stream: bool
) -> None:
    """The last one too, when its answer may be on the way."""
    gateway, pool = await metered(real_engine)
    num_tokens = 4 * num_choices
    body = {
        "model": "tiny", "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True,
        "n": num_choices, "stream": is_stream,
    }  # fmt: skip

    async def leave_after(num_made: int) -> None:
        made_before = real_engine.num_made
        async with asking(gateway, body):
            await until(lambda: real_engine.num_made >= made_before + num_made)
        await until(lambda: pool.num_leases("acme") == 0)

    for num_made in range(1, num_tokens + 1):
        await leave_after(num_made)
    assert pool.used("acme") == num_tokens * PROMPT_TOKENS + real_engine.num_made


async def test_a_client_that_leaves_the_engines_queue_is_charged_its_prompt(
    real_engine: RealEngine, metered: Any, until: Any
) -> None:
    gateway, pool = await metered(real_engine)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True}
    async with asking(gateway, {**body, "n": 8}):
        await until(lambda: real_engine.num_waiting == 1)  # a tenant alone leaves one slot free
        async with asking(gateway, body):
            await until(lambda: real_engine.num_waiting == 2)
        await until(lambda: pool.num_leases("acme") == 1)
        assert pool.used("acme") == PROMPT_TOKENS


async def test_a_client_that_leaves_while_no_engine_is_there_is_charged_nothing(
    metered: Any, until: Any
) -> None:
    gateway, pool = await metered(hold_s=30.0)
    async with asking(gateway, {"model": "tiny", "prompt": PROMPT}):
        await until(lambda: pool.num_leases("acme") == 1)
    await until(lambda: pool.num_leases("acme") == 0)
    assert pool.used("acme") == 0


async def test_hanging_up_again_and_again_runs_into_the_limit_as_answers_do(
    real_engine: RealEngine, metered: Any, until: Any
) -> None:
    """However small the tenant's answers were before, by which reservations go."""
    limits = {"tokens_per_minute": 60, "burst_ms": 60_000}
    gateway, pool = await metered(real_engine, limits=limits)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}
    for _ in range(4):
        async with gateway.post(data=json.dumps(body).encode()) as answer:
            assert answer.status == 200
    made_before = real_engine.num_made
    async with asking(gateway, {**body, "max_tokens": 2000}):
        await until(lambda: real_engine.num_made >= made_before + 120, within_s=30.0)
    await until(lambda: pool.num_leases("acme") == 0)
    async with gateway.post(data=json.dumps(body).encode()) as answer:
        assert answer.status == 429


@pytest.mark.parametrize("is_final", [True, None])
async def test_the_engine_is_asked_once_by_the_name_that_it_was_given_and_told_to_end(
    hung: Any, until: Any, is_final: bool | None
) -> None:
    """Also one of an earlier release, which does not say whether that is final."""
    engine, gateway, pool = await hung((7, 300), is_final=is_final)
    async with asking(gateway, {"max_tokens": 1000}):
        await engine.asked.wait()
    await until(lambda: pool.used("acme") == 307)
    name = engine.requests[0].headers[REQUEST_ID_HEADER]
    assert engine.usage_asked == [{"requests": [name], "end": True}]
    await gateway.until_sample(307, "chairlift_gateway_tenant_tokens_total", "interactive", "acme")


async def test_an_engine_in_a_long_step_is_asked_until_that_has_ended(
    hung: Any, until: Any
) -> None:
    engine, gateway, pool = await hung((7, 300), is_final=False)
    async with asking(gateway, {"max_tokens": 1000}):
        await engine.asked.wait()
    await until(lambda: len(engine.usage_asked) >= 2)
    assert pool.num_leases("acme") == 1
    engine.used, engine.is_final = (7, 303), True
    await until(lambda: pool.num_leases("acme") == 0)
    assert pool.used("acme") == 310


async def test_an_engine_that_answers_at_once_is_asked_again_after_a_while(
    hung: Any, until: Any
) -> None:
    engine, gateway, pool = await hung((7, 300), is_final=False)
    async with asking(gateway, {"max_tokens": 1000}):
        await engine.asked.wait()
    await until(lambda: engine.usage_asked)
    num_before, since_s = len(engine.usage_asked), time.monotonic()
    await until(lambda: len(engine.usage_asked) >= num_before + 4)
    took_s, engine.is_final = time.monotonic() - since_s, True
    await until(lambda: pool.num_leases("acme") == 0)
    assert took_s > 3 * metering.ASK_AGAIN_S


async def test_tokens_that_a_client_did_not_wait_for_are_charged_in_a_stream_too(
    start_engine: Any, endless: Any, metered: Any, token: Any, until: Any
) -> None:
    engine = await start_engine(endless)
    engine.used = (7, 40)
    gateway, pool = await metered(engine)
    async with gateway.post(data=b'{"stream": true}') as answer:
        await answer.content.readexactly(len(token("a")))
    await until(lambda: pool.used("acme") == 47)


@pytest.mark.parametrize(
    ("used", "body", "charged"),
    [
        # Of an engine that cannot be asked: all that it could have made.
        (None, b'{"max_tokens": 500}', 5 + 500),
        (None, b'{"max_tokens": 500, "n": 2, "x": {"stream": true}}', 13 + 1000),
        (None, b'{"stream": true}', 4),
        # It was never begun: its engine was still reading it.
        ((), b'{"max_tokens": 500}', 5),
    ],
)
async def test_what_no_engine_tells_is_bounded_by_what_the_request_allows(
    hung: Any, until: Any, monkeypatch: pytest.MonkeyPatch,
    used: tuple[int, ...] | None, body: bytes, charged: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(estimate, "FASTEST_TOKENS_PER_S", 10**9)
    engine, gateway, pool = await hung(used)
    async with asking(gateway, body):
        await engine.asked.wait()
    await until(lambda: engine.usage_asked and pool.num_leases("acme") == 0)
    assert pool.used("acme") == charged


@pytest.mark.parametrize(
    "told",
    ["", "ok", "[]", "{}", '{"used": 5}', '{"used": {"a": {}}}', "[" * 100_000,
     '{"used": {"a": {"prompt_tokens": Infinity, "completion_tokens": 1}}}'],
)  # fmt: skip
async def test_an_engine_that_means_something_else_by_the_question_cannot_be_asked(
    hung: Any, until: Any, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    monkeypatch.setattr(estimate, "FASTEST_TOKENS_PER_S", 10**9)

    async def other(request: web.Request) -> web.StreamResponse:
        return web.Response(text=told)

    engine, gateway, pool = await hung()
    monkeypatch.setattr(engine, "_usage", other)
    async with asking(gateway, b'{"max_tokens": 500}'):
        await engine.asked.wait()
    await until(lambda: pool.used("acme") == 5 + 500)


async def test_an_engine_that_points_elsewhere_cannot_be_asked(
    start_engine: Any, never: Any, hung: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's token goes to no address that an answer names."""
    other = await start_engine(never, name="r1")
    other.used = (7, 300)

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect(other.url + request.path)

    monkeypatch.setattr(estimate, "FASTEST_TOKENS_PER_S", 10**9)
    engine, gateway, pool = await hung()
    monkeypatch.setattr(engine, "_usage", elsewhere)
    async with asking(gateway, b'{"max_tokens": 500}'):
        await engine.asked.wait()
    await until(lambda: pool.used("acme") == 5 + 500)
    assert other.usage_asked == []


async def test_a_request_for_more_choices_than_there_can_be_costs_no_more_than_those(
    hung: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "FASTEST_TOKENS_PER_S", 10**9)
    engine, gateway, pool = await hung(limits={"tokens_per_minute": 60_000})
    body = b'{"max_tokens": 500, "n": 1%s}' % (b"0" * 400)
    async with asking(gateway, body):
        await engine.asked.wait()
    await until(lambda: pool.num_leases("acme") == 0)
    assert pool.used("acme") == estimate.prompt_tokens(body) + 500 * 128


async def test_a_large_stream_is_charged_what_came_of_it(
    start_engine: Any, endless: Any, metered: Any, token: Any, until: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(estimate, "MAX_PARSED_BYTES", 5)
    monkeypatch.setattr(estimate, "FASTEST_TOKENS_PER_S", 10**9)

    engine = await start_engine(endless)
    gateway, pool = await metered(engine)
    async with gateway.post(data=b'{"stream": true}') as answer:
        await answer.content.readexactly(len(token("a")))
    await until(lambda: pool.num_leases("acme") == 0)
    assert pool.used("acme") == 4 + 1


async def test_a_lease_ends_also_where_counting_fails(
    start_engine: Any, metered: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OverflowError

    monkeypatch.setattr(GatewayMetrics, "count_tenant_tokens", fail)
    engine = await start_engine()
    gateway, pool = await metered(engine)
    async with gateway.post() as answer:
        await answer.read()
    await until(lambda: pool.used("acme") > 0)
    assert pool.num_leases("acme") == 0


async def test_a_running_whole_answers_lease_says_how_far_it_is_for_a_gateway_that_is_killed(
    hung: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metering, "ASK_EVERY_S", 0.02)
    monkeypatch.setattr(leases, "RENEW_AFTER_S", 0.05)
    monkeypatch.setattr(upkeep, "ROUND_S", 0.02)
    engine, gateway, pool = await hung((7, 300))

    def reserved() -> int:
        return int(pool.client.hget(pool.keys.account("acme/interactive"), "reserved") or 0)

    async with asking(gateway, {"max_tokens": 1000}):
        await until(lambda: reserved() == 307)
        assert not any(asked["end"] for asked in engine.usage_asked)
    await until(lambda: reserved() == 0)


async def test_counting_tokens_holds_a_place_and_its_engine_is_never_asked_about_it(
    hung: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metering, "ASK_EVERY_S", 0.02)
    engine, gateway, pool = await hung((7, 300), limits={"concurrency": 2})
    async with asking(gateway, {}, "/tokenize"):
        await until(lambda: len(engine.requests) == 1)
        async with asking(gateway, {"max_tokens": 1000}):
            await until(lambda: engine.usage_asked and pool.num_leases("acme") == 2)
            async with gateway.post("/detokenize") as answer:
                assert answer.status == 429
        await until(lambda: pool.num_leases("acme") == 1)
        assert pool.used("acme") == 307
    await until(lambda: pool.num_leases("acme") == 0)
    assert pool.used("acme") == 307
    asked_about = {name for asked in engine.usage_asked for name in asked["requests"]}
    assert asked_about == {engine.requests[1].headers[REQUEST_ID_HEADER]}


async def test_an_answer_larger_than_the_gateway_holds_is_charged_what_the_engine_made(
    real_engine: RealEngine, metered: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "LONGEST_WHOLE_ANSWER_BYTES", 100)
    gateway, pool = await metered(real_engine)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 50, "ignore_eos": True}
    async with gateway.post(data=json.dumps(body).encode()) as answer:
        assert answer.status == 502
    await until(lambda: pool.num_leases("acme") == 0)
    assert pool.used("acme") == PROMPT_TOKENS + 50
    for path, asked in (
        ("/tokenize", {"prompt": "x" * 200}),
        ("/detokenize", {"tokens": [97] * 200}),
    ):
        async with gateway.post(path, data=json.dumps(asked).encode()) as answer:
            assert answer.status == 502
    await until(lambda: pool.num_leases("acme") == 0)
    assert pool.used("acme") == PROMPT_TOKENS + 50


async def test_a_request_that_is_tried_twice_is_charged_once(
    start_engine: Any, metered: Any, write_endpoints: Any, until: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(metering, "ASK_EVERY_S", 0.02)
    may_break, breaking = breaks_once_told()

    async def whole(request: web.Request) -> web.StreamResponse:
        usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
        return web.json_response({"choices": [{"text": "hello"}], "usage": usage})

    first, second = await start_engine(breaking), await start_engine(whole, name="r1")
    first.used = (7, 300)
    gateway, pool = await metered(first)
    asked = asyncio.create_task(gateway.post().__aenter__())
    await until(lambda: len(first.usage_asked) >= 2)
    write_endpoints(second)
    may_break.set()
    assert (await asked).status == 200
    await until(lambda: pool.num_leases("acme") == 0)
    assert pool.used("acme") == 12


@pytest.mark.parametrize("is_held", [False, True])
async def test_an_engine_that_dies_before_its_answer_costs_nothing_though_it_said_what_it_made(
    start_engine: Any, metered: Any, write_endpoints: Any, unused_url: str, until: Any,
    monkeypatch: pytest.MonkeyPatch, is_held: bool,
) -> None:  # fmt: skip
    """Nor where the next cannot be reached, or where there is none."""

    class Nowhere:
        name, url = "r1", unused_url

    monkeypatch.setattr(metering, "ASK_EVERY_S", 0.02)
    may_break, breaking = breaks_once_told()
    engine = await start_engine(breaking)
    engine.used = (7, 300)
    gateway, pool = await metered(engine, hold_s=0.1)
    asked = asyncio.create_task(gateway.post().__aenter__())
    await until(lambda: len(engine.usage_asked) >= 2)
    write_endpoints(*([] if is_held else [Nowhere()]))
    may_break.set()
    assert (await asked).status == 503
    await until(lambda: pool.num_leases("acme") == 0)
    assert pool.used("acme") == 0


async def test_a_client_that_leaves_the_second_engine_is_not_charged_what_the_first_made(
    start_engine: Any, never: Any, metered: Any, write_endpoints: Any, until: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(metering, "ASK_EVERY_S", 0.02)
    may_break, breaking = breaks_once_told()
    first, second = await start_engine(breaking), await start_engine(never, name="r1")
    first.used, second.used = (7, 300), ()
    gateway, pool = await metered(first)
    async with asking(gateway, b'{"max_tokens": 500}'):
        await until(lambda: len(first.usage_asked) >= 2)
        write_endpoints(second)
        may_break.set()
        await second.asked.wait()
    await until(lambda: pool.num_leases("acme") == 0)
    assert pool.used("acme") == 5


async def test_an_engine_that_dies_in_a_whole_answer_costs_what_it_was_known_to_have_made(
    start_engine: Any, metered: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metering, "ASK_EVERY_S", 0.02)
    may_break = asyncio.Event()

    async def breaking(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await may_break.wait()
        await response.prepare(request)
        await response.write(b'{"choices"')
        assert request.transport is not None
        request.transport.abort()
        return response

    engine = await start_engine(breaking)
    engine.used = (7, 300)
    gateway, pool = await metered(engine)
    asked = asyncio.create_task(gateway.post().__aenter__())
    await until(lambda: len(engine.usage_asked) >= 2)
    may_break.set()
    assert (await asked).status == 502
    await until(lambda: pool.num_leases("acme") == 0)
    assert pool.used("acme") == 307


async def test_an_engine_that_is_gone_when_it_is_asked_costs_what_was_reserved(
    hung: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dead(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionError

    engine, gateway, pool = await hung()
    monkeypatch.setattr(engine, "_usage", dead)
    async with asking(gateway, b'{"max_tokens": 50}'):
        await engine.asked.wait()
    await until(lambda: pool.used("acme") == 5 + 50)


async def test_a_gateway_that_cuts_requests_off_charges_what_their_engines_made(
    hung: Any, until: Any
) -> None:
    engine, gateway, pool = await hung((7, 300))
    async with asking(gateway, {"max_tokens": 1000}):
        await engine.asked.wait()
        gateway.gateway.cut_off()
        await until(lambda: pool.used("acme") == 307)


async def test_a_gateway_that_cuts_requests_off_waits_for_no_engine_in_a_long_step(
    hung: Any, until: Any
) -> None:
    """Nor for one that it has begun to ask, because a client had left."""
    engine, gateway, pool = await hung((7, 300), is_final=False)
    async with asking(gateway, {"max_tokens": 1000}):
        await engine.asked.wait()
    await until(lambda: len(engine.usage_asked) >= 2)
    async with asking(gateway, {"max_tokens": 1000}):
        await until(lambda: len(engine.requests) == 2)
        gateway.gateway.cut_off()
        await until(lambda: pool.num_leases("acme") == 0)
    assert pool.used("acme") == 2 * 307
