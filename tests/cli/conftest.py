"""`chairlift local` with a simulated engine, as a real process with real children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

POOL = """
apiVersion: chairlift.dev/v1alpha1
kind: InferencePool
metadata: {{name: chat}}
spec:
  model: {{name: tiny, source: "cache://tiny", maxLength: 2048}}
  runtime:
    engine: simulator
    simulator: {{profile: {{a: {step}, b: 0.05ms, c: 0.02ms, d: 0ms, load: {load}}}}}
  interactive:
    batchSize: {{min: 1, max: 32}}
    stepTokens: {{min: 64, max: 512}}
"""
PATIENCE_S = 30.0


class LocalProcess:
    """One supervisor. Its children are found by the run folder in their command lines."""

    def __init__(self, process: subprocess.Popen[str], run_dir: Path, journal: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self.journal = journal
        self.lines: list[str] = []
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def url(self) -> str:
        return self.wait_for_line("ready: ").split()[1]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key="any", max_retries=0, timeout=PATIENCE_S)

    def wait_for_line(self, beginning: str, patience_s: float = PATIENCE_S) -> str:
        ends_s = time.monotonic() + patience_s
        with self._said:
            while True:
                for line in self.lines:
                    if line.startswith(beginning):
                        return line
                left_s = ends_s - time.monotonic()
                alive = self._reader.is_alive()
                assert left_s > 0 and alive, f"no line {beginning!r} among {self.lines}"
                self._said.wait(min(left_s, 0.2))

    def children(self) -> dict[str, int]:
        """Package name → pid of every living process of this run, the supervisor left out."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (entry / "cmdline").read_bytes().decode().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(entry.name) != self.process.pid and str(self.run_dir) in "\0".join(arguments):
                module = arguments.index("-m") if "-m" in arguments else 0
                found[arguments[module + 1]] = int(entry.name)
        return found

    def engines(self) -> dict[str, int]:
        """Replica name → pid of every living engine of this run."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (entry / "cmdline").read_bytes().decode().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if "chairlift_engine" in arguments and str(self.run_dir) in "\0".join(arguments):
                name = [a for a in arguments if a.startswith("--engine-id=")]
                if int(entry.name) != self.process.pid and name:
                    found[name[0].partition("=")[2]] = int(entry.name)
        return found

    def wait_for_no_children(self) -> None:
        ends_s = time.monotonic() + 5.0
        while self.children():
            assert time.monotonic() < ends_s, f"left behind: {self.children()}"
            time.sleep(0.02)

    def end(self) -> int:
        """Exit code, once everything it said has been read."""
        exit_code = self.process.wait(timeout=PATIENCE_S)
        self._reader.join()
        return exit_code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._said:
                self.lines.append(line.rstrip())
                self._said.notify_all()


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(scope="session")
def pool_text() -> Callable[..., str]:
    """A small simulated pool; step: how long a step takes, load: how long the model loads."""

    def text(step: str = "2ms", load: str = "0s") -> str:
        return POOL.format(step=step, load=load)

    return text


@pytest.fixture(scope="session")
def local_processes(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., LocalProcess]]:
    started: list[LocalProcess] = []

    def start(pool: str, keep_run_dir: bool = True) -> LocalProcess:
        folder = tmp_path_factory.mktemp("local")
        pool_file, run_dir, journal = folder / "pool.yaml", folder / "run", folder / "journal"
        pool_file.write_text(pool)
        run_dir.mkdir(mode=0o700)
        command = [sys.executable, "-m", "chairlift_cli", "local", "-f", str(pool_file)]
        command += ["--port", "0", "--journal", str(journal)]
        if keep_run_dir:
            command += ["--run-dir", str(run_dir)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment, "TMPDIR": str(run_dir)},
            start_new_session=True,
        )
        started.append(LocalProcess(process, run_dir, journal))
        return started[-1]

    yield start
    for local in started:
        if local.process.poll() is None:
            local.process.send_signal(signal.SIGKILL)
        local.end()
        assert local.process.stdout is not None
        local.process.stdout.close()


@pytest.fixture(scope="session")
def shared_local(
    local_processes: Callable[..., LocalProcess], pool_text: Callable[..., str]
) -> LocalProcess:
    """One pool for every test that only talks to it."""
    return local_processes(pool_text())


@pytest.fixture
def start_local(
    local_processes: Callable[..., LocalProcess],
) -> Iterator[Callable[..., LocalProcess]]:
    """Pools of a test's own; none of their processes outlives it."""
    mine: list[LocalProcess] = []

    def start(pool: str, **options: bool) -> LocalProcess:
        mine.append(local_processes(pool, **options))
        return mine[-1]

    yield start
    for local in mine:
        if local.process.poll() is None:
            local.process.kill()
        local.end()
        local.wait_for_no_children()


@pytest.fixture
def chairlift(environment: dict[str, str], tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run the command to its end: exit code and stderr; an empty cache, a TMPDIR of its own."""

    def run(*arguments: str | Path) -> tuple[int, str]:
        scratch = tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)
        ended = subprocess.run(
            [sys.executable, "-m", "chairlift_cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env={**environment, "TMPDIR": str(scratch), "CHAIRLIFT_CACHE": str(tmp_path / "none")},
            check=False,
        )
        assert list(scratch.iterdir()) == []
        return ended.returncode, ended.stderr

    return run
