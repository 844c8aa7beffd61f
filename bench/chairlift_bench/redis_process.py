"""A redis-server of a benchmark's own on loopback, which ends with it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

START_S: Final = 10.0


class NoRedis(Exception):
    """There is no redis-server; the message says how to get one."""


@contextmanager
def running_redis() -> Iterator[int]:
    """Its port. It keeps nothing on disk."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise NoRedis("needs redis-server on the PATH: tests/gateway/quota/install gets Debian's")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [
                binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "",
                "--appendonly", "no", "--dir", folder,
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            _until_listening(port)
            yield port
        finally:
            process.kill()
            process.wait()


def _until_listening(port: int) -> None:
    end_s = time.monotonic() + START_S
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0):
                return
        except OSError:
            if time.monotonic() > end_s:
                raise NoRedis("redis-server does not listen") from None
            time.sleep(0.02)
