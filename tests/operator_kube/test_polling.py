"""One batch of queries for all pools of a Prometheus, read without waiting; a server that only
pretends answers here, a real one in tests/prometheus.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from chairlift_operator.kube.operator_metrics import OperatorMetrics
from chairlift_operator.kube.polling import (
    UNREAD_S,
    WINDOWS_EVERY_S,
    WINDOWS_TOO_OLD_S,
    Polling,
    PrometheusReader,
    counted_thresholds_ms,
    prometheus_url,
)
from chairlift_operator.kube.settings import LOOK_S, Settings, SettingsError
from chairlift_operator.prometheus.asking import MAX_BODY_BYTES, PrometheusClient
from chairlift_operator.prometheus.batch import PoolPods
from chairlift_operator.prometheus.heartbeats import Pod
from chairlift_operator.prometheus.queries import selector, window_queries
from chairlift_operator.prometheus.samples import PodSeries
from chairlift_operator.signals import Unknown
from chairlift_protocol import metrics
from chairlift_protocol.wire import RequestClass

Json = dict[str, Any]
Turned = Any  # conftest's
POOL = PoolPods({RequestClass.INTERACTIVE: [Pod(("team", "chat-a"), 0.0)]}, [], {})


class Pretended:
    """Answers every query by `result`; notes what was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []
        self.result: Callable[[str], list[Json]] = lambda query: []
        self.answer: Callable[[], web.Response] | None = None
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        form = {str(name): str(value) for name, value in (await request.post()).items()}
        self.asked.append(form)
        if self.answer is not None:
            return self.answer()
        result = self.result(form["query"])
        kind = "matrix" if result and "values" in result[0] else "vector"
        return web.json_response(
            {"status": "success", "data": {"resultType": kind, "result": result}}
        )


@asynccontextmanager
async def pretended() -> AsyncIterator[tuple[Pretended, aiohttp.ClientSession]]:
    server = Pretended()
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/api/v1/query", server.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession() as session:
            yield server, session
    finally:
        await runner.cleanup()


class Clock:
    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


Body = Callable[[Pretended, PrometheusReader, Clock], Any]


def runs(body: Body) -> None:
    async def main() -> None:
        async with pretended() as (server, session):
            clock = Clock()
            await body(
                server, PrometheusReader(PrometheusClient(session, server.url), clock), clock
            )

    asyncio.run(main())


def test_a_hundred_pools_cost_as_many_queries_as_one_and_one_moment() -> None:
    async def body(server: Pretended, reader: PrometheusReader, clock: Clock) -> None:
        for number in range(100):
            pods = {RequestClass.INTERACTIVE: [Pod((f"team-{number}", "chat-a"), clock.now_s)]}
            reader.windows((f"team-{number}", "chat"), PoolPods(pods, [], {}))
        await reader.poll_windows()
        assert len(server.asked) == len(window_queries(selector([]), 60.0))
        assert {form["time"] for form in server.asked} == {"1000000.000"}
        assert all("team\\\\-99" in form["query"] for form in server.asked)

    runs(body)


def test_windows_are_due_at_their_interval_and_at_once_for_a_new_pool() -> None:
    async def body(server: Pretended, reader: PrometheusReader, clock: Clock) -> None:
        reader.windows(("team", "chat"), POOL)
        assert reader.is_due
        await reader.poll_windows()
        assert not reader.is_due
        clock.now_s += WINDOWS_EVERY_S / 2
        reader.windows(("team", "chat"), POOL)
        assert not reader.is_due
        reader.windows(("team", "search"), POOL)
        assert reader.is_due
        await reader.poll_windows()
        clock.now_s += WINDOWS_EVERY_S / 2
        reader.windows(("team", "chat"), POOL)
        clock.now_s += WINDOWS_EVERY_S / 2
        assert reader.is_due

    runs(body)


def test_what_no_pool_reads_is_not_asked_for() -> None:
    async def body(server: Pretended, reader: PrometheusReader, clock: Clock) -> None:
        reader.windows(("team", "chat"), POOL)
        reader.sample(("team", "chat-a"))
        reader.forget_unread()
        assert not reader.is_unread and reader.is_missing_samples
        clock.now_s += UNREAD_S + 1
        reader.forget_unread()
        assert reader.is_unread and not reader.is_missing_samples

    runs(body)


