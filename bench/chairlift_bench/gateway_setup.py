"""What `bench_gateway` compares: an engine's stand-in asked directly, through the gateway with
everything on, and through nginx as a plain proxy. All on loopback; all end with the benchmark.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import redis

from chairlift_bench.gateway_load import Target
from chairlift_bench.listening import listens_within
from chairlift_bench.redis_process import running_redis
from chairlift_protocol.quota import Limits, QuotaKeys, default_holder, holder_of
from chairlift_protocol.wire import RequestClass

POOL: Final = "bench/gateway"
KEY: Final = "bench-key"
START_S: Final = 20.0
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_NGINX: Final = """
daemon off;
master_process off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr error;
events {{ worker_connections 4096; }}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 256; }}
  server {{
    listen 127.0.0.1:{port};
    keepalive_requests 1000000;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


class NoNginx(Exception):
    """There is no nginx; the message says how to get one."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One way to the engine. pid: of the process in between, None on the direct way."""

    target: Target
    pid: int | None

    def cpu_s(self) -> float:
        """Its processor time so far, the kernel's for it included."""
        return 0.0 if self.pid is None else process_cpu_s(self.pid)


@dataclass(frozen=True, slots=True)
class Ways:
    direct: Measured
    gateway: Measured
    nginx: Measured


@dataclass(frozen=True, slots=True)
class Cores:
    """All cores' time so far, in the kernel's ticks: of this machine, whoever used it."""

    idle: int
    total: int

    @classmethod
    def now(cls) -> Self:
        ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return cls(ticks[3] + ticks[4], sum(ticks))

    def busy_share_since(self, before: Cores) -> float:
        return 1 - (self.idle - before.idle) / max(1, self.total - before.total)


def process_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


@contextmanager
def running_ways(folder: Path, step_ms: float) -> Iterator[Ways]:
    """step_ms: between two events of a stream. Raise NoRedis or NoNginx."""
    nginx = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if nginx is None:
        raise NoNginx("needs nginx on the PATH: bench/install-nginx gets Debian's")
    with (
        running_redis() as redis_port,
        _started([sys.executable, "-m", "chairlift_bench.gateway_engine", str(step_ms)]) as engine,
    ):
        engine_port = int(_line(engine))
        _write_limits(redis_port)
        with (
            _started(_gateway_command(folder, engine_port, redis_port)) as gateway,
            _started([nginx, "-c", str(_nginx_config(folder, engine_port))]) as proxy,
        ):
            gateway_port = int(_line(gateway).rpartition(":")[2])
            nginx_port = int((folder / "nginx.port").read_text())
            if not listens_within(nginx_port, START_S):
                raise NoNginx("nginx does not listen")
            yield Ways(
                Measured(Target("direct", engine_port), None),
                Measured(Target("gateway", gateway_port, KEY), gateway.pid),
                Measured(Target("nginx", nginx_port), proxy.pid),
            )


def _write_limits(redis_port: int) -> None:
    keys, chat = QuotaKeys(POOL), RequestClass.INTERACTIVE
    limits = Limits(tokens_per_minute=900_000_000, requests_per_minute=900_000, concurrency=50_000)
    with redis.Redis(port=redis_port) as client:
        client.hset(keys.limits, default_holder(chat), Limits().to_json())
        client.hset(keys.limits, default_holder(RequestClass.BATCH), Limits().to_json())
        client.hset(keys.limits, holder_of("bench", chat), limits.to_json())


def _gateway_command(folder: Path, engine_port: int, redis_port: int) -> list[str]:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    engine = {"name": "engine", "url": f"http://127.0.0.1:{engine_port}"}
    (folder / "endpoints.json").write_text(json.dumps({"replicas": [engine]}))
    tenant = {"tenant": "bench", "keys": [{"sha256": digest}]}
    (folder / "tenants.json").write_text(json.dumps({"tenants": [tenant]}))
    (folder / "token").write_text("token")
    return [
        sys.executable, "-m", "chairlift_gateway", "--port", "0",
        "--endpoints-file", str(folder / "endpoints.json"),
        "--internal-token-file", str(folder / "token"),
        "--tenants-file", str(folder / "tenants.json"),
        "--quota-redis", f"redis://127.0.0.1:{redis_port}/0", "--quota-pool", POOL,
    ]  # fmt: skip


def _nginx_config(folder: Path, engine_port: int) -> Path:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    path = folder / "nginx.conf"
    path.write_text(_NGINX.format(folder=folder, engine=engine_port, port=port))
    (folder / "nginx.port").write_text(str(port))
    return path


@contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()
