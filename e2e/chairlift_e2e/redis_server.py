"""A real redis-server on loopback that can be stopped, paused, filled and replicated."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

START_S = 10.0


@dataclass
class RedisServer:
    """One process; may be ended and begun again on its port."""

    binary: str
    folder: Path
    port: int
    options: tuple[str, ...] = ()
    password: str | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = [
            self.binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
            "--appendonly", "no", "--dir", str(self.folder), *self.options,
        ]  # fmt: skip
        with (self.folder / f"redis-{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        end_s = time.monotonic() + START_S
        while not self._listens():
            assert self.process.poll() is None, (self.folder / f"redis-{self.port}.log").read_text()
            assert time.monotonic() < end_s, "redis-server does not listen"
            time.sleep(0.02)

    def _listens(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
                return True
        except OSError:
            return False

    def client(self, **settings: Any) -> redis.Redis:
        return redis.Redis(
            port=self.port, decode_responses=True, password=self.password, **settings
        )

    def pause(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.resume()
            self.process.kill()
            self.process.wait(timeout=10)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
