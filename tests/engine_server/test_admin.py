from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import httpx2
import pytest

from chairlift_engine.request import Obstacle
from chairlift_protocol.policy import Policy

POLICY = {
    "generation": [1, 1],
    "batch_size": 2,
    "step_tokens": 64,
    "chunk_tokens": 32,
    "batch_class_share": 0.5,
    "scheduling": "continuous",
    "slo": {"ttft_ms": 500, "itl_ms": 50.5},
}


def patch(engine, **fields: object) -> httpx2.Response:
    body = json.dumps({**POLICY, **fields})
    return engine.admin.patch("/admin/policy", content=body)


def test_a_policy_is_taken_and_read_back(engine) -> None:
    before = engine.admin.get("/admin/policy").json()
    assert before["effective"]["batch_size"] == before["capacity"]["batch_size"] == 4
    assert before["effective"]["slo"] == {"ttft_ms": 1000, "itl_ms": 100}
    for answer in (patch(engine).json(), engine.admin.get("/admin/policy").json()):
        assert answer["desired"] == answer["effective"] == POLICY
        assert answer["capacity"] == {
            "batch_size": 4,
            "step_tokens": 128,
            "kv_tokens": 512,
            "block_tokens": 8,
            "model_length_tokens": 256,
        }
        assert answer["observed"]["num_running"] == {"interactive": 0, "batch": 0}
    assert engine.client.get("/load").json()["policy_generation"] == [1, 1]
    assert engine.client.get("/load").json()["lend_share"] == 0.5
    assert patch(engine).status_code == 200  # the policy in force again


@pytest.mark.parametrize(
    ("fields", "status", "sentence"),
    [
        ({"batch_size": 5}, 400, "capacity of 4"),
        ({"batch_size": 0}, 400, "batch_size"),
        ({"step_tokens": 129}, 400, "capacity of 128"),
        ({"step_tokens": 7}, 400, "step_tokens"),
        ({"batch_class_share": 2}, 400, "batch_class_share"),
        ({"slo": {"ttft_ms": 1}}, 400, "itl_ms"),
        ({"scheduling": "greedy"}, 400, "scheduling"),
        ({"surprise": 1}, 400, "surprise"),
        ({"generation": [0, 9]}, 409, "not newer"),
        ({"generation": [1, 1], "batch_size": 3}, 409, "not newer"),
    ],
)
def test_a_policy_that_cannot_hold_changes_nothing(engine, fields, status, sentence) -> None:
    assert patch(engine).status_code == 200
    response = patch(engine, **{"generation": [2, 0], **fields})
    assert response.status_code == status
    assert sentence in response.json()["error"]["message"]
    answer = engine.admin.get("/admin/policy").json()
    assert answer["desired"] == answer["effective"] == POLICY