def test_answers_of_long_ago_are_no_answers() -> None:
    async def body(server: Pretended, reader: PrometheusReader, clock: Clock) -> None:
        reader.windows(("team", "chat"), POOL)
        await reader.poll_windows()
        clock.now_s += WINDOWS_TOO_OLD_S + 10
        windows = reader.windows(("team", "chat"), POOL)
        assert windows.trouble is not None
        assert windows.trouble.message.endswith("the last answer is 100 s old")
        assert all(isinstance(q.signal, Unknown) for q in windows.quantities)

    runs(body)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: web.Response(status=503, text="try later"), "HTTP 503, and no JSON"),
        (lambda: web.Response(text="<html>"), "HTTP 200, and no JSON"),
        (lambda: web.Response(status=302, headers={"location": "/"}), "HTTP 302, and no JSON"),
        (lambda: web.json_response({"secret": "x"}), "that is no answer of Prometheus"),
        (
            lambda: web.json_response({"status": "error", "errorType": "timeout", "error": "slow"}),
            "timeout: slow",
        ),
        (
            lambda: web.Response(body=b" " * (MAX_BODY_BYTES + 1)),
            f"the answer has more than {MAX_BODY_BYTES} bytes",
        ),
        (lambda: web.Response(body=b"[" * 100_000), "HTTP 200, and no JSON"),
    ],
)
def test_whatever_answers_a_failure_is_one_sentence(
    answer: Callable[[], web.Response], said: str
) -> None:
    async def body(server: Pretended, reader: PrometheusReader, clock: Clock) -> None:
        server.answer = answer
        answers = await reader._client.ask({"up": "up"}, 1.0, 20.0)
        assert answers["up"].failure == said
        assert answers["up"].series == ()

    runs(body)


def test_a_silent_server_is_given_up_on() -> None:
    async def main() -> None:
        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with aiohttp.ClientSession() as session:
            answers = await PrometheusClient(session, url).ask({"up": "up"}, 1.0, 0.1)
        assert answers["up"].failure == "no answer within 0.1 s"
        server.close()

    asyncio.run(main())


def test_the_loop_asks_what_pools_read_and_counts_the_answers() -> None:
    async def main() -> None:
        async with pretended() as (server, session):
            clock, counted = Clock(), OperatorMetrics()
            polling = Polling(session, clock, counted.count_answer)
            reader = polling.of(server.url)
            assert polling.of(server.url) is reader
            reader.windows(("team", "chat"), POOL)
            reader.sample(("team", "chat-a"))
            server.answer = lambda: web.Response(status=500)
            running = asyncio.create_task(polling.run())
            async with asyncio.timeout(10):
                while _count(counted, "sample") < 1 or _count(counted, "kvPeak[5m]") < 1:
                    await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.wait({running})
            told = reader.sample(("team", "chat-a"))
            assert told == "Prometheus: HTTP 500, and no JSON"

    asyncio.run(main())


def _count(counted: OperatorMetrics, query: str) -> float:
    labels = {"query": query, "outcome": "failed"}
    name = "chairlift_operator_prometheus_queries_total"
    return counted.registry.get_sample_value(name, labels) or 0.0


def _scraped(query: str, pod: str, at_s: float) -> list[Json]:
    """What Prometheus has of an engine at rest, for the query of samples only."""
    if "__name__" not in query:
        return []
    names = (
        metrics.STEP_SECONDS,
        metrics.STEPS,
        metrics.STEP_DECODE_SEQS,
        metrics.STEP_PREFILL_TOKENS,
        metrics.STEP_KV_TOKENS,
        metrics.NUM_REQUESTS_RUNNING,
        metrics.NUM_REQUESTS_WAITING,
    )
    labels = {"namespace": "team", "pod": pod, "job": "pods", "instance": "1:8000"}
    return [
        {"metric": {"__name__": name, **labels}, "values": [[at_s - 5, "1"], [at_s, "2"]]}
        for name in names
    ]


def test_an_engine_that_the_operator_cannot_read_is_read_from_prometheus(run: Any) -> None:
    """And where Prometheus has it not either, both reasons are told."""

    async def body(pool: Turned) -> None:
        async with pretended() as (server, session):
            polling = Polling(session, pool.clock, lambda answer: None)
            pool.tools = replace(pool.tools, polling=polling)
            pool.set_spec(metrics={"source": "Prometheus", "url": server.url + "/"})
            await pool.until(lambda: pool.status.get("interactive", {}).get("ready") == 1)
            (name, engine), *_ = pool.kube.engines().items()
            engine.metrics_are_refused = True
            reader = polling.of(server.url)
            await pool.turn(2)
            assert "503" in pool.condition("MetricsAvailable")["message"]
            assert (
                "Prometheus: no sample of it yet" in pool.condition("MetricsAvailable")["message"]
            )
            server.result = lambda query: _scraped(query, name, pool.clock.now_s - 2.0)
            for _ in range(3):
                await reader.poll_samples()
                await pool.turn()
            told = reader.sample(("team", name))
            assert isinstance(told, PodSeries) and told.engine().num_running == 2.0
            (report, *_) = pool.controller._last.plan.replicas
            assert (report.source, report.num_running) == ("Prometheus: sample", 2.0)

    run(body)


