"""The gateway put together: paths, health, metrics, and the parts behind them for a process's life.

It knows no sockets to listen on and no signals; `__main__` and the tests do.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST

from chairlift_gateway.arrivals import ArrivalsPage, Changes
from chairlift_gateway.client_request import ClientRequest
from chairlift_gateway.config import GatewayConfig
from chairlift_gateway.endpoints import EndpointSource
from chairlift_gateway.engine_pool import EnginePool
from chairlift_gateway.engine_usage import EngineUsage
from chairlift_gateway.identity import Identification, TenantsFile
from chairlift_gateway.kubernetes_tenants import KubernetesTenants
from chairlift_gateway.metering import Metering
from chairlift_gateway.metrics import GatewayMetrics
from chairlift_gateway.openai_errors import Refusal
from chairlift_gateway.proxy import Proxy
from chairlift_gateway.quota.upkeep import open_keeper
from chairlift_gateway.routing import Router
from chairlift_gateway.targets import Cost, Target
from chairlift_gateway.upstream import Upstream
from chairlift_protocol import wire

BATCH_PREFIX = "/batch"


Answering = Callable[[ClientRequest], Awaitable[None]]


class Gateway:
    """It serves requests; the rest is for whoever starts and stops it."""

    def __init__(
        self, proxy: Proxy, upstream: Upstream, metrics: GatewayMetrics, changes: Changes
    ) -> None:
        self._proxy = proxy
        self._upstream = upstream
        self._metrics = metrics
        self._changes = changes
        self._is_draining = False
        self._by_path: defaultdict[str, dict[str, Answering]] = defaultdict(dict)
        self._add_proxied()
        self._add("GET", wire.LIVE_PATH, self._live)
        self._add("GET", wire.READY_PATH, self._ready)
        self._add("GET", wire.METRICS_PATH, self._show_metrics)
        self._add("GET", wire.ARRIVALS_PATH, ArrivalsPage(metrics, changes).answer)

    @property
    def router(self) -> Router:
        """What it knows of the replicas."""
        return self._upstream.router

    async def serve(self, request: ClientRequest) -> None:
        head = request.head
        by_method = self._by_path.get(head.path)
        answer = by_method.get(head.method) if by_method else None
        if answer is not None:
            await answer(request)
            return
        request.refuse(_not_served(head.method, head.path, by_method))

    def begin_drain(self) -> None:
        self._is_draining = True
        self._changes.end()

    def cut_off(self) -> None:
        self._proxy.cut_off()

    async def _live(self, request: ClientRequest) -> None:
        _say(request, 200, "alive")

    async def _ready(self, request: ClientRequest) -> None:
        """Ready as long as it knows a replica; a busy one is no reason to take the gateway out."""
        if self._is_draining:
            status = "draining"
        else:
            status = "ready" if self._upstream.router.replicas else "no replica known"
        _say(request, 200 if status == "ready" else 503, status)

    async def _show_metrics(self, request: ClientRequest) -> None:
        headers = [(b"content-type", CONTENT_TYPE_LATEST.encode())]
        request.respond(200, headers, self._metrics.exposition())

    def _add(self, method: str, path: str, answering: Answering) -> None:
        self._by_path[path][method] = answering
        if method == "GET":
            self._by_path[path]["HEAD"] = answering

    def _add_proxied(self) -> None:
        for path, method, cost in (
            (wire.COMPLETIONS_PATH, "POST", Cost.TOKENS),
            (wire.CHAT_COMPLETIONS_PATH, "POST", Cost.TOKENS),
            (wire.TOKENIZE_PATH, "POST", Cost.A_REQUEST),
            (wire.DETOKENIZE_PATH, "POST", Cost.A_REQUEST),
            (wire.MODELS_PATH, "GET", Cost.NOTHING),
        ):
            for prefix in ("", BATCH_PREFIX):
                target = Target(path, cost, is_batch=bool(prefix))
                self._add(method, prefix + path, partial(self._proxy.serve, target))


@asynccontextmanager
async def open_gateway(
    config: GatewayConfig, source: EndpointSource, tenants: KubernetesTenants | None = None
) -> AsyncIterator[Gateway]:
    """A gateway whose list of replicas is kept up to date; a watch that dies takes it down.

    tenants: instead of the file that the configuration names.
    """
    changes = Changes()
    metrics = GatewayMetrics(changes.note)
    pool = EnginePool()
    async with asyncio.TaskGroup() as tasks:
        hold_s = {
            wire.RequestClass.INTERACTIVE: config.hold_s,
            wire.RequestClass.BATCH: config.batch_hold_s,
        }
        upstream = Upstream(
            source, pool, metrics, hold_s=hold_s, hold_max=config.hold_max,
            max_unstated=config.replica_concurrency,
        )  # fmt: skip
        upstream.publish(source.latest())
        watching = tasks.create_task(source.watch(upstream.publish))
        probing = tasks.create_task(upstream.probe())
        try:
            engines = EngineUsage(pool, config.internal_token)
            async with _metering(config, metrics, engines) as metering, _watched(tenants):
                proxy = Proxy(config, _identification(config, tenants), metering, upstream, metrics)
                yield Gateway(proxy, upstream, metrics, changes)
        finally:
            watching.cancel()
            probing.cancel()
            await upstream.close()
            pool.close()


def _identification(config: GatewayConfig, watched: KubernetesTenants | None) -> Identification:
    return Identification(
        TenantsFile(config.tenants_path) if config.tenants_path else watched,
        config.serves_anonymous,
        config.batch_key_digests,
        config.trusted_tenant_header,
    )


@asynccontextmanager
async def _watched(tenants: KubernetesTenants | None) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(tenants.watch()) if tenants is not None else None
        try:
            yield
        finally:
            if watching is not None:
                watching.cancel()


@asynccontextmanager
async def _metering(
    config: GatewayConfig, metrics: GatewayMetrics, engines: EngineUsage
) -> AsyncIterator[Metering]:
    if config.redis is None:
        yield Metering(None, metrics, engines)
        return
    async with open_keeper(config.redis, config.quota_pool, config.on_redis_failure) as keeper:
        metrics.watch_quotas(
            lambda: not keeper.breaker.is_open,
            lambda: keeper.leases.num_owed,
            lambda: keeper.num_without_redis,
        )
        metering = Metering(keeper, metrics, engines)
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(metering.watch())
            try:
                yield metering
            finally:
                watching.cancel()


def _say(request: ClientRequest, status: int, told: str) -> None:
    headers = [(b"content-type", b"application/json")]
    request.respond(status, headers, json.dumps({"status": told}).encode())


def _not_served(method: str, path: str, by_method: Mapping[str, Answering] | None) -> Refusal:
    what = f"{method} {path}"
    if by_method is None:
        return Refusal(HTTPStatus.NOT_FOUND, "not_found", f"{what} is not served here.")
    allowed = ", ".join(by_method)
    return Refusal(
        HTTPStatus.METHOD_NOT_ALLOWED,
        "method_not_allowed",
        f"{what} is not allowed; this path takes {allowed}.",
        more_headers=[(b"allow", allowed.encode())],
    )
