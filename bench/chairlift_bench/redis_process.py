"""A redis-server of a benchmark's own on loopback, which ends with it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from chairlift_bench.listening import listens_within

START_S: Final = 10.0


class NoRedis(Exception):
    """There is no redis-server; the message says how to get one."""


def free_port() -> int:
    """Of loopback."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def running_redis() -> Iterator[int]:
    """Its port. It keeps nothing on disk."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise NoRedis("needs redis-server on the PATH: tests/gateway/quota/install gets Debian's")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [
                binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "",
                "--appendonly", "no", "--dir", folder,
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            if not listens_within(port, START_S):
                raise NoRedis("redis-server does not listen")
            yield port
        finally:
            process.kill()
            process.wait()