def test_a_pool_whose_prometheus_is_away_is_tuned_and_says_so(run: Any) -> None:
    async def body(pool: Turned) -> None:
        async with pretended() as (server, session):
            polling = Polling(session, pool.clock, lambda answer: None)
            pool.tools = replace(pool.tools, polling=polling)
            server.answer = lambda: web.Response(status=503)
            pool.set_spec(metrics={"source": "Prometheus", "url": server.url})
            await pool.until(lambda: pool.status.get("interactive", {}).get("policyGeneration"))
            await polling.of(server.url).poll_windows()
            await pool.turn(2)
            condition = pool.condition("MetricsAvailable")
            assert (condition["status"], condition["reason"]) == ("False", "QueryFailed")
            assert condition["message"] == (
                "Prometheus, query running: HTTP 503, and no JSON; replicas do not shrink until it "
                "is known."
            )

    run(body)


@pytest.mark.parametrize(
    ("section", "own", "expected"),
    [
        ({}, None, None),
        ({}, "http://ours:9090", "http://ours:9090"),
        ({"source": "Direct"}, "http://ours:9090", None),
        ({"source": "Prometheus"}, "http://ours:9090", "http://ours:9090"),
        ({"source": "Prometheus", "url": "http://x/p/"}, "http://ours:9090", "http://x/p"),
        ({"source": "Prometheus"}, None, None),
    ],
)
def test_a_pools_own_prometheus_comes_before_the_operators(
    make_pool: Any, section: Json, own: str | None, expected: str | None
) -> None:
    settings = Settings.from_environment(
        {"POD_NAME": "o", "POD_NAMESPACE": "n", "CHAIRLIFT_PROMETHEUS_URL": own or ""}
    )
    assert prometheus_url(make_pool(metrics=section), settings) == expected


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("CHAIRLIFT_PROMETHEUS_URL", "prometheus:9090", "must look like http"),
        ("CHAIRLIFT_METRICS_PORT", "http", "must be a port"),
        ("CHAIRLIFT_METRICS_PORT", "80000", "must be a port"),
    ],
)
def test_a_value_that_is_none_ends_the_operator_with_the_variable(
    variable: str, value: str, sentence: str
) -> None:
    with pytest.raises(SettingsError, match=f"{variable}: {sentence}"):
        Settings.from_environment({"POD_NAME": "o", "POD_NAMESPACE": "n", variable: value})


def test_windows_are_counted_against_the_thresholds_of_the_spec(make_pool: Any) -> None:
    slo = {"interTokenLatency": {"threshold": "40ms"}, "timeToFirstToken": {"threshold": "2s"}}
    pool = make_pool(
        interactive={"slo": slo}, batch={"slo": {"maximumWait": "5m"}, "borrowing": {}}
    )
    assert counted_thresholds_ms(pool) == {
        (RequestClass.INTERACTIVE, "itl"): 40.0,
        (RequestClass.INTERACTIVE, "ttft"): 2000.0,
        (RequestClass.BATCH, "ttft"): 300_000.0,
    }


def test_a_pool_at_rest_still_knows_its_windows_at_its_next_look() -> None:
    """It looks seldom; were it forgotten meanwhile, each look would find nothing asked."""

    async def body(server: Pretended, reader: PrometheusReader, clock: Clock) -> None:
        reader.windows(("team", "chat"), POOL)
        await reader.poll_windows()
        for _ in range(4):
            clock.now_s += LOOK_S / 2
            assert reader.is_due
            await reader.poll_windows()
            clock.now_s += LOOK_S / 2
            await reader.poll_windows()
            told = reader.windows(("team", "chat"), POOL).trouble
            assert told is not None and "not been asked" not in told.message

    runs(body)


def test_prometheus_without_an_address_is_said_and_is_not_taken_for_well(run: Any) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec(metrics={"source": "Prometheus"})
        await pool.turn(4)
        told = pool.condition("MetricsAvailable")
        assert (told["status"], told["reason"]) == ("False", "NoUrl")
        assert "set spec.metrics.url, or the chart's prometheus.url" in told["message"]
        pool.set_spec()
        await pool.turn(2)
        assert pool.condition("MetricsAvailable")["status"] == "True"

    run(body)
