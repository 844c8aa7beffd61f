"""A pool's gateways together: what they count, asked now or heard of once it changes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from chairlift_operator.exposition import GatewayClassSample
from chairlift_operator.gateway_client import Counts, read_gateway
from chairlift_operator.http_asking import EngineError
from chairlift_operator.kube import names
from chairlift_operator.kube.listening import Listening
from chairlift_operator.kube.objects import GatewayPod, PoolObjects
from chairlift_operator.kube.polling import SAMPLE, PrometheusReader
from chairlift_operator.snapshot import GATEWAY_SOURCE, GatewaySnapshot
from chairlift_protocol.wire import RequestClass

_Ask = Callable[[str], Awaitable[Counts]]


class GatewayReader:
    def __init__(
        self,
        objects: PoolObjects,
        session: aiohttp.ClientSession,
        listening: Listening,
        now_s: Callable[[], float],
    ) -> None:
        self._objects, self._session, self._now_s = objects, session, now_s
        self._listening = listening

    async def read(self, prometheus: PrometheusReader | None) -> GatewaySnapshot:
        """Where one cannot be read, arrivals are not known."""
        return await self._summed(prometheus, self._read_now)

    async def hear(self, prometheus: PrometheusReader | None) -> GatewaySnapshot:
        """The same of a pool at rest: silence is an answer."""
        return await self._summed(prometheus, self._listening.read)

    async def _read_now(self, url: str) -> Counts:
        return await read_gateway(self._session, url)

    async def _summed(self, prometheus: PrometheusReader | None, ask: _Ask) -> GatewaySnapshot:
        asked = [g for g in self._objects.gateways() if g.ip is not None and g.is_ready]
        if not asked:
            return GatewaySnapshot(failure="no gateway is ready")
        try:
            read = await asyncio.gather(*(self._one(g, prometheus, ask) for g in asked))
        except EngineError as error:
            return GatewaySnapshot(failure=str(error))
        told = [source for _, _, source in read if source != GATEWAY_SOURCE]
        return GatewaySnapshot(
            summed([counts for counts, _, _ in read]),
            min(at_s for _, at_s, _ in read),
            source=told[0] if told else GATEWAY_SOURCE,
        )

    async def _one(
        self, gateway: GatewayPod, prometheus: PrometheusReader | None, ask: _Ask
    ) -> tuple[Counts, float, str]:
        """Its counts, of when and from where; EngineError."""
        assert gateway.ip is not None
        try:
            counts = await ask(url_of(gateway.ip, names.GATEWAY_PORT))
            return counts, self._now_s(), GATEWAY_SOURCE
        except EngineError as error:
            if prometheus is None:
                raise
            told = prometheus.sample((self._objects.namespace, gateway.name))
            if isinstance(told, str):
                raise EngineError(f"{error}; {told}") from error
            if (known := told.gateway()) is None:
                raise EngineError(f"{error}; Prometheus lacks some of its series") from error
            return known, told.at_s, f"Prometheus: {SAMPLE}"


def summed(samples: Sequence[Counts]) -> Counts:
    """Arrivals of all gateways by class."""
    told = [each for sample in samples for each in sample]
    known = {c: [each for each in told if each.request_class is c] for c in RequestClass}
    return tuple(
        GatewayClassSample(c, sum(s.num_received for s in found), sum(s.num_held for s in found))
        for c, found in known.items()
        if found
    )


def url_of(ip: str, port: int) -> str:
    host = f"[{ip}]" if ":" in ip else ip
    return f"http://{host}:{port}"
