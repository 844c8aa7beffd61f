"""A pool of engines at known addresses: local mode, and any place without Kubernetes.

Whoever starts the engines says where they are, at each observation anew; a replica that is gone
simply is not named any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import aiohttp

from chairlift_operator.apply import apply_actions
from chairlift_operator.cluster import ActionResult
from chairlift_operator.decisions import Action, SetReplicas
from chairlift_operator.engine_client import (
    EngineClient,
    ReplicaEndpoint,
)
from chairlift_operator.gateway_client import read_gateway
from chairlift_operator.http_asking import EngineError
from chairlift_operator.observing import observe_engine
from chairlift_operator.snapshot import GatewaySnapshot, Phase, ReplicaSnapshot, Snapshot
from chairlift_protocol.wire import RequestClass


@dataclass(frozen=True, slots=True)
class StartingReplica:
    """Asked for, and not yet answering."""

    name: str
    request_class: RequestClass


class Fleet(Protocol):
    """Whoever starts and stops the engines, and their gateway."""

    @property
    def gateway_url(self) -> str: ...

    def endpoints(self) -> Sequence[ReplicaEndpoint]:
        """Those that answer, draining ones included."""
        ...

    def starting(self) -> Sequence[StartingReplica]: ...

    def set_replicas(self, action: SetReplicas) -> str:
        """Begin to have so many; say what was begun."""
        ...


class DirectCluster:
    """Implements `cluster.Cluster`. `now_s` is the clock that plans are made by. weights: of
    tenants, asked at each observation; None leaves engines' as they are.
    """

    def __init__(
        self,
        pool: str,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        now_s: Callable[[], float],
        weights: Callable[[], Mapping[str, float] | None] = lambda: None,
    ) -> None:
        self._weights = weights
        self._pool = pool
        self._fleet = fleet
        self._session = session
        self._now_s = now_s

    async def observe(self) -> Snapshot:
        clients = self._clients().values()
        starting = tuple(
            ReplicaSnapshot(s.name, False, s.request_class, phase=Phase.STARTING)
            for s in self._fleet.starting()
        )
        gateway, replicas = await asyncio.gather(
            self._observe_gateway(),
            asyncio.gather(*(self._observe_replica(client) for client in clients)),
        )
        seen = Snapshot(self._pool, self._now_s(), (*replicas, *starting), gateway)
        return replace(seen, weights=self._weights())

    async def apply(self, actions: Sequence[Action]) -> tuple[ActionResult, ...]:
        return await apply_actions(actions, self._clients(), self._set_replicas)

    async def _set_replicas(self, action: SetReplicas) -> ActionResult:
        return ActionResult(action, True, self._fleet.set_replicas(action))

    def _clients(self) -> dict[str, EngineClient]:
        return {e.name: EngineClient(self._session, e) for e in self._fleet.endpoints()}

    async def _observe_gateway(self) -> GatewaySnapshot:
        try:
            classes = await read_gateway(self._session, self._fleet.gateway_url)
        except EngineError as error:
            return GatewaySnapshot(failure=str(error))
        return GatewaySnapshot(classes, self._now_s())

    async def _observe_replica(self, client: EngineClient) -> ReplicaSnapshot:
        is_draining = client.endpoint.is_draining
        phase = Phase.DRAINING if is_draining else Phase.SERVING
        ready, seen = await asyncio.gather(
            client.is_ready(), observe_engine(client, self._now_s, phase)
        )
        return replace(seen, ready=ready)