def while_stepping(engine, call) -> httpx2.Response:
    """What a call answers that the engine takes up between two held steps."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(call)
        for _ in range(50):
            engine.runner.allow(1)
            if wait([answer], timeout=0.2).done:
                break
        return answer.result(10)


def test_a_lowered_batch_size_drains_what_runs(engine, eventually) -> None:
    engine.runner.hold()
    bodies = {"model": "echo", "prompt": ["abcd"] * 4, "max_tokens": 100, "ignore_eos": True}
    with engine.open_raw("/v1/completions", bodies) as connection:
        engine.runner.allow(1)
        eventually(lambda: engine.server.replica.load.num_running == 4)
        answer = while_stepping(engine, lambda: patch(engine, batch_size=1)).json()
        assert answer["effective"]["batch_size"] == 1
        assert sum(answer["observed"]["num_running"].values()) == 4
        engine.runner.release()
        with connection.makefile("r") as received:
            assert received.read().count('"finish_reason":"length"') == 4


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": ""},
        {"authorization": "Bearer guess"},
        {"authorization": "Bearer"},
        {"authorization": "Basic admin secret"},
        {"authorization": "Bearer admin secret more"},
        {"authorization": "Bearer ümlaut".encode()},
    ],
)
def test_nothing_is_answered_without_the_admin_token(engine, headers) -> None:
    for method, path in (("GET", "policy"), ("PATCH", "policy"), ("POST", "drain"), ("GET", "x")):
        response = engine.admin.request(method, f"/admin/{path}", headers=headers)
        assert response.status_code == 401
        assert "Bearer" in response.json()["error"]["message"]
    assert engine.client.get("/health/ready").status_code == 200


def test_admin_paths_are_not_on_the_public_port(engine) -> None:
    headers = {"authorization": "Bearer admin secret"}
    assert engine.client.get("/admin/policy", headers=headers).status_code == 404


def test_the_state_names_every_request_and_its_progress(start_engine, eventually) -> None:
    engine = start_engine(batch_size=1)
    engine.runner.hold()
    body = {"model": "echo", "prompt": ["abc", "defgh"], "max_tokens": 100, "ignore_eos": True}
    with engine.open_raw("/v1/completions", body):
        eventually(lambda: engine.server.replica.load.num_waiting == 2)
        state = while_stepping(engine, lambda: engine.admin.get("/admin/state")).json()
        engine.runner.release()
    assert state["num_in_flight"] == 1 and not state["draining"]
    (running,), (waiting,) = state["running"], state["waiting"]
    assert running["phase"] == "decode" and waiting["phase"] == "waiting"
    assert waiting["reason"] in tuple(Obstacle) and waiting["waiting_s"] >= 0
    assert {running["num_prompt_tokens"], waiting["num_prompt_tokens"]} == {4, 6}
    assert running["max_tokens"] == waiting["max_tokens"] == 100
    assert Policy.from_json(state["policy"]).batch_size == 1


def test_the_state_is_a_page_for_a_person(start_engine, eventually) -> None:
    engine = start_engine(batch_size=1)
    engine.runner.hold()
    body = {"model": "echo", "prompt": ["abc", "defgh"], "max_tokens": 100, "ignore_eos": True}
    with engine.open_raw("/v1/completions", body):
        eventually(lambda: engine.server.replica.load.num_waiting == 2)
        accept = {"accept": "text/plain"}
        read = partial(engine.admin.get, "/admin/state", headers=accept)
        text = while_stepping(engine, read).text
        engine.runner.release()
    lines = text.splitlines()
    assert lines[0].startswith("1 running in 1 slots, 1 waiting; ")
    running = lines[lines.index("running:") + 2]
    waiting = lines[lines.index("waiting:") + 2]
    assert running.split()[1:4] == ["interactive", "anonymous", "decode"]
    assert waiting.endswith(tuple(Obstacle))


def test_what_the_last_step_used_is_observed_under_its_own_generation(engine, eventually) -> None:
    assert engine.admin.get("/admin/policy").json()["observed"]["last_step"] is None
    assert patch(engine, batch_size=2).status_code == 200
    engine.complete(["abc", "def"], max_tokens=2, ignore_eos=True)
    eventually(lambda: engine.server.replica.load.num_running == 0)
    step = engine.admin.get("/admin/policy").json()["observed"]["last_step"]
    assert step.pop("step_s") > 0
    assert step == {
        "generation": [1, 1],
        "batch_size": 2,
        "step_tokens": 2,
        "num_decode_seqs": 2,
        "num_prefill_tokens": 0,
    }


def test_draining_refuses_new_work_and_finishes_what_was_admitted(engine, eventually) -> None:
    engine.runner.hold()
    body = {"model": "echo", "prompt": "abc", "max_tokens": 3, "stream": True}
    with engine.open_raw("/v1/completions", body) as connection:
        eventually(lambda: engine.server.replica.num_in_flight == 1)
        assert engine.admin.post("/admin/drain").json() == {"draining": True, "num_left": 1}
        assert engine.client.get("/health/ready").status_code == 503
        assert engine.client.get("/health/live").status_code == 200
        refused = engine.complete("x")
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "draining"
        assert engine.client.get("/load").json()["draining"] is True
        engine.runner.release()
        with connection.makefile("r") as received:
            assert "data: [DONE]" in received.read()
    eventually(lambda: engine.admin.post("/admin/drain").json()["num_left"] == 0)
    assert engine.thread.is_alive()  # whoever drains a replica also ends it
