from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chairlift_cli.children import Child, describe_exit, options
from chairlift_cli.die_with_parent import bound

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('up', flush=True); time.sleep(60)"
)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pid: int, bound_s: float = 5.0) -> bool:
    ends_s = time.monotonic() + bound_s
    while is_running(pid) and time.monotonic() < ends_s:
        time.sleep(0.01)
    return not is_running(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_a_bound_command_ends_when_its_parent_is_killed() -> None:
    parent = (
        "import subprocess, sys, time; from chairlift_cli.die_with_parent import bound; "
        "child = subprocess.Popen(bound(['sleep', '60'])); "
        "print(child.pid, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        try:
            assert is_running(grandchild)
            process.kill()
            process.wait()
            assert wait_until_gone(grandchild)
        finally:
            if is_running(grandchild):
                os.kill(grandchild, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_a_command_whose_parent_is_already_gone_does_not_start() -> None:
    command = bound([sys.executable, "-c", "print('started')"])
    command[4] = "1"  # as if the parent had died and init had taken over
    ended = subprocess.run(command, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, b"")


def test_a_child_that_ignores_the_request_to_end_is_made_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift_cli.children.LAST_WORDS_S", 0.05)

    async def run() -> Child:
        child = await Child.start("c", [sys.executable, "-c", STUBBORN], tmp_path / "log")
        while "up" not in child.log_tail():
            await asyncio.sleep(0.01)
        await child.stop()
        return child

    child = asyncio.run(run())
    assert child.exit_code == -signal.SIGKILL and not is_running(child.pid)


def test_a_stop_that_is_cancelled_still_leaves_no_process(tmp_path: Path) -> None:
    async def run() -> Child:
        child = await Child.start("c", [sys.executable, "-c", STUBBORN], tmp_path / "log")
        while "up" not in child.log_tail():
            await asyncio.sleep(0.01)
        stopping = asyncio.create_task(child.stop(drain_s=60))
        await asyncio.sleep(0.05)
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        await child.wait()
        return child

    assert not is_running(asyncio.run(run()).pid)


def test_the_log_tail_holds_the_last_lines_of_both_streams(tmp_path: Path) -> None:
    script = "import sys; [print(i) for i in range(30)]; sys.exit('no more')"

    async def run() -> Child:
        child = await Child.start("c", [sys.executable, "-c", script], tmp_path / "log")
        await child.wait()
        return child

    child = asyncio.run(run())
    assert child.log_tail(3).splitlines()[-1].strip("| ") in ("no more", "29")
    assert "no more" in child.log_tail(31) and child.exit_code == 1


@pytest.mark.parametrize(
    ("exit_code", "sentence"),
    [
        (0, "ended with exit code 0"),
        (-9, "was ended by SIGKILL"),
        (-200, "ended with exit code -200"),
    ],
)
def test_an_exit_is_told_by_signal_name_or_code(exit_code: int, sentence: str) -> None:
    assert describe_exit(exit_code) == sentence


def test_a_value_that_looks_like_an_option_stays_a_value() -> None:
    assert options({"--model-name": "--help", "--port": 0}) == ["--model-name=--help", "--port=0"]


def test_only_what_this_process_said_counts_as_said(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("ready\n")

    async def run() -> Child:
        child = await Child.start("c", [sys.executable, "-c", "print('up')"], tmp_path / "log")
        await child.wait()
        return child

    child = asyncio.run(run())
    assert child.has_said("up") and not child.has_said("ready") and child.log_tail() == "  | up"
    (tmp_path / "log").unlink()
    assert child.log_tail() == ""
