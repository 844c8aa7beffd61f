"""What an engine tells gateways that ask what their requests have used."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift_engine.server.usage_book import UsageBook, Used

GATEWAY = {"x-chairlift-internal-token": "internal secret", "x-chairlift-usage": "1"}
RAW = "".join(f"{name}: {value}\r\n" for name, value in GATEWAY.items())


def ask(engine: Any, *names: str, **fields: Any) -> dict[str, Any]:
    answer = engine.client.post("/usage", json={"requests": names, **fields}, headers=GATEWAY)
    assert answer.status_code == 200
    told: dict[str, Any] = answer.json()["used"]
    return told


def used(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}


def body(**fields: object) -> dict[str, object]:
    return {"model": "echo", "prompt": "abc", "max_tokens": 200, "ignore_eos": True, **fields}


@pytest.mark.parametrize("stream", [False, True])
def test_a_running_request_is_told_and_ended_by_the_gateways_name_for_it(
    engine: Any, eventually: Any, stream: bool
) -> None:
    everything = engine.free_list()
    engine.runner.hold()
    fields = body(n=2, stream=stream)
    with engine.open_raw("/v1/completions", fields, f"{RAW}x-request-id: a-1\r\n") as client:
        eventually(lambda: ask(engine, "a-1", "other") == {"a-1": used(4, 0)})
        engine.runner.allow(3)
        eventually(lambda: ask(engine, "a-1")["a-1"]["completion_tokens"] >= 4)
        told = ask(engine, "a-1", end=True)
        eventually(lambda: engine.server.replica.num_in_flight == 0)
        engine.runner.release()
        assert engine.free_list() == everything
        assert ask(engine, "a-1") == told
        assert b"gave this request up" in b"".join(iter(lambda: client.recv(4096), b""))


def test_what_ended_of_itself_is_known_for_a_while_too(engine: Any) -> None:
    headers = {**GATEWAY, "x-request-id": "a-2"}
    usage = engine.complete("xy", headers=headers, max_tokens=2).json()["usage"]
    assert ask(engine, "a-2", end=True) == {"a-2": used(3, 2)}
    assert usage["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_left_is_told_of_too(engine: Any, eventually: Any, stream: bool) -> None:
    engine.runner.hold()
    connection = engine.open_raw(
        "/v1/completions", body(stream=stream), f"{RAW}x-request-id: a-3\r\n"
    )
    engine.runner.allow(3)
    eventually(lambda: ask(engine, "a-3").get("a-3", {}).get("completion_tokens") == 3)
    connection.close()
    eventually(lambda: engine.server.replica.num_in_flight == 0)
    engine.runner.release()
    assert ask(engine, "a-3") == {"a-3": used(4, 3)}


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
        self.is_stopped = False

    def stop(self) -> None:
        self.is_stopped = True


def test_the_book_forgets_the_oldest_of_those_that_ended_and_none_that_runs() -> None:
    book = UsageBook(max_ended=2)
    with book.entered("running", 1, Making(9)):
        for name in "abc":
            with book.entered(name, 1, Making(2)):
                pass
        assert [book.used(name) for name in "abc"] == [None, Used(1, 2), Used(1, 2)]
        assert book.used("running") == Used(1, 9)


def test_a_request_that_came_again_is_the_one_that_counts() -> None:
    book, first, second = UsageBook(), Making(5), Making(3)
    with book.entered("a", 1, second):
        pass
    outer = book.entered("a", 1, first)
    outer.__enter__()
    with book.entered("a", 1, second):
        outer.__exit__(None, None, None)
        assert book.used("a") == Used(1, 3)
        book.stop("a")
    assert book.used("a") == Used(1, 3)
    assert second.is_stopped and not first.is_stopped
