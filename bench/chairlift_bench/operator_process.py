"""What an operator's process costs: processor time and memory from /proc, calls from its metrics.

Nothing is asked of the operator but its own metrics page, once at each end of a window.
"""

from __future__ import annotations

import os
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_CALLS: Final = "chairlift_operator_api_calls_total"


@dataclass(frozen=True, slots=True)
class Spent:
    """Up to a moment. server_calls: all that the API server answered, whoever asked."""

    at_s: float
    cpu_s: float
    own_calls: float
    server_calls: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Between two moments."""

    wall_s: float
    cores: float
    own_calls_per_minute: float
    server_calls_per_minute: float

    @classmethod
    def between(cls, before: Spent, after: Spent) -> Cost:
        wall_s = after.at_s - before.at_s
        return cls(
            wall_s,
            (after.cpu_s - before.cpu_s) / wall_s,
            60 * (after.own_calls - before.own_calls) / wall_s,
            60 * (after.server_calls - before.server_calls) / wall_s,
        )


def spent(pid: int, metrics_port: int, server_metrics: str) -> Spent:
    """server_metrics: the API server's page, read by the caller."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as page:
        own = page.read().decode()
    return Spent(
        time.monotonic(),
        cpu_s(pid),
        total(own, _CALLS),
        total(server_metrics, "apiserver_request_total"),
    )


def total(exposition: str, name: str) -> float:
    """Sum over all series of one counter."""
    own = [line for line in exposition.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    families = text_string_to_metric_families("\n".join(own))
    return sum(sample.value for family in families for sample in family.samples)


def cpu_s(pid: int) -> float:
    """User and system time of all threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def rss_mib(pid: int, field: str = "VmRSS") -> float:
    """VmRSS: now; VmHWM: the most it ever was."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    known = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
    return int(known[field].split()[0]) / 1024
