"""Clients that do not read: their answers cost their own memory only, and nobody's time."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import replace

import pytest

from chairlift_engine.clock import MonotonicClock
from chairlift_engine.simulator import Profile, SimulatorRunner

# Answers of 1,500 tokens: their text alone, in however few events, is more than the sockets below
# take, and with an event for each step they are megabytes.
NUM_ANSWERS = 14
BODY = {
    "model": "echo",
    "prompt": [f"number {index}" for index in range(NUM_ANSWERS)],
    "max_tokens": 1500,
    "ignore_eos": True,
    "stream": True,
}
NUM_BLOCKS = 2000
MOST_BUFFERED_BYTES = 80_000  # asyncio pauses a writer at 64 KiB


@pytest.fixture
def reader(start_engine, eventually):
    """An engine, and a client that has asked and reads nothing."""
    profile = Profile(a_ms=0.5, b_ms=0, c_ms=0, d_ms=0)

    def load(loaded):
        return replace(loaded, runner=SimulatorRunner(profile, MonotonicClock()))

    engine = start_engine(load, num_blocks=NUM_BLOCKS, model_length_tokens=2000, drain_s=0.1)
    host, port = engine.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(10)
        connection.connect((host, int(port)))
        engine.client.close()  # so that this one is the only connection
        eventually(lambda: len(transports(engine)) == 1)
        sending = transports(engine)[0].get_extra_info("socket")
        sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        raw = json.dumps(BODY)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n"
        connection.sendall(f"{head}connection: close\r\n\r\n{raw}".encode())
        eventually(lambda: engine.server.replica.num_in_flight == 1)
        eventually(lambda: engine.serving.bridge.num_open == 0)
        yield engine, connection


def transports(engine) -> list:
    return [c.transport for c in engine.server._servers[0].server_state.connections if c.transport]


def test_a_reader_that_does_not_read_frees_its_slot_and_bounds_its_buffer(
    reader, eventually
) -> None:
    engine, connection = reader
    # The engine is done with it, and what it has not taken is its text and one buffer.
    assert engine.serving.bridge.gauges.num_running == {"interactive": 0, "batch": 0}
    assert engine.free_list() == frozenset(range(1, NUM_BLOCKS + 1))
    eventually(lambda: transports(engine)[0].get_write_buffer_size() > 0)
    assert transports(engine)[0].get_write_buffer_size() < MOST_BUFFERED_BYTES
    assert engine.server.replica.num_in_flight == 1
    with engine.open_raw("/v1/completions", {**BODY, "stream": False}) as other:
        with other.makefile("r") as received:
            whole = json.loads(received.read().rpartition("\n\n")[2])["choices"]
    with connection.makefile("r") as received:
        events = [line.removeprefix("data: ") for line in received if line.startswith("data: ")]
    assert events.pop() == "[DONE]\n"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"] * NUM_ANSWERS
    for index in range(NUM_ANSWERS):
        text = "".join(c["text"] for c in choices if c["index"] == index)
        assert text == whole[index]["text"] and len(text) == 1500


def test_a_reader_that_does_not_read_does_not_keep_the_process_alive(reader) -> None:
    engine, _ = reader
    for server in engine.server._servers:
        server.config.timeout_graceful_shutdown = 0.2
    started_s = time.monotonic()
    assert engine.stop() == 0
    assert time.monotonic() - started_s < 4


def test_a_reader_that_leaves_without_having_read_is_forgotten(reader, eventually) -> None:
    engine, connection = reader
    connection.close()
    eventually(lambda: engine.server.replica.num_in_flight == 0)
    eventually(lambda: not transports(engine))
