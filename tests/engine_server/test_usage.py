"""What an engine tells gateways that ask what their requests have used."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from chairlift_engine.server import usage_book
from chairlift_engine.server.usage_book import UsageBook, Used

GATEWAY = {"x-chairlift-internal-token": "internal secret", "x-chairlift-usage": "1"}
MADE = "vllm:generation_tokens_total"
RAW = "".join(f"{name}: {value}\r\n" for name, value in GATEWAY.items())


def ask(engine: Any, *names: str, **fields: Any) -> dict[str, Any]:
    answer = engine.client.post("/usage", json={"requests": names, **fields}, headers=GATEWAY)
    assert answer.status_code == 200
    told: dict[str, Any] = answer.json()["used"]
    return told


def used(prompt_tokens: int, completion_tokens: float, *, final: bool = False) -> dict[str, object]:
    tokens = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {**tokens, "final": final}


def body(**fields: object) -> dict[str, object]:
    return {"model": "echo", "prompt": "abc", "max_tokens": 200, "ignore_eos": True, **fields}


def begun(engine: Any, name: str, **fields: object) -> socket.socket:
    """The connection of a client that has asked."""
    connection: socket.socket = engine.open_raw(
        "/v1/completions", body(**fields), f"{RAW}x-request-id: {name}\r\n"
    )
    return connection


def reach_step(engine: Any, eventually: Any, number: int) -> None:
    """That step of a held engine is under way."""
    engine.runner.allow(number - 1)
    eventually(lambda: engine.runner.num_begun == number)


@pytest.mark.parametrize("stream", [False, True])
def test_a_running_request_is_told_and_ended_by_the_gateways_name_for_it(
    engine: Any, eventually: Any, stream: bool
) -> None:
    everything = engine.free_list()
    engine.runner.hold()
    with begun(engine, "a-1", n=2, stream=stream) as client, ThreadPoolExecutor(1) as asking:
        eventually(lambda: ask(engine, "a-1", "other") == {"a-1": used(4, 0)})
        reach_step(engine, eventually, 4)
        asked = asking.submit(ask, engine, "a-1", end=True)
        eventually(lambda: engine.server.replica.num_in_flight == 0)
        engine.runner.release()
        told = {"a-1": used(4, engine.metric(MADE), final=True)}
        assert asked.result() == ask(engine, "a-1") == told
        assert engine.metric(MADE) >= 6  # two by the step that was under way
        assert engine.free_list() == everything
        assert b"gave this request up" in b"".join(iter(lambda: client.recv(4096), b""))


def test_a_gateway_does_not_wait_for_the_end_of_a_long_step(
    engine: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_book, "LAST_STEP_WAIT_S", 0.05)
    engine.runner.hold()
    with begun(engine, "a-5"):
        reach_step(engine, eventually, 3)
        eventually(lambda: ask(engine, "a-5") == {"a-5": used(4, 2)})
        assert ask(engine, "a-5", end=True) == {"a-5": used(4, 2)}
        engine.runner.release()
        eventually(lambda: ask(engine, "a-5") == {"a-5": used(4, 3, final=True)})


def test_what_ended_of_itself_is_known_for_a_while_too(engine: Any) -> None:
    headers = {**GATEWAY, "x-request-id": "a-2"}
    usage = engine.complete("xy", headers=headers, max_tokens=2).json()["usage"]
    assert ask(engine, "a-2", end=True) == {"a-2": used(3, 2, final=True)}
    assert usage["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_left_is_told_of_too(engine: Any, eventually: Any, stream: bool) -> None:
    engine.runner.hold()
    with begun(engine, "a-3", stream=stream):
        reach_step(engine, eventually, 4)
        eventually(lambda: ask(engine, "a-3") == {"a-3": used(4, 3)})
    eventually(lambda: engine.server.replica.num_in_flight == 0)
    engine.runner.release()
    eventually(lambda: ask(engine, "a-3") == {"a-3": used(4, 4, final=True)})
    assert engine.metric(MADE) == 4


def test_a_client_that_leaves_while_waiting_or_in_prefill_has_used_its_prompt(
    start_engine: Any, eventually: Any
) -> None:
    """Whole, also where only a part of it was computed, or nothing."""
    engine = start_engine(batch_size=1, step_tokens=32)
    engine.runner.hold()
    prefilling = begun(engine, "a-6", prompt=[97] * 80)
    reach_step(engine, eventually, 2)
    waiting = begun(engine, "a-7", prompt=[98] * 20)
    eventually(lambda: ask(engine, "a-7") == {"a-7": used(20, 0)})
    waiting.close()
    prefilling.close()
    eventually(lambda: engine.server.replica.num_in_flight == 0)
    engine.runner.release()
    told = {"a-6": used(80, 0, final=True), "a-7": used(20, 0, final=True)}
    assert ask(engine, "a-6", "a-7", end=True) == told
    assert engine.metric(MADE) == 0


def test_a_token_past_a_stop_string_is_not_used(engine: Any, eventually: Any) -> None:
    """Also of a client that leaves while another choice goes on."""
    engine.runner.hold()
    with begun(engine, "a-8", prompt=["abc", "xyz"], stop="b"):
        reach_step(engine, eventually, 4)
        eventually(lambda: ask(engine, "a-8") == {"a-8": used(8, 2 + 3)})
    eventually(lambda: engine.server.replica.num_in_flight == 0)
    engine.runner.release()
    eventually(lambda: ask(engine, "a-8") == {"a-8": used(8, 2 + 4, final=True)})


def test_only_gateways_are_told_and_only_their_requests_are_known(engine: Any) -> None:
    engine.complete("xy", headers={"x-request-id": "mine"}, max_tokens=1)
    assert ask(engine, "mine") == {}
    for headers in ({}, {"x-chairlift-internal-token": "wrong"}):
        answer = engine.client.post("/usage", json={"requests": []}, headers=headers)
        assert answer.status_code == 403
        assert answer.json()["error"]["message"] == "/usage is for this pool's gateways"
    assert engine.client.post("/usage", json={}, headers=GATEWAY).status_code == 400


class Making:
    def __init__(self, num_output_tokens: int) -> None:
        self.num_output_tokens = num_output_tokens

    def stop(self) -> None:
        raise AssertionError


def test_the_book_forgets_the_oldest_of_those_that_ended_and_none_that_runs() -> None:
    book = UsageBook(max_ended=2)
    book.enter("running", 1, Making(9))
    for name in "abc":
        book.enter(name, 1, Making(2))()
    assert [book.used(name) for name in "abc"] == [None, Used(1, 2, True), Used(1, 2, True)]
    assert book.used("running") == Used(1, 9, False)


def test_a_request_that_came_again_is_the_one_that_counts() -> None:
    book, first, second = UsageBook(), Making(5), Making(3)
    close_first = book.enter("a", 1, first)
    close_second = book.enter("a", 1, second)
    close_first()
    assert book.used("a") == Used(1, 3, False)
    second.num_output_tokens = 4
    close_second()
    assert book.used("a") == Used(1, 4, True)
