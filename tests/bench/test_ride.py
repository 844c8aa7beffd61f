from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chairlift_bench import calibration, ride

POOL = """
apiVersion: chairlift.dev/v1alpha1
kind: InferencePool
metadata: {name: chat}
spec:
  model: {name: tiny, source: "cache://tiny", maxLength: 4096}
  runtime:
    engine: simulator
    simulator: {profile: {a: 5ms, b: 0.1ms, c: 0.05ms, d: 0ms}}
"""


@pytest.fixture
def pool_file(tmp_path: Path) -> Path:
    path = tmp_path / "pool.yaml"
    path.write_text(POOL)
    return path


@pytest.fixture
def own_environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}


def processes_naming(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().decode().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text in command:
            found.append(command)
    return found


def test_a_short_ride_answers_replays_and_claims(
    pool_file: Path,
    tmp_path: Path,
    own_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(calibration, "SETTLE_S", 1.0)
    monkeypatch.setattr(calibration, "BURST_S", 1.0)
    for name, value in own_environment.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "results" / "ride.json"
    exit_code = ride.main(["--pool", str(pool_file), "--duration-s", "2", "--out", str(out)])
    said = capsys.readouterr().out
    assert exit_code == 0
    assert "answered: " in said and "this machine carries" in said
    assert said.splitlines()[-2] == "claim ride_failed_requests 0"
    assert said.splitlines()[-1].startswith("claim ride_policy_changes ")
    result = json.loads(out.read_text())
    assert result["failed_requests"] == 0
    assert result["summary"]["num_requests"] == len(result["requests"]) > 3
    assert [change["sentence"] for change in result["changes"]]
    assert processes_naming(str(tmp_path)) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_ride_that_is_ended_leaves_no_process(
    pool_file: Path, tmp_path: Path, own_environment: dict[str, str], number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "chairlift_bench.ride", "--pool", str(pool_file)]
    command += ["--out", str(tmp_path / "ride.json")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=own_environment, start_new_session=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("measuring"):
                break
        process.send_signal(number)
        process.communicate(timeout=30)
    ends_s = time.monotonic() + 15
    while processes_naming(str(tmp_path)) and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert processes_naming(str(tmp_path)) == []
    assert not list(tmp_path.glob("chairlift-*"))


def test_a_pool_that_cannot_start_is_one_sentence_and_exit_code_1(
    pool_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "ride.json")
    exit_code = ride.main(["--pool", str(tmp_path / "none.yaml"), "--out", out])
    assert exit_code == 1
    assert "none.yaml: No such file" in capsys.readouterr().err
