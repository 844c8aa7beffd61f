from __future__ import annotations

import pytest

from chairlift_engine.request import FinishReason

LONG = {"model": "echo", "prompt": "abcdef", "max_tokens": 100, "ignore_eos": True}


def ended(engine, reason: FinishReason) -> float:
    labels = f'engine="0",finished_reason="{reason}",model_name="echo"'
    return engine.metric(f"vllm:request_success_total{{{labels}}}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_out_of_memory_is_503_for_its_batch_and_lowers_the_effective_batch_size(
    engine, eventually, stream
) -> None:
    everything = engine.free_list()
    engine.runner.hold()
    with engine.open_raw("/v1/completions", {**LONG, "stream": stream}) as connection:
        engine.runner.allow(1)
        eventually(lambda: engine.server.replica.load.num_running == 1)
        engine.runner.next_error = RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        engine.runner.release()
        with connection.makefile("r") as received:
            text = received.read()
    assert '"code":"out_of_memory"' in text and "[DONE]" not in text
    assert ("503 Service Unavailable" in text) != stream
    assert ("retry-after: " in text) != stream
    assert engine.complete("next", max_tokens=4).json()["choices"][0]["text"] == "next"
    answer = engine.admin.get("/admin/policy").json()
    assert (answer["desired"]["batch_size"], answer["effective"]["batch_size"]) == (4, 1)
    assert engine.metric('chairlift_batch_size{state="effective"}') == 1
    assert engine.metric('chairlift_batch_size{state="desired"}') == 4
    assert engine.metric("chairlift_out_of_memory_total") == 1
    assert ended(engine, FinishReason.MEMORY) == 1
    assert engine.client.get("/health/ready").status_code == 200
    assert engine.free_list() == everything
