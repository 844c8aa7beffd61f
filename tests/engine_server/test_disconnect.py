from __future__ import annotations

import threading

import pytest


def body(num_prompt_tokens: int = 30, **fields: object) -> dict[str, object]:
    prompt = [97] * num_prompt_tokens
    return {"model": "echo", "prompt": prompt, "max_tokens": 200, "ignore_eos": True, **fields}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_everything_within_one_step(
    engine, eventually, stream: bool
) -> None:
    everything = engine.free_list()
    engine.runner.hold()
    connection = engine.open_raw("/v1/completions", body(stream=stream))
    engine.runner.allow(1)
    if stream:
        assert b"200 OK" in connection.recv(4096)
    eventually(lambda: engine.server.replica.load.num_running == 1)
    eventually(lambda: engine.runner.num_begun == 2)  # the second step, held
    connection.close()
    eventually(lambda: engine.server.replica.num_in_flight == 0)
    engine.runner.allow(1)  # the held step ends, and the next one must not need another
    assert engine.free_list() == everything
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="echo"}'
    eventually(lambda: engine.metric(aborted) == 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_waiting_never_starts_prefill(
    start_engine, eventually, stream: bool
) -> None:
    engine = start_engine(batch_size=1)
    engine.runner.hold()
    running = engine.open_raw("/v1/completions", body(10))
    assert engine.runner.in_step.wait(5)
    waiting = engine.open_raw("/v1/completions", body(20, stream=stream))
    # Neither has been reported by the engine yet: its first step is still held.
    eventually(lambda: engine.server.replica.load.num_waiting == 2)
    assert engine.server.replica.load.waiting_prefill_tokens == 30
    waiting.close()
    eventually(lambda: engine.server.replica.num_in_flight == 1)
    running.close()
    eventually(lambda: engine.server.replica.num_in_flight == 0)
    engine.runner.release()
    assert engine.free_list() == frozenset(range(1, 65))
    assert engine.runner.computed == {10}


def test_gauges_fall_to_zero_when_all_requests_are_aborted_at_once(engine, eventually) -> None:
    engine.runner.hold()
    connections = [engine.open_raw("/v1/completions", body(stream=i % 2 == 0)) for i in range(8)]
    eventually(lambda: engine.serving.bridge.num_open == 8)
    engine.runner.allow(2)
    eventually(lambda: engine.metric("vllm:num_requests_running") == 4)
    assert engine.metric("vllm:num_requests_waiting") == 4
    assert engine.metric("vllm:kv_cache_usage_perc") > 0
    assert engine.metric('chairlift_oldest_waiting_seconds{class="interactive"}') > 0
    for connection in connections:
        connection.close()
    eventually(lambda: engine.server.replica.num_in_flight == 0)
    engine.runner.release()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    eventually(lambda: [engine.metric(f"vllm:{name}") for name in names] == [0, 0, 0])
    assert engine.metric('chairlift_oldest_waiting_seconds{class="interactive"}') == 0
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="echo"}'
    assert engine.metric(aborted) == 8


def test_a_client_that_leaves_before_its_prompt_is_tokenised_starts_nothing(
    engine, eventually
) -> None:
    # The pool's two threads are busy, so the order is never taken while the client is there.
    go = threading.Event()
    busy = [engine.serving.pool.submit(go.wait, 5) for _ in range(2)]
    connection = engine.open_raw("/v1/completions", body(33))
    eventually(lambda: engine.server.replica.num_in_flight == 1)
    connection.close()
    # Another connection's answer proves that the loop has seen the first one close.
    eventually(lambda: engine.client.get("/health/live").status_code == 200)
    go.set()
    assert all(future.result() for future in busy)
    eventually(lambda: engine.server.replica.num_in_flight == 0)
    assert 33 not in engine.runner.computed
