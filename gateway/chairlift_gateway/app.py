"""The gateway put together: paths, health, metrics, and the parts behind them for a process's life.

It knows no sockets to listen on and no signals; `__main__` and the tests do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from chairlift_gateway.arrivals import ArrivalsPage, Changes
from chairlift_gateway.config import GatewayConfig
from chairlift_gateway.endpoints import EndpointSource
from chairlift_gateway.engine_usage import EngineUsage
from chairlift_gateway.identity import Identification, TenantsFile
from chairlift_gateway.kubernetes_tenants import KubernetesTenants
from chairlift_gateway.metering import Metering
from chairlift_gateway.metrics import GatewayMetrics
from chairlift_gateway.openai_errors import Refusal
from chairlift_gateway.proxy import Proxy, ProxyRoute
from chairlift_gateway.quota.upkeep import open_keeper
from chairlift_gateway.routing import Router
from chairlift_gateway.targets import Cost, Target
from chairlift_gateway.upstream import Upstream, open_session
from chairlift_protocol import wire

BATCH_PREFIX = "/batch"


class Gateway:
    """As an ASGI application it serves; the rest is for whoever starts and stops it."""

    def __init__(
        self, proxy: Proxy, upstream: Upstream, metrics: GatewayMetrics, changes: Changes
    ) -> None:
        self._proxy = proxy
        self._upstream = upstream
        self._metrics = metrics
        self._changes = changes
        self._is_draining = False
        routes = list(self._proxied_routes())
        self._proxied = {
            (method, route.path): route.app for route in routes for method in route.methods or ()
        }
        self._starlette = self._build_starlette(routes)

    @property
    def router(self) -> Router:
        """What it knows of the replicas."""
        return self._upstream.router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What is passed on, and each of its events, is spared the way through Starlette."""
        serve = self._proxied.get((scope["method"], scope["path"]), self._starlette)
        await serve(scope, receive, send)

    def begin_drain(self) -> None:
        self._is_draining = True
        self._changes.end()

    def cut_off(self) -> None:
        self._proxy.cut_off()

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def _ready(self, request: Request) -> Response:
        """Ready as long as it knows a replica; a busy one is no reason to take the gateway out."""
        if self._is_draining:
            status = "draining"
        else:
            status = "ready" if self._upstream.router.replicas else "no replica known"
        return JSONResponse({"status": status}, status_code=200 if status == "ready" else 503)

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    def _build_starlette(self, proxied: Sequence[Route]) -> Starlette:
        """Knows the proxied routes too, for what it says of other methods."""
        app = Starlette(
            routes=[
                *proxied,
                Route(wire.LIVE_PATH, self._live),
                Route(wire.READY_PATH, self._ready),
                Route(wire.METRICS_PATH, self._show_metrics),
                Route(wire.ARRIVALS_PATH, ArrivalsPage(self._metrics, self._changes).__call__),
            ],
            exception_handlers={HTTPException: _refuse},
        )
        app.router.redirect_slashes = False
        return app

    def _proxied_routes(self) -> Iterator[Route]:
        for path, method, cost in (
            (wire.COMPLETIONS_PATH, "POST", Cost.TOKENS),
            (wire.CHAT_COMPLETIONS_PATH, "POST", Cost.TOKENS),
            (wire.TOKENIZE_PATH, "POST", Cost.A_REQUEST),
            (wire.DETOKENIZE_PATH, "POST", Cost.A_REQUEST),
            (wire.MODELS_PATH, "GET", Cost.NOTHING),
        ):
            for prefix in ("", BATCH_PREFIX):
                target = Target(path, cost, is_batch=bool(prefix))
                yield Route(prefix + path, ProxyRoute(self._proxy, target), methods=[method])


@asynccontextmanager
async def open_gateway(
    config: GatewayConfig, source: EndpointSource, tenants: KubernetesTenants | None = None
) -> AsyncIterator[Gateway]:
    """A gateway whose list of replicas is kept up to date; a watch that dies takes it down.

    tenants: instead of the file that the configuration names.
    """
    changes = Changes()
    metrics = GatewayMetrics(changes.note)
    async with open_session() as session, asyncio.TaskGroup() as tasks:
        hold_s = {
            wire.RequestClass.INTERACTIVE: config.hold_s,
            wire.RequestClass.BATCH: config.batch_hold_s,
        }
        upstream = Upstream(
            source, session, metrics, hold_s=hold_s, hold_max=config.hold_max,
            max_unstated=config.replica_concurrency,
        )  # fmt: skip
        upstream.publish(source.latest())
        watching = tasks.create_task(source.watch(upstream.publish))
        probing = tasks.create_task(upstream.probe())
        try:
            engines = EngineUsage(session, config.internal_token)
            async with _metering(config, metrics, engines) as metering, _watched(tenants):
                proxy = Proxy(config, _identification(config, tenants), metering, upstream, metrics)
                yield Gateway(proxy, upstream, metrics, changes)
        finally:
            watching.cancel()
            probing.cancel()
            await upstream.close()


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


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    what = f"{request.method} {request.url.path}"
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "")
        refusal = Refusal(
            status, "method_not_allowed", f"{what} is not allowed; this path takes {allowed}."
        )
    else:
        refusal = Refusal(status, "not_found", f"{what} is not served here.")
    headers = {"content-type": "application/json", **(error.headers or {})}
    return Response(refusal.body(), status_code=status, headers=headers)
