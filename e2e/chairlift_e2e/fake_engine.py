"""Stands in for an engine or a gateway of a pod: their ports, what the operator reads there, and
what it writes. No requests are served; a test says how many are in flight.
"""

from __future__ import annotations

import os
from typing import Any, Final

from aiohttp import web

from chairlift_gateway.arrivals import Changes
from chairlift_protocol import metrics, wire
from chairlift_protocol.policy import Generation, Policy, PolicyError, SloThresholds

Json = dict[str, Any]
PUBLIC_PORT: Final = 8000
ADMIN_PORT: Final = 9000
GATEWAY_PORT: Final = 8080
CAPACITY: Final = {
    "batch_size": 1024,
    "step_tokens": 8192,
    "kv_tokens": 100_000,
    "block_tokens": 16,
    "model_length_tokens": 4096,
}


def address(number: int) -> str:
    """The process's own one of that number: two runs on one machine do not meet."""
    return f"127.{16 + os.getpid() % 200}.{number // 250}.{number % 250 + 1}"


class FakePod:
    """Serves on an address of its own, on the ports that the chart's pods have.

    exposition: what it shows as metrics at all times, instead of the few that it counts.
    num_shown: how often it was asked for them.
    """

    def __init__(self, ip: str, exposition: str | None = None) -> None:
        self.ip = ip
        self.exposition = exposition
        self.num_shown = 0
        self._runners: list[web.AppRunner] = []

    async def start(self) -> None:
        for app, port in self.apps():
            runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, self.ip, port).start()
            self._runners.append(runner)

    async def stop(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    def apps(self) -> list[tuple[web.Application, int]]:
        raise NotImplementedError

    def counted(self) -> str:
        raise NotImplementedError

    async def show(self, request: web.Request) -> web.Response:
        self.num_shown += 1
        return web.Response(text=self.exposition or self.counted())


class FakeEngine(FakePod):
    """policies: every one that was accepted, in order. metrics_are_refused: as by a network policy
    on the public port alone."""

    def __init__(self, ip: str, exposition: str | None = None) -> None:
        super().__init__(ip, exposition)
        self.num_in_flight = 0
        self.is_draining = False
        self.policies = [Policy(Generation(0, 0), 16, 256, 256, 1.0, SloThresholds(3000.0, 300.0))]
        self.num_refused = 0
        self.metrics_are_refused = False

    @property
    def policy(self) -> Policy:
        return self.policies[-1]

    def apps(self) -> list[tuple[web.Application, int]]:
        public, admin = web.Application(), web.Application()
        public.router.add_get(wire.METRICS_PATH, self.show)
        admin.router.add_get(wire.ADMIN_POLICY_PATH, self._read)
        admin.router.add_patch(wire.ADMIN_POLICY_PATH, self._write)
        admin.router.add_post(wire.ADMIN_DRAIN_PATH, self._drain)
        return [(public, PUBLIC_PORT), (admin, ADMIN_PORT)]

    async def _read(self, request: web.Request) -> web.Response:
        told = self.policy.to_json()
        return web.json_response({"desired": told, "effective": told, "capacity": CAPACITY})

    async def _write(self, request: web.Request) -> web.Response:
        try:
            policy = Policy.from_json(await request.json())
        except PolicyError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        if policy.generation <= self.policy.generation:
            self.num_refused += 1
            return web.json_response({"error": {"message": "stale policy"}}, status=409)
        self.policies.append(policy)
        return await self._read(request)

    async def _drain(self, request: web.Request) -> web.Response:
        self.is_draining = True
        return web.json_response({"draining": True, "num_left": self.num_in_flight})

    async def show(self, request: web.Request) -> web.Response:
        if self.metrics_are_refused:
            return web.Response(status=503)
        return await super().show(request)

    def counted(self) -> str:
        counters = (
            metrics.STEP_SECONDS,
            metrics.STEPS,
            metrics.STEP_DECODE_SEQS,
            metrics.STEP_PREFILL_TOKENS,
            metrics.STEP_KV_TOKENS,
            metrics.NUM_REQUESTS_WAITING,
            metrics.KV_CACHE_USAGE,
            metrics.PROMPT_TOKENS,
            metrics.GENERATION_TOKENS,
            metrics.NUM_PREEMPTIONS,
        )
        labels = 'model_name="tiny",engine="0"'
        lines = [f"{name}{{{labels}}} 0" for name in counters]
        lines.append(f"{metrics.NUM_REQUESTS_RUNNING}{{{labels}}} {self.num_in_flight}")
        return "\n".join(lines) + "\n"


class FakeGateway(FakePod):
    """num_listening: who waits to hear of an arrival. has_page: where that can be waited for."""

    def __init__(self, ip: str, exposition: str | None = None) -> None:
        super().__init__(ip, exposition)
        self.num_received = 0
        self.num_listening = 0
        self.has_page = True
        self._changes = Changes()

    def receive(self, num_requests: int = 1) -> None:
        """In the loop that serves it."""
        self.num_received += num_requests
        self._changes.note()

    def apps(self) -> list[tuple[web.Application, int]]:
        app = web.Application()
        app.router.add_get(wire.METRICS_PATH, self.show)
        app.router.add_get(wire.ARRIVALS_PATH, self._listened)
        return [(app, GATEWAY_PORT)]

    async def _listened(self, request: web.Request) -> web.Response:
        known = request.headers.get("if-none-match")
        if not self.has_page:
            return web.Response(status=404)
        self.num_listening += known is not None
        try:
            wait_s = float(request.headers.get("prefer", "wait=0").removeprefix("wait="))
            if known and not await self._changes.is_newer(known, wait_s):
                return web.Response(status=304)
        finally:
            self.num_listening -= known is not None
        text = self.exposition or self.counted()
        return web.Response(text=text, headers={"etag": self._changes.tag})

    def counted(self) -> str:
        lines = []
        for request_class in wire.RequestClass:
            received = self.num_received if request_class == "interactive" else 0
            lines.append(f'{metrics.REQUESTS_RECEIVED}{{class="{request_class}"}} {received}')
            lines.append(f'{metrics.GATEWAY_HELD}{{class="{request_class}"}} 0')
        return "\n".join(lines) + "\n"
