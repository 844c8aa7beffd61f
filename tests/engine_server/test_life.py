from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from chairlift_engine.clock import MonotonicClock
from chairlift_engine.simulator import SimulatorRunner
from chairlift_engine.simulator_profile import Profile
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

    engine = start_engine(
        lambda loaded: dataclasses.replace(loaded, tokenizer=SlowTokenizer()),
        model_length_tokens=2**20,
    )
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


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", b'{"prompt": "counted"}'), ("/detokenize", b'{"tokens": [97]}')],
)
def test_texts_that_are_only_counted_go_one_at_a_time_and_prompts_pass_them(
    start_engine, eventually, path, body
) -> None:
    go, num_counting = threading.Event(), []

    class SlowTokenizer(ByteTokenizer):
        num_inside = 0

        def take_long(self) -> None:
            self.num_inside += 1
            num_counting.append(self.num_inside)
            assert go.wait(10)
            self.num_inside -= 1

        def encode(self, text: str) -> list[int]:
            if text == "counted":
                self.take_long()
            return super().encode(text)

        def decode(self, token_ids, *, specials=False) -> str:
            if specials:
                self.take_long()
            return super().decode(token_ids, specials=specials)

    engine = start_engine(lambda loaded: dataclasses.replace(loaded, tokenizer=SlowTokenizer()))
    with ThreadPoolExecutor(6) as pool:
        post = partial(engine.client.post, path, content=body)
        answers = [pool.submit(post) for _ in range(6)]
        eventually(lambda: engine.server.replica.bodies.held_bytes == 6 * len(body))
        eventually(lambda: bool(num_counting))
        assert engine.complete("short").status_code == 200
        go.set()
        assert {answer.result().status_code for answer in answers} == {200}
    assert num_counting == [1] * 6


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


def test_health_answers_at_once_while_a_megabyte_is_tokenised_and_the_batch_is_full(
    start_engine, eventually
) -> None:
    """With a real tokenizer, which could keep the interpreter to itself."""
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    bpe.train_from_iterator([f"word{number}" for number in range(300)], trainer)

    class RealTokenizer(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [i % 256 for i in bpe.encode_batch_fast([text])[0].ids]

    def load(loaded):
        runner = SimulatorRunner(Profile(a_ms=5), MonotonicClock())
        return dataclasses.replace(loaded, tokenizer=RealTokenizer(), runner=runner)

    engine = start_engine(load, model_length_tokens=2**20)
    streams = {"model": "echo", "prompt": ["ab"] * 4, "max_tokens": 250, "ignore_eos": True}
    big = {"model": "echo", "prompt": "word7 sword3 " * 80_000}
    with engine.open_raw("/v1/completions", streams):
        eventually(lambda: engine.server.replica.load.num_running == 4)
        slowest_s = 0.0
        with ThreadPoolExecutor(1) as pool:
            post = partial(engine.client.post, "/v1/completions", json=big, timeout=60)
            answer = pool.submit(post)
            while not answer.done():
                started_s = time.monotonic()
                assert engine.client.get("/health/live").status_code == 200
                slowest_s = max(slowest_s, time.monotonic() - started_s)
    assert answer.result().json()["error"]["code"] == "context_length_exceeded"
    assert 0 < slowest_s < 1


def test_a_slot_is_free_half_a_second_after_its_client_left_at_idle(
    start_engine, eventually
) -> None:
    def load(loaded):
        return dataclasses.replace(
            loaded, runner=SimulatorRunner(Profile(a_ms=30), MonotonicClock())
        )

    engine = start_engine(load)
    body = {"model": "echo", "prompt": "abc", "max_tokens": 200, "ignore_eos": True}
    connection = engine.open_raw("/v1/completions", body)
    eventually(lambda: engine.server.replica.load.num_running == 1)
    connection.close()
    left_s = time.monotonic()
    eventually(lambda: engine.server.replica.load.num_running == 0)
    assert time.monotonic() - left_s < 0.5


def test_a_request_id_that_is_used_twice_at_once_crosses_no_wires(engine, eventually) -> None:
    engine.runner.hold()
    headers = {"x-request-id": "mine"}
    with ThreadPoolExecutor(2) as pool:
        asked = {
            prompt: pool.submit(engine.complete, prompt, max_tokens=9, headers=dict(headers))
            for prompt in ("abc", "xyzxyz")
        }
        eventually(lambda: engine.serving.bridge.num_open == 2)
        engine.runner.release()
        for prompt, answer in asked.items():
            assert answer.result().json()["choices"][0]["text"] == prompt
            assert answer.result().headers["x-request-id"] == "mine"
    ids = {answer.result().json()["id"] for answer in asked.values()}
    assert len(ids) == 2


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/\xff\xfe HTTP/1.1\r\nhost: x\r\n",
        b"GET /v1/%ff%fe HTTP/1.1\r\nhost: x\r\n",
        b"GET /health/live HTTP/1.1\r\nhost: x\r\nx-request-id: \xff\xfe\r\n",
        b"GET /health/live?\xff HTTP/1.1\r\nhost: \xff\r\n",
        b"\xff\xfe\x00\r\n",
    ],
)
def test_bytes_that_are_no_text_in_a_head_are_answered(shared_engine, head) -> None:
    with shared_engine.connect() as connection:
        connection.sendall(head + b"connection: close\r\n\r\n")
        with connection.makefile("rb") as received:
            assert received.readline().startswith(b"HTTP/1.1 ")
    assert shared_engine.complete("x").status_code == 200


def test_a_request_ends_with_its_timeline_in_one_line_of_the_log(engine, caplog) -> None:
    name = "chairlift_engine.server.timeline"
    with caplog.at_level(logging.DEBUG, logger=name):
        engine.complete("abcdef", max_tokens=4, ignore_eos=True)
        engine.complete([97] * 200, max_tokens=1)
    lines = [r.getMessage() for r in caplog.records if r.name == name]
    first, second = (dict(pair.split("=", 1) for pair in line.split()) for line in lines)
    assert first["request"].startswith("cmpl-") and first["request"] != second["request"]
    assert (first["class"], first["tenant"], first["end"]) == ("interactive", "anonymous", "length")
    assert (first["prompt_tokens"], first["output_tokens"]) == ("7", "4")
    assert (first["prefill_chunks"], second["prefill_chunks"]) == ("1", "2")
    assert first["preemptions"] == "0"
    times = [
        float(first[name]) for name in ("started_s", "first_token_s", "last_token_s", "ended_s")
    ]
    assert times == sorted(times)


def test_a_request_that_never_started_says_so_in_its_timeline(engine, eventually, caplog) -> None:
    engine.runner.hold()
    body = {"model": "echo", "prompt": "abc", "max_tokens": 9}
    running = engine.open_raw("/v1/completions", body)
    assert engine.runner.in_step.wait(5)
    waiting = engine.open_raw("/v1/completions", body)
    eventually(lambda: engine.serving.bridge.num_open == 2)
    with caplog.at_level(logging.DEBUG, logger="chairlift_engine.server.timeline"):
        waiting.close()
        eventually(lambda: engine.server.replica.num_in_flight == 1)
        engine.runner.release()
        eventually(lambda: engine.server.replica.num_in_flight == 0)
    running.close()
    ended = [line for line in caplog.messages if "end=abort" in line]
    assert len(ended) == 1 and "started_s=- first_token_s=-" in ended[0]
