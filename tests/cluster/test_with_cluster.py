"""`with-cluster` cleans up however its command ends, and says what it could not clean up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "e2e" / "cluster" / "with-cluster"

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif("E2E_CONTEXT" not in os.environ, reason="needs root: make test-cluster"),
]


def start(state: Path, *command: str) -> subprocess.Popen[str]:
    """A control plane of its own, beside whichever one these tests run on."""
    environment = {k: v for k, v in os.environ.items() if k not in ("E2E_CONTEXT", "KUBECONFIG")}
    environment |= {"ONE_NODE_STATE": str(state), "ONE_NODE_PORT": str(free_port())}
    return subprocess.Popen(
        [str(SCRIPT), "control-plane", *command],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def free_port() -> int:
    """The first of three in a row, below those that are given out to clients."""
    for port in range(20_000, 30_000, 3):
        with socket.socket() as first, socket.socket() as second, socket.socket() as third:
            try:
                for offset, taken in enumerate((first, second, third)):
                    taken.bind(("127.0.0.1", port + offset))
            except OSError:
                continue
            return port
    raise AssertionError("no three free ports in a row")


def leftovers(state: Path) -> list[str]:
    """Processes that name the state."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{state}/" in command:
            found.append(command)
    return found


@pytest.mark.parametrize(("command", "status"), [("true", 0), ("exit 7", 7)])
def test_the_command_has_a_cluster_and_its_exit_code_is_passed_on(
    tmp_path: Path, command: str, status: int
) -> None:
    state = tmp_path / "state"
    process = start(state, "sh", "-c", f"kubectl get --raw /readyz && {command}")
    output, errors = process.communicate()
    assert (process.returncode, output) == (status, "ok"), errors
    assert not state.exists() and leftovers(state) == []


def test_an_interrupted_command_leaves_nothing(tmp_path: Path) -> None:
    state = tmp_path / "state"
    process = start(state, "sh", "-c", "echo running; exec sleep 100")
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    os.killpg(process.pid, signal.SIGINT)
    process.communicate()
    assert process.returncode != 0
    assert not state.exists() and leftovers(state) == []


def test_what_the_command_leaves_running_is_named_and_is_a_failure(tmp_path: Path) -> None:
    process = start(
        tmp_path / "state", "sh", "-c", "sleep 321 >/dev/null 2>&1 </dev/null & echo $!"
    )
    output, errors = process.communicate()
    os.kill(int(output), signal.SIGKILL)
    assert process.returncode == 1
    assert f"process {int(output)} sleep 321" in errors


def test_a_second_node_on_one_machine_is_refused_before_it_touches_anything(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with socket.socket() as kubelet:
        with suppress(OSError):  # there may be one already
            kubelet.bind(("127.0.0.1", 10250))
            kubelet.listen()
        ran = subprocess.run(
            [str(SCRIPT.with_name("one-node")), "up"],
            env={**os.environ, "ONE_NODE_STATE": str(state)}, text=True, capture_output=True,
        )  # fmt: skip
    assert ran.returncode == 1
    assert "a kubelet runs on this machine already (port 10250)" in ran.stderr
    assert not state.exists()
