"""The demo as a user starts it, on the simulator: short phases, the same processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chairlift_bench import rush, rush_run, step_calibration

POOL = """
apiVersion: chairlift.dev/v1alpha1
kind: InferencePool
metadata: {name: lunch-rush}
spec:
  model: {name: tiny, source: "cache://tiny", maxLength: 4096}
  runtime:
    engine: simulator
    simulator: {profile: {a: 4ms, b: 0.2ms, c: 0.2ms, d: 0ms}}
  interactive:
    batchSize: {min: 1, max: 64}
    stepTokens: {min: 32, max: 2048}
  batch: {borrowing: {maxShare: 100, returnWithin: 10s}}
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


def test_a_short_rush_serves_all_three_ways_and_writes_its_report(
    pool_file: Path,
    tmp_path: Path,
    own_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(step_calibration, "BURST_S", 0.3)
    monkeypatch.setattr(step_calibration, "PROMPTS_S", 1.0)
    monkeypatch.setattr(step_calibration, "SAMPLE_S", 0.1)
    monkeypatch.setattr(rush_run, "NUM_TICKS_BEFORE", 1)
    for name, value in own_environment.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "results"
    exit_code = rush.main(["--pool", str(pool_file), "--scale", "0.05", "--out", str(out)])
    said = capsys.readouterr().out
    assert exit_code == 0
    assert "answered: " in said and "Capacity inside the objectives" in said
    claims = [line.split()[1] for line in said.splitlines() if line.startswith("claim ")]
    assert claims == [
        "demo_failed_requests",
        "demo_goodput_vs_static",
        "demo_goodput_vs_fixed",
        "demo_good_fraction_tuned",
        "demo_p95_ttft_vs_static",
        "demo_policy_changes",
        "demo_policy_reversals",
        "ride_failed_requests",
        "ride_policy_changes",
    ]
    result = json.loads((out / "rush.json").read_text())
    runs = {run["kind"]: run for run in result["runs"]}
    dues = {kind: [o["due_s"] for o in run["interactive"]] for kind, run in runs.items()}
    assert dues["static"] == dues["fixed"] == dues["tuned"]
    lengths = {k: [o["output_tokens"] for o in run["interactive"]] for k, run in runs.items()}
    assert lengths["static"] == lengths["fixed"] == lengths["tuned"]
    assert {k["batch_size"] for k in runs["fixed"]["knobs"]} == {16}
    assert {k["step_tokens"] for k in runs["fixed"]["knobs"]} == {256}
    assert all(run["batch"] for run in runs.values())
    page = (out / "rush.html").read_text()
    assert "<svg" in page and "http" not in page.replace("http://www.w3.org", "")
    assert (out / "rush.png").read_bytes().startswith(b"\x89PNG")
    assert processes_naming(str(tmp_path)) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_rush_that_is_ended_leaves_no_process(
    pool_file: Path, tmp_path: Path, own_environment: dict[str, str], number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "chairlift_bench.rush", "--pool", str(pool_file)]
    command += ["--out", str(tmp_path / "results")]
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code = rush.main(["--pool", str(tmp_path / "none.yaml"), "--out", str(tmp_path)])
    assert exit_code == 1
    assert "none.yaml: No such file" in capsys.readouterr().err
