"""A pool on Kubernetes as a snapshot: pods from the watch, engines and gateways by asking them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import aiohttp

from chairlift_operator.engine_client import EngineClient, ReplicaEndpoint
from chairlift_operator.kube import names
from chairlift_operator.kube.gateways import GatewayReader, url_of
from chairlift_operator.kube.objects import PoolObjects
from chairlift_operator.kube.pod_view import ROLLOUT, PodView
from chairlift_operator.kube.polling import SAMPLE, PrometheusReader
from chairlift_operator.observing import observe_engine
from chairlift_operator.pool_windows import PoolWindows
from chairlift_operator.prometheus.batch import PoolPods
from chairlift_operator.prometheus.heartbeats import Pod
from chairlift_operator.snapshot import (
    Phase,
    ReplicaSnapshot,
    Snapshot,
)
from chairlift_protocol.wire import RequestClass

# A pod that no node took for so long is withdrawn: autoscaled nodes take a minute or two.
UNSCHEDULABLE_S: Final = 180.0


class Observer:
    """Knows which pods have once been ready: one that is slow to answer later is not a new one."""

    def __init__(
        self,
        objects: PoolObjects,
        session: aiohttp.ClientSession,
        now_s: Callable[[], float],
        gateways: GatewayReader,
    ) -> None:
        self.gateways = gateways
        self._objects = objects
        self._session = session
        self._now_s = now_s
        self._served: set[str] = set()

    def client(self, pod: PodView, admin_token: str) -> EngineClient:
        assert pod.ip is not None
        endpoint = ReplicaEndpoint(
            pod.name,
            url_of(pod.ip, names.PUBLIC_PORT),
            url_of(pod.ip, names.ADMIN_PORT),
            admin_token,
            pod.request_class,
            pod.mark is not None,
        )
        return EngineClient(self._session, endpoint)

    async def observe(
        self,
        admin_token: str,
        num_reserved: int,
        prometheus: PrometheusReader | None,
        thresholds_ms: Mapping[tuple[RequestClass, str], float],
    ) -> Snapshot:
        """prometheus: for what happened over minutes and hours, and for pods out of reach."""
        pods = self._objects.engines()
        self._served &= {pod.uid for pod in pods}
        self._served |= {pod.uid for pod in pods if pod.is_ready}
        gateway, seen = await asyncio.gather(
            self.gateways.read(prometheus),
            asyncio.gather(*(self._replica(p, pods, admin_token, prometheus) for p in pods)),
        )
        return Snapshot(
            "/".join(self._objects.key),
            self._now_s(),
            (*seen, *self._to_come(pods)),
            gateway,
            num_reserved,
            self._windows(pods, prometheus, thresholds_ms),
        )

    def _windows(
        self,
        pods: Sequence[PodView],
        prometheus: PrometheusReader | None,
        thresholds_ms: Mapping[tuple[RequestClass, str], float],
    ) -> PoolWindows | None:
        if prometheus is None:
            return None
        engines = {
            request_class: [
                Pod((self._objects.namespace, pod.name), pod.ready_since_s)
                for pod in pods
                if pod.request_class is request_class and pod.is_ready and not pod.is_terminating
            ]
            for request_class in RequestClass
        }
        gateways = [
            Pod((self._objects.namespace, gateway.name), gateway.ready_since_s)
            for gateway in self._objects.gateways()
            if gateway.is_ready
        ]
        return prometheus.windows(self._objects.key, PoolPods(engines, gateways, thresholds_ms))

    async def _replica(
        self,
        pod: PodView,
        pods: Sequence[PodView],
        admin_token: str,
        prometheus: PrometheusReader | None,
    ) -> ReplicaSnapshot:
        phase = self._phase(pod, pods)
        is_asked = pod.ip is not None and pod.is_running and not pod.is_terminating
        if phase is Phase.STARTING or not is_asked:
            now_s = self._now_s()
            overdue = now_s - pod.unschedulable_since_s > UNSCHEDULABLE_S
            return ReplicaSnapshot(
                pod.name,
                ready=False,
                request_class=pod.request_class,
                phase=phase,
                detail=progress_of(pod, now_s),
                stuck=f"no node takes it: {pod.unschedulable}" if overdue else None,
            )
        client = self.client(pod, admin_token)
        seen = await observe_engine(client, self._now_s, phase, pod.is_ready)
        if seen.sample is not None or prometheus is None:
            return seen
        told = prometheus.sample((self._objects.namespace, pod.name))
        if isinstance(told, str):
            return replace(seen, scrape_failure=f"{seen.scrape_failure}; {told}")
        return replace(
            seen,
            sample=told.engine(),
            sampled_at_s=told.at_s,
            source=f"Prometheus: {SAMPLE}",
        )

    def _phase(self, pod: PodView, pods: Sequence[PodView]) -> Phase:
        is_alone = self._objects.replicas(pod.request_class) == 1
        if pod.is_terminating or pod.mark is not None:
            return Phase.DRAINING
        if is_alone and _is_superseded(pod, pods):
            return Phase.DRAINING
        return Phase.SERVING if pod.uid in self._served else Phase.STARTING

    def _to_come(self, pods: Sequence[PodView]) -> list[ReplicaSnapshot]:
        """Replicas that were asked for and have no pod yet; a replaced one's successor is one."""
        to_come = []
        for request_class in RequestClass:
            replaced = sum(
                pod.request_class is request_class
                and pod.counts
                and pod.mark is not None
                and pod.mark.why == ROLLOUT
                for pod in pods
            )
            count = self._objects.num_missing(request_class) + replaced
            to_come += [
                ReplicaSnapshot(
                    f"{request_class.value}-to-come-{number}",
                    ready=False,
                    request_class=request_class,
                    phase=Phase.STARTING,
                    detail="waits for its pod",
                )
                for number in range(count)
            ]
        return to_come


def progress_of(pod: PodView, now_s: float) -> str:
    """How far a pod is that does not serve, in words."""
    age_s = max(0.0, now_s - pod.created_s)
    if pod.is_terminating:
        return "finishes its last requests"
    if pod.unschedulable is not None:
        return f"waits for a node: {pod.unschedulable}"
    if pod.trouble is not None:
        return pod.trouble
    if not pod.is_assigned:
        return "waits for a node"
    if pod.is_running:
        return f"loads the model, {age_s:.0f} s since its pod was made"
    return f"its container is being started, {age_s:.0f} s since its pod was made"


def _is_superseded(pod: PodView, pods: Sequence[PodView]) -> bool:
    """The only replica of its class that is not yet gone, while its successor comes up."""
    others = [p for p in pods if p.request_class is pod.request_class and p.counts and p is not pod]
    return len(others) == 1 and _is_newer(others[0], pod)


def _is_newer(one: PodView, other: PodView) -> bool:
    return one.revision != other.revision and (one.created_s, one.name) > (
        other.created_s,
        other.name,
    )
