from __future__ import annotations

import dataclasses
import json
import threading
import time

import pytest

from chairlift_engine.tokenizer import ByteTokenizer


def test_health_answers_while_the_model_loads(start_engine, eventually) -> None:
    go = threading.Event()

    def load(loaded):
        assert go.wait(10)
        return loaded

    engine = start_engine(load, wait_ready=False)
    assert engine.client.get("/health/live").status_code == 200
    ready = engine.client.get("/health/ready")
    assert (ready.status_code, ready.json()["reason"]) == (503, "loading")
    assert "x-chairlift-load" not in ready.headers  # unknown is not idle
    refused = engine.complete("x")
    assert refused.status_code == 503 and "retry-after" in refused.headers
    assert engine.client.get("/load").status_code == 503
    go.set()
    eventually(lambda: engine.client.get("/health/ready").status_code == 200)
    assert engine.complete("x").status_code == 200


def test_a_load_that_fails_ends_the_server_with_its_error(start_engine) -> None:
    class NoModel(Exception):
        pass

    def load(loaded):
        raise NoModel

    caught: list[BaseException] = []
    hook, threading.excepthook = threading.excepthook, lambda args: caught.append(args.exc_value)
    try:
        engine = start_engine(load, wait_ready=False)
        engine.thread.join(10)
    finally:
        threading.excepthook = hook
    assert isinstance(caught[0], NoModel)


def test_stopping_finishes_streams_and_then_ends_with_code_0(start_engine, eventually) -> None:
    engine = start_engine()
    engine.runner.hold()
    body = {"model": "echo", "prompt": "abcdef", "max_tokens": 6, "stream": True}
    with engine.open_raw("/v1/completions", body) as connection:
        eventually(lambda: engine.server.replica.num_in_flight == 1)
        engine.loop.call_soon_threadsafe(engine.server.stop)
        eventually(lambda: engine.client.get("/health/ready").status_code == 503)
        assert engine.complete("x").status_code == 503
        engine.runner.release()
        with connection.makefile("r") as received:
            text = received.read()
    assert "data: [DONE]" in text and '"finish_reason":"length"' in text
    assert engine.join() == 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_outlives_the_drain_time_gets_an_error(start_engine, eventually, stream) -> None:
    engine = start_engine(drain_s=0.05)
    engine.runner.hold()
    body = {"model": "echo", "prompt": "abcdef", "max_tokens": 6, "stream": stream}
    with engine.open_raw("/v1/completions", body) as connection:
        engine.runner.allow(1)
        eventually(lambda: engine.server.replica.load.num_running == 1)
        engine.loop.call_soon_threadsafe(engine.server.stop)
        with connection.makefile("r") as received:
            text = received.read()
    assert '"code":"shutting_down"' in text
    assert ("503 Service Unavailable" in text) != stream
    assert "[DONE]" not in text and '"finish_reason":"' not in text
    engine.runner.release()
    assert engine.join() == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_fails_its_requests_its_health_and_its_process(
    start_engine, eventually, stream
) -> None:
    engine = start_engine()
    engine.runner.hold()
    body = {"model": "echo", "prompt": "abcdef", "max_tokens": 6, "stream": stream}
    with engine.open_raw("/v1/completions", body) as connection:
        engine.runner.allow(1)
        eventually(lambda: engine.server.replica.load.num_running == 1)
        engine.runner.fail = True
        engine.runner.release()
        died_s = time.monotonic()
        eventually(lambda: engine.client.get("/health/live").status_code == 503)
        assert engine.client.get("/health/ready").status_code == 503
        assert engine.complete("x").status_code == 503
        with connection.makefile("r") as received:
            text = received.read()
    assert '"code":"engine_failed"' in text
    assert ("500 Internal Server Error" in text) != stream
    assert "[DONE]" not in text and '"finish_reason":"' not in text
    assert engine.join() == 1
    assert time.monotonic() - died_s < 2


def test_an_engine_that_does_not_step_is_not_alive(engine, eventually) -> None:
    engine.runner.hold()
    replica, serving = engine.server.replica, engine.serving
    with engine.open_raw("/v1/completions", {"model": "echo", "prompt": "x", "max_tokens": 1}):
        assert engine.runner.in_step.wait(5)
        # Held inside a step, so nobody else writes the heartbeat.
        serving.engine.heartbeat_s -= 100
        assert replica.is_alive, "one long step on a slow CPU is life"
        serving.engine.heartbeat_s -= 300
        assert engine.client.get("/health/live").status_code == 503
        engine.runner.release()
        eventually(lambda: replica.is_alive)


def test_health_answers_at_once_while_a_megabyte_is_tokenised(start_engine, eventually) -> None:
    tokenising, go = threading.Event(), threading.Event()

    class SlowTokenizer(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            if len(text) > 100_000:
                tokenising.set()
                assert go.wait(10)
            return super().encode(text)

    engine = start_engine(lambda loaded: dataclasses.replace(loaded, tokenizer=SlowTokenizer()))
    body = {"model": "echo", "prompt": "x" * 2**20}
    with engine.open_raw("/v1/completions", body) as connection:
        assert tokenising.wait(5)
        started_s = time.monotonic()
        assert engine.client.get("/health/live").status_code == 200
        assert engine.complete("short").status_code == 200
        assert time.monotonic() - started_s < 1
        go.set()
        with connection.makefile("r") as received:
            assert "context_length_exceeded" in received.read()


def test_an_undecodable_answer_fails_alone(start_engine) -> None:
    class BrittleTokenizer(ByteTokenizer):
        def decode(self, ids) -> str:
            if ord("!") in ids:
                raise RuntimeError("no text for this")
            return super().decode(ids)

    engine = start_engine(lambda loaded: dataclasses.replace(loaded, tokenizer=BrittleTokenizer()))
    everything = engine.free_list()
    answer = engine.complete("a!b", max_tokens=3)
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    streamed = engine.complete(["ok", "a!b"], max_tokens=3, stream=True).text
    error = json.loads(streamed.rstrip().splitlines()[-1].removeprefix("data: "))
    assert error["error"]["code"] == "engine_failed"
    assert engine.complete("fine", max_tokens=4).json()["choices"][0]["text"] == "fine"
    assert engine.free_list() == everything
