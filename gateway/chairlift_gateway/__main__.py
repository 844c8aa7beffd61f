"""`chairlift-gateway`: one process, one port, until SIGTERM; then streams in flight finish first.

Exit code 0 after an orderly end, 2 with one sentence on stderr when it cannot start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence

import prometheus_client

from chairlift_gateway.app import Gateway, open_gateway
from chairlift_gateway.config import ConfigError, GatewayConfig, parse_config
from chairlift_gateway.endpoints import EndpointsError, EndpointSource, FileEndpoints
from chairlift_gateway.identity import TenantsError, TenantsFile
from chairlift_gateway.kubernetes_endpoints import KubernetesEndpoints
from chairlift_gateway.kubernetes_tenants import KubernetesTenants
from chairlift_gateway.kubernetes_watch import ApiAccess, NotInCluster
from chairlift_gateway.server import BACKLOG, Server

# After the cut, clients that do not even take their error event are not waited for.
LAST_WORDS_S = 2

logger = logging.getLogger("chairlift_gateway")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        config = parse_config(argv)
        source = _open_endpoints(config)
        tenants = _open_tenants(config)
        listener = listen(config)
    except ConfigError as error:
        print(f"chairlift-gateway: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    # What no line shows is not looked up for each; as Python's logging HOWTO advises.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    _allow_connections()
    asyncio.run(_serve(config, source, tenants, listener))
    return 0


def _allow_connections() -> None:
    """As many as the system lets it have: a stream is two, and 1,024 a usual first limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(
    config: GatewayConfig,
    source: EndpointSource,
    tenants: KubernetesTenants | None,
    listener: socket.socket,
) -> None:
    async with open_gateway(config, source, tenants) as gateway:
        server = Server(gateway.serve)
        draining = asyncio.Event()
        _drain_on_signal(config, gateway, server, draining)
        await server.listen(listener)
        host, port = listener.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        print(f"chairlift-gateway: listening on http://{address}", flush=True)
        await draining.wait()
        await server.close(config.drain_s + LAST_WORDS_S)


def _drain_on_signal(
    config: GatewayConfig, gateway: Gateway, server: Server, draining: asyncio.Event
) -> None:
    """The first signal drains; a second one cuts off what is still in flight."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if draining.is_set():
            gateway.cut_off()
            loop.call_later(LAST_WORDS_S, server.cut_off)
            return
        logger.info("draining for at most %g s; signal again to cut off", config.drain_s)
        gateway.begin_drain()
        draining.set()
        loop.call_later(config.drain_s, gateway.cut_off)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


def _open_endpoints(config: GatewayConfig) -> EndpointSource:
    option = "--endpoints-file" if config.endpoints_path else "--kubernetes-pool"
    try:
        if config.endpoints_path is not None:
            return FileEndpoints(config.endpoints_path)
        assert config.kubernetes_pool is not None
        return KubernetesEndpoints(ApiAccess.in_cluster(), config.kubernetes_pool)
    except (EndpointsError, NotInCluster) as error:
        raise ConfigError(f"{option}: {error}") from error


def _open_tenants(config: GatewayConfig) -> KubernetesTenants | None:
    """Those to be watched; a file is looked at, so that a bad one is said at the start."""
    if config.tenants_path is not None:
        try:
            TenantsFile(config.tenants_path)
        except TenantsError as error:
            raise ConfigError(f"--tenants-file: {error}") from error
    if config.kubernetes_tenants is None or config.kubernetes_pool is None:
        return None
    namespace = config.kubernetes_pool.partition("/")[0]
    return KubernetesTenants(ApiAccess.in_cluster(), namespace, config.kubernetes_tenants)


def listen(config: GatewayConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(
            f"--port: cannot listen on {config.host} port {config.port}: {why}; "
            "choose a free one, or 0 to have one picked"
        ) from error
    # Its connections inherit this; asyncio does not set it on sockets that were made elsewhere, and
    # without it every token waits until the client has acknowledged the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


if __name__ == "__main__":
    sys.exit(main())
