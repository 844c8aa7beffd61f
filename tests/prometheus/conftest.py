"""A real Prometheus that scrapes pretended pods every second, and a reader of it.

Needs the binary `prometheus` (Debian's package of that name; `make test-prometheus` installs it).
Without it these tests are skipped, which pytest's summary says; with CHAIRLIFT_NEEDS_PROMETHEUS set
they fail instead.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from chairlift_operator.kube.polling import PrometheusReader
from chairlift_operator.pool_windows import PoolWindows
from chairlift_operator.prometheus.asking import PrometheusClient
from chairlift_operator.prometheus.batch import PoolPods
from chairlift_operator.prometheus.heartbeats import Pod
from chairlift_protocol import metrics
from chairlift_protocol.wire import RequestClass

WAIT_S = 15.0
THRESHOLDS_MS = {
    (RequestClass.INTERACTIVE, "itl"): 50.0,
    (RequestClass.INTERACTIVE, "ttft"): 1000.0,
}
PODS = ("chat-a", "chat-b")
NUM_NAMESPACES = 28
CONFIG = """
global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs:
  - job_name: annotated
    file_sd_configs: [{files: [targets.json], refresh_interval: 1s}]
  - job_name: monitored
    file_sd_configs: [{files: [again.json], refresh_interval: 1s}]
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.prometheus)


Number = float | Callable[[], float]


@dataclass
class Exporter:
    """One pod's /metrics. series: by name and labels as they are written, a number or its maker."""

    namespace: str
    pod: str
    series: dict[str, Number] = field(default_factory=dict)
    is_down: bool = False
    born_s: float = field(default_factory=time.time)

    def per_s(self, rate: float) -> Callable[[], float]:
        """A counter that has grown at this rate since the pod was born."""
        return lambda: rate * (time.time() - self.born_s)

    def restart(self) -> None:
        self.born_s = time.time()

    def text(self) -> str:
        values = {name: v() if callable(v) else v for name, v in self.series.items()}
        return "".join(f"{name} {value}\n" for name, value in values.items())

    def serve_gaps(self, good_per_s: float, bad_per_s: float, extra: str = "") -> None:
        """As an engine exposes it; first tokens are all good."""
        series = {
            f"{metrics.NUM_REQUESTS_RUNNING}{{{extra}}}": 4.0,
            f"{metrics.NUM_REQUESTS_WAITING}{{{extra}}}": 2.0,
            f"{metrics.KV_CACHE_USAGE}{{{extra}}}": 0.25,
            f"{metrics.STEPS}{{{extra}}}": self.per_s(50),
            f"{metrics.STEP_SECONDS}{{{extra}}}": self.per_s(0.9),
            f"{metrics.STEP_DECODE_SEQS}{{{extra}}}": self.per_s(200),
            f"{metrics.STEP_PREFILL_TOKENS}{{{extra}}}": self.per_s(900),
            f"{metrics.STEP_KV_TOKENS}{{{extra}}}": self.per_s(40_000),
        }
        events = {
            ("itl", 50, "good"): good_per_s,
            ("itl", 50, "bad"): bad_per_s,
            ("ttft", 1000, "good"): 20.0,
            ("ttft", 1000, "bad"): 0.0,
        }
        for (objective, threshold_ms, result), rate in events.items():
            labels = (
                f'{extra}objective="{objective}",threshold_ms="{threshold_ms}",result="{result}",'
                'class="interactive"'
            )
            series[f"{metrics.SLO_EVENTS}{{{labels}}}"] = self.per_s(rate)
        self.series |= series

    def serve_arrivals(self, interactive_per_s: float) -> None:
        for request_class, rate in (("interactive", interactive_per_s), ("batch", 0.0)):
            self.series[f'{metrics.REQUESTS_RECEIVED}{{class="{request_class}"}}'] = self.per_s(
                rate
            )
            self.series[f'{metrics.GATEWAY_HELD}{{class="{request_class}"}}'] = 0.0


