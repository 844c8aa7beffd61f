"""Whether a server that a benchmark has started listens yet."""

from __future__ import annotations

import socket
import time


def listens_within(port: int, within_s: float) -> bool:
    """On loopback; returns as soon as a connection is taken."""
    end_s = time.monotonic() + within_s
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0):
                return True
        except OSError:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.02)
