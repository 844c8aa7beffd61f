from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest


def open_stream(local: Any, max_tokens: int) -> Any:
    stream = local.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Count."}],
        max_tokens=max_tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(stream)
    return stream


def port_of(local: Any) -> int:
    port = urlsplit(local.url).port
    assert port is not None
    return port


def ticks(journal: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    return [record for record in records if record["kind"] == "tick"]


def test_the_first_policy_is_pushed_and_read_back(shared_local: Any) -> None:
    assert shared_local.url.startswith("http://127.0.0.1:")
    ends_s = time.monotonic() + 20
    while len(ticks(shared_local.journal)) < 2:
        assert time.monotonic() < ends_s
        time.sleep(0.1)
    first, second = ticks(shared_local.journal)[:2]
    (pushed,) = first["results"]
    assert pushed["verified"] is True
    (replica,) = second["snapshot"]["replicas"]
    assert replica["ready"] is True
    assert replica["policy"]["effective"] == pushed["action"]["policy"]
    assert (shared_local.run_dir.stat().st_mode & 0o077) == 0


def test_ctrl_c_lets_a_stream_finish_and_leaves_nothing_behind(
    start_local: Callable[..., Any], pool_text: Callable[..., str]
) -> None:
    local = start_local(pool_text(step="20ms"), keep_run_dir=False)
    port = port_of(local)
    stream = open_stream(local, max_tokens=60)
    local.process.send_signal(signal.SIGINT)
    local.wait_for_line("draining")
    rest = list(stream)
    assert rest[-1].choices[0].finish_reason == "length"
    assert len(rest) >= 50
    assert local.end() == 130
    assert local.children() == {}
    assert list(local.run_dir.iterdir()) == []
    socket.create_server(("127.0.0.1", port)).close()


def test_a_second_ctrl_c_ends_at_once(
    start_local: Callable[..., Any], pool_text: Callable[..., str]
) -> None:
    local = start_local(pool_text(step="50ms"), keep_run_dir=False)
    stream = open_stream(local, max_tokens=1000)
    local.process.send_signal(signal.SIGINT)
    local.wait_for_line("draining")
    asked_s = time.monotonic()
    local.process.send_signal(signal.SIGINT)
    assert local.end() == 130
    assert time.monotonic() - asked_s < 5
    assert local.children() == {} and list(local.run_dir.iterdir()) == []
    # Cut off, as asked: by a broken connection or by the gateway's last words.
    with pytest.raises((openai.APIError, httpx2.TransportError)):
        list(stream)


def test_sigterm_ends_in_order_with_exit_code_0(
    start_local: Callable[..., Any], pool_text: Callable[..., str]
) -> None:
    local = start_local(pool_text())
    assert local.url
    local.process.terminate()
    assert local.end() == 0
    assert local.children() == {}
    # A folder that the user named stays, logs and all.
    assert "listening" in (local.run_dir / "interactive-0.log").read_text()


def test_kill_9_of_the_supervisor_leaves_no_child(
    start_local: Callable[..., Any], pool_text: Callable[..., str]
) -> None:
    local = start_local(pool_text())
    assert local.url
    assert set(local.children()) == {"chairlift_engine", "chairlift_gateway"}
    local.process.kill()
    local.wait_for_no_children()


@pytest.mark.parametrize("victim", ["chairlift_engine", "chairlift_gateway"])
def test_a_child_that_dies_is_reported_and_started_again(
    start_local: Callable[..., Any], pool_text: Callable[..., str], victim: str
) -> None:
    local = start_local(pool_text())
    assert local.url
    os.kill(local.children()[victim], signal.SIGKILL)
    name = {"chairlift_engine": "engine interactive-0", "chairlift_gateway": "the gateway"}[victim]
    local.wait_for_line(f"{name} was ended by SIGKILL; starting it again in 1 s")
    local.wait_for_line(f"{name.removeprefix('engine ')} is serving again")
    with local.client() as client:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello!"}], max_tokens=4
        )
    assert answer.choices[0].message.content