class Cluster:
    """All pods behind one server, and the files by which Prometheus finds them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._exporters: dict[str, Exporter] = {}
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                cluster._answer(self)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._told: list[tuple[Exporter, dict[str, str], str]] = []
        self._free = list(range(NUM_NAMESPACES))
        for number in self._free:
            for name in PODS:
                self.pod(f"team-{number}", name)
        self._write()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def namespace(self, *pods: str) -> tuple[str, list[Exporter]]:
        """One that nobody else uses, and its pods of these names. Those that PODS names are
        scraped already: Prometheus takes 5 s to hear of others."""
        name = f"team-{self._free.pop()}"
        exporters = [self._exporters.get(f"/{name}/{pod}") or self.pod(name, pod) for pod in pods]
        for exporter in exporters:
            exporter.restart()
        return name, exporters

    def pod(
        self, namespace: str, name: str, job: str = "annotated", labels: Any = None
    ) -> Exporter:
        """labels: those of its target, where a scrape configuration leaves some out."""
        known = self._exporters.get(f"/{namespace}/{name}")
        exporter = known or Exporter(namespace, name)
        self._exporters[f"/{namespace}/{name}"] = exporter
        target = {"namespace": namespace, "pod": name} if labels is None else labels
        self._told.append((exporter, target, job))
        self._write()
        return exporter

    def forget(self, exporter: Exporter) -> None:
        self._told = [told for told in self._told if told[0] is not exporter]
        self._write()

    def _write(self) -> None:
        address = f"127.0.0.1:{self._server.server_port}"
        for job, file in (("annotated", "targets.json"), ("monitored", "again.json")):
            targets = [
                {
                    "targets": [address],
                    "labels": {
                        **labels,
                        "instance": f"{exporter.namespace}-{exporter.pod}:8000",
                        "__metrics_path__": f"/{exporter.namespace}/{exporter.pod}",
                    },
                }
                for exporter, labels, of_job in self._told
                if of_job == job
            ]
            fresh = self.folder / f"{file}.new"
            fresh.write_text(json.dumps(targets))
            fresh.replace(self.folder / file)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        exporter = self._exporters.get(request.path)
        is_up = exporter is not None and not exporter.is_down
        body = exporter.text().encode() if exporter is not None and is_up else b""
        request.send_response(200 if is_up else 503)
        request.send_header("content-type", "text/plain; version=0.0.4")
        request.send_header("content-length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)


@dataclass
class Server:
    """One Prometheus process; may be ended and begun again on its port."""

    binary: str
    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [
            self.binary,
            f"--config.file={self.folder}/prometheus.yml",
            f"--storage.tsdb.path={self.folder}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=warn",
        ]
        with (self.folder / "prometheus.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        eventually("prometheus answers", self._is_up)

    def _is_up(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError((self.folder / "prometheus.log").read_text())
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
                return True
        except OSError:
            return False

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=20)

    def lose_data(self) -> None:
        shutil.rmtree(self.folder / "data")


def eventually(what: str, probe: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if found := probe():
            return found
        time.sleep(0.2)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


@contextmanager
def _running(folder: Path) -> Iterator[tuple[Cluster, Server]]:
    binary = shutil.which("prometheus")
    if binary is None:
        reason = "needs a Prometheus: make test-prometheus installs Debian's"
        if os.environ.get("CHAIRLIFT_NEEDS_PROMETHEUS"):
            pytest.fail(reason)
        pytest.skip(reason)
    (folder / "prometheus.yml").write_text(CONFIG)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    cluster, server = Cluster(folder), Server(binary, folder, port)
    try:
        server.start()
        yield cluster, server
    finally:
        server.stop()
        cluster.stop()


@dataclass(frozen=True)
class World:
    cluster: Cluster
    server: Server

    def windows(
        self,
        namespace: str,
        *engines: str,
        gateways: tuple[str, ...] = (),
        thresholds_ms: Mapping[tuple[RequestClass, str], float] = THRESHOLDS_MS,
    ) -> PoolWindows:
        """What a fresh reader says of a pool with these Ready pods."""
        pods = PoolPods(
            {RequestClass.INTERACTIVE: [Pod((namespace, name), 0.0) for name in engines]},
            [Pod((namespace, name), 0.0) for name in gateways],
            thresholds_ms,
        )

        async def read(reader: PrometheusReader) -> PoolWindows:
            reader.windows((namespace, "chat"), pods)
            await reader.poll_windows()
            return reader.windows((namespace, "chat"), pods)

        return self.run(read)

    def run(self, use: Callable[[PrometheusReader], Any]) -> Any:
        async def main() -> Any:
            async with aiohttp.ClientSession() as session:
                client = PrometheusClient(session, self.server.url)
                return await use(PrometheusReader(client, time.time))

        return asyncio.run(main())

    def query(self, text: str) -> tuple[Any, ...]:
        """The series that it answers with."""

        async def ask(reader: PrometheusReader) -> Any:
            return await reader._client.ask({"test": text}, time.time(), 5.0)

        series: tuple[Any, ...] = self.run(ask)["test"].series
        return series

    def until(
        self, read: Callable[[], PoolWindows], probe: Callable[[PoolWindows], Any]
    ) -> PoolWindows:
        latest: list[PoolWindows] = []

        def is_so() -> bool:
            latest.append(read())
            return bool(probe(latest[-1]))

        try:
            eventually("the windows say so", is_so)
        except AssertionError as error:
            raise AssertionError(f"{error}; the last: {latest[-1]}") from None
        return latest[-1]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Shared: each test has a namespace of its own."""
    with _running(tmp_path_factory.mktemp("prometheus")) as (cluster, server):
        yield World(cluster, server)


@pytest.fixture
def own_world(tmp_path: Path) -> Iterator[World]:
    with _running(tmp_path) as (cluster, server):
        yield World(cluster, server)
