from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import httpx2
import pytest

from chairlift_engine.__main__ import run

SIMULATOR = ["--runner", "simulator", "--model-name", "sim", "--port", "0"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--runner", "torch", "--model-name", "m", "--port", "0"], "--model-source: is needed"),
        (
            [*SIMULATOR, "--runner", "torch", "--model-source", "file:///no/such/model"],
            "model.source: /no/such/model",
        ),
        ([*SIMULATOR, "--admin-token-file", "/no/such/file"], "--admin-token-file: /no/such/file"),
        ([*SIMULATOR, "--internal-token-file", "{empty}"], "is empty; write the token into it"),
        ([*SIMULATOR, "--port", "{busy}"], "--port: cannot listen on 127.0.0.1:"),
        ([*SIMULATOR, "--simulator-profile", "warp"], "use one of reference, fast, slow"),
        ([*SIMULATOR, "--simulator-profile", "/no/such.toml"], "/no/such.toml: "),
        ([*SIMULATOR, "--step-tokens", "3"], "--step-tokens: must be at least 16"),
        ([*SIMULATOR, "--announce-file", "/no/such/folder/file"], "--announce-file: "),
    ],
)
def test_what_cannot_start_says_one_sentence_and_exits_with_2(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        known = {"{empty}": str(empty), "{busy}": str(busy.getsockname()[1])}
        assert run([known.get(argument, argument) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("chairlift-engine: ") and said.count("\n") == 1
    assert sentence in said


def test_the_version_is_told_without_any_other_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"chairlift-engine {version('chairlift')}\n"


@pytest.fixture
def start_process(tmp_path, eventually) -> Iterator[Callable[..., tuple[subprocess.Popen, str]]]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(*more: str) -> tuple[subprocess.Popen[bytes], str]:
        announce = tmp_path / f"announce-{len(processes)}.json"
        command = [sys.executable, "-m", "chairlift_engine", *SIMULATOR, *more]
        command += ["--announce-file", str(announce), "--log-level", "error"]
        roots = [str(Path(__file__).parents[2] / root) for root in ("protocol", "engine")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots)}
        processes.append(subprocess.Popen(command, env=environment))
        eventually(announce.exists)
        announced = json.loads(announce.read_text())
        assert announced["pid"] == processes[-1].pid and announced["admin_url"]
        url = announced["url"]
        eventually(lambda: httpx2.get(f"{url}/health/ready", trust_env=False).status_code == 200)
        return processes[-1], url

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_sigterm_lets_a_stream_finish_and_exits_with_0(start_process) -> None:
    process, url = start_process("--simulator-profile", '{"a_ms": 20}')
    body = {"model": "sim", "prompt": "x", "max_tokens": 10, "stream": True}
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, trust_env=False) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGTERM)
        assert "data: [DONE]" in list(lines)
    assert process.wait(5) == 0


def test_an_interrupt_lets_a_stream_finish_and_refuses_new_work(start_process, eventually) -> None:
    process, url = start_process("--simulator-profile", '{"a_ms": 30}')
    body = {"model": "sim", "prompt": "x", "max_tokens": 20, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, trust_env=False) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGINT)
        ready = f"{url}/health/ready"
        eventually(lambda: httpx2.get(ready, trust_env=False).status_code == 503)
        refused = httpx2.post(f"{url}/v1/completions", json=body, trust_env=False)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert "data: [DONE]" in list(lines)
    assert process.wait(5) == 0


def test_kill_9_breaks_its_streams_off_and_its_successor_takes_the_port(start_process) -> None:
    process, url = start_process("--simulator-profile", '{"a_ms": 30}')
    body = {"model": "sim", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    received = []
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, trust_env=False) as response:
        lines = response.iter_lines()
        received.append(next(lines))
        process.kill()
        with pytest.raises(httpx2.TransportError):
            received += lines
    assert "data: [DONE]" not in received
    assert process.wait(5) == -signal.SIGKILL
    _, again = start_process("--port", url.rsplit(":", 1)[1])
    assert again == url
    body |= {"max_tokens": 5, "stream": False}
    answer = httpx2.post(f"{url}/v1/completions", json=body, trust_env=False)
    assert answer.json()["usage"]["completion_tokens"] == 5


def test_a_second_interrupt_leaves_at_once(start_process, eventually) -> None:
    process, url = start_process("--simulator-profile", '{"a_ms": 50}')
    body = {"model": "sim", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, trust_env=False) as response:
        lines = response.iter_lines()  # kept: when it goes, the connection is closed
        assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGINT)
        ready = f"{url}/health/ready"
        eventually(lambda: httpx2.get(ready, trust_env=False).status_code == 503)
        process.send_signal(signal.SIGINT)
        assert process.wait(2) == 130


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "field 'batch_class_share' is missing"),
        ("nonsense", "Expecting value"),
        (None, "No such file"),
    ],
)
def test_a_policy_file_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    path = tmp_path / "policy.json"
    if text is not None:
        path.write_text(text)
    options = ["--model-name", "m", "--runner", "simulator", "--port", "0"]
    assert run([*options, "--policy-file", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("chairlift-engine: --policy-file: ") and message in said
    assert said.count("\n") == 1
