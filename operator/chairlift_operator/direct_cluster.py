"""A pool of engines at known addresses: local mode, and any place without Kubernetes.

Whoever starts the engines says where they are, at each observation anew; a replica that is gone
simply is not named any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import aiohttp

from chairlift_operator.apply import apply_actions
from chairlift_operator.cluster import ActionResult
from chairlift_operator.decisions import SetPolicy
from chairlift_operator.engine_client import EngineClient, EngineError, ReplicaEndpoint
from chairlift_operator.exposition import EngineSample
from chairlift_operator.snapshot import ReplicaSnapshot, Snapshot


class DirectCluster:
    """Implements `cluster.Cluster`. `now_s` is the clock that plans are made by."""

    def __init__(
        self,
        pool: str,
        endpoints: Callable[[], Sequence[ReplicaEndpoint]],
        session: aiohttp.ClientSession,
        now_s: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._endpoints = endpoints
        self._session = session
        self._now_s = now_s

    async def observe(self) -> Snapshot:
        clients = self._clients().values()
        replicas = await asyncio.gather(*(self._observe_replica(client) for client in clients))
        return Snapshot(self._pool, self._now_s(), tuple(replicas))

    async def apply(self, actions: Sequence[SetPolicy]) -> tuple[ActionResult, ...]:
        return await apply_actions(actions, self._clients())

    def _clients(self) -> dict[str, EngineClient]:
        return {e.name: EngineClient(self._session, e) for e in self._endpoints()}

    async def _observe_replica(self, client: EngineClient) -> ReplicaSnapshot:
        ready, sampled, policy = await asyncio.gather(
            client.is_ready(), self._sample(client), client.read_policy(), return_exceptions=True
        )
        for outcome in (ready, sampled, policy):
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineError):
                raise outcome
        sample, sampled_at_s = (None, None) if isinstance(sampled, BaseException) else sampled
        return ReplicaSnapshot(
            name=client.endpoint.name,
            ready=ready is True,
            request_class=client.endpoint.request_class,
            sample=sample,
            sampled_at_s=sampled_at_s,
            scrape_failure=str(sampled) if isinstance(sampled, BaseException) else None,
            policy=None if isinstance(policy, BaseException) else policy,
            policy_failure=str(policy) if isinstance(policy, BaseException) else None,
        )

    async def _sample(self, client: EngineClient) -> tuple[EngineSample, float]:
        return await client.scrape(), self._now_s()
