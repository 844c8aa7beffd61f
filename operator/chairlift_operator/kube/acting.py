"""A plan's actions on Kubernetes: policies to engines, counts to Deployments, drains on the way.

What takes long is begun by `apply` and finished by `advance`, a tick at a time: its state is on the
pods, so another leader goes on with it. Never writes a count that is an autoscaler's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from chairlift_operator.apply import apply_actions
from chairlift_operator.cluster import ActionResult
from chairlift_operator.decisions import Action, SetReplicas
from chairlift_operator.http_asking import EngineError
from chairlift_operator.kube import names
from chairlift_operator.kube.api import Api, ApiError
from chairlift_operator.kube.draining import (
    VICTIM_COST,
    blocking,
    is_over,
    num_removable,
    wants_fewer,
)
from chairlift_operator.kube.objects import PoolObjects
from chairlift_operator.kube.observing import Observer
from chairlift_operator.kube.paths import DEPLOYMENT, POD
from chairlift_operator.kube.pod_view import ROLLOUT, SCALE, Mark, PodView
from chairlift_operator.kube.tending import Tender
from chairlift_operator.spec import InferencePool
from chairlift_protocol.wire import RequestClass

logger = logging.getLogger(__name__)

Json = dict[str, Any]


class Actor:
    """say: told in a sentence what happened, for an Event."""

    def __init__(
        self,
        objects: PoolObjects,
        observer: Observer,
        tender: Tender,
        api: Api,
        now_s: Callable[[], float],
        say: Callable[[str, str], None],
    ) -> None:
        self._objects = objects
        self._observer = observer
        self._tender = tender
        self._api = api
        self._now_s = now_s
        self._say = say
        self.finished: frozenset[str] = frozenset()

    async def apply(self, actions: Sequence[Action], admin_token: str) -> tuple[ActionResult, ...]:
        asked = {pod.name: pod for pod in self._objects.engines() if pod.ip is not None}
        clients = {name: self._observer.client(pod, admin_token) for name, pod in asked.items()}
        return await apply_actions(actions, clients, self._set_replicas)

    async def advance(self, admin_token: str, ours: Collection[RequestClass]) -> None:
        """Drains: those that are over make room. ours: whose counts are this operator's to set."""
        marked = [pod for pod in self._objects.engines() if pod.mark is not None and pod.counts]
        over = await asyncio.gather(*(self._is_over(pod, admin_token) for pod in marked))
        self.finished = frozenset(
            p.name for p, is_done in zip(marked, over, strict=True) if is_done
        )
        for request_class in RequestClass:
            pods = self._objects.engines_of(request_class)
            going = {p.name for p in pods if wants_fewer(p) and p.name in self.finished}
            if going and request_class in ours:
                await self._remove(request_class, pods, going)
            elif going:
                await self._recreate(p for p in pods if p.name in going and p.counts)

    async def mark(self, pod: PodView, why: str, timeout_s: float) -> None:
        """Out of the endpoints at once, and first in line when the count falls."""
        mark = Mark(self._now_s(), timeout_s, why)
        body: Json = {
            "metadata": {
                "labels": {names.SERVING_LABEL: "false"},
                "annotations": {
                    names.DRAIN_ANNOTATION: mark.to_text(),
                    names.DELETION_COST_ANNOTATION: str(VICTIM_COST),
                },
            }
        }
        path = POD.path(self._objects.namespace, pod.name)
        self._objects.note_pod(await self._api.patch(path, body, names.FIELD_MANAGER))

    async def set_count(self, request_class: RequestClass, count: int) -> None:
        name = names.engines(self._objects.key[1], request_class)
        path = DEPLOYMENT.path(self._objects.namespace, name, "scale")
        scale = await self._api.patch(path, {"spec": {"replicas": count}}, names.SCALER)
        self._objects.note_replicas(request_class, scale)

    async def set_first_count(self, pool: InferencePool, request_class: RequestClass) -> None:
        """Of a Deployment that never was open: its least, as far as there is room. What ends may
        still hold places, and so may the other class."""
        if not self._objects.was_never_open(request_class):
            return
        own = sum(pod.counts for pod in self._objects.engines_of(request_class))
        others = self._objects.num_held() - own - self._objects.num_missing(request_class)
        least = pool.spec.replicas(request_class).min
        count = max(own, min(least, pool.spec.num_replicas - others))
        if count != self._objects.replicas(request_class):
            await self.set_count(request_class, count)

    async def _set_replicas(self, action: SetReplicas) -> ActionResult:
        try:
            said = await (self._shrink(action) if action.shrinks else self._grow(action))
        except ApiError as error:
            return ActionResult(action, False, str(error))
        return ActionResult(action, True, said)

    async def _grow(self, action: SetReplicas) -> str:
        """By as many as the class lacks; what drains keeps its place in the count until it goes."""
        request_class = action.request_class
        pods = self._objects.engines_of(request_class)
        leaving = sum(pod.counts and wants_fewer(pod) for pod in pods)
        await self.set_count(request_class, action.count + leaving)
        return f"{action.count} asked for"

    async def _shrink(self, action: SetReplicas) -> str:
        pods = {pod.name: pod for pod in self._objects.engines_of(action.request_class)}
        num_unmade = 0
        for name in action.victims:
            pod = pods.get(name)
            if pod is not None and pod.counts:
                await self.mark(pod, SCALE, action.drain_timeout_s)
                continue
            replaced = [p for p in pods.values() if p.mark and p.mark.why == ROLLOUT and p.counts]
            if replaced:  # its successor is not wanted any more
                pods.pop(replaced[0].name)
                await self.mark(replaced[0], SCALE, action.drain_timeout_s)
            else:
                num_unmade += 1
        if num_unmade:
            if self._objects.is_rolling(action.request_class):
                # Open, it would rather take another old one than not make the successor.
                await self._tender.close(action.request_class)
            count = self._objects.replicas(action.request_class) - num_unmade
            await self.set_count(action.request_class, max(0, count))
        return f"draining {', '.join(action.victims)}"

    async def _is_over(self, pod: PodView, admin_token: str) -> bool:
        """Ask it to drain, as often as it takes: a restarted engine has forgotten it."""
        num_left = None
        if pod.is_running and pod.ip is not None:
            try:
                num_left = await self._observer.client(pod, admin_token).drain()
            except EngineError as error:
                logger.info("%s: %s", pod.name, error)
        return is_over(pod, num_left, self._now_s())

    async def _remove(
        self, request_class: RequestClass, pods: Sequence[PodView], going: set[str]
    ) -> None:
        replicas = self._objects.replicas(request_class)
        count = num_removable(pods, going, replicas)
        if count:
            await self.set_count(request_class, replicas - count)
            self._say("Drained", f"{', '.join(sorted(going))}: drained, and gone now")
        elif (other := blocking(pods, going)) is not None:
            logger.info("%s waits: %s would be taken instead", sorted(going), other.name)

    async def _recreate(self, pods: Iterable[PodView]) -> None:
        """Somebody else counts now, and what was drained serves nobody: its Deployment makes a new
        one."""
        for pod in pods:
            await self._api.delete(POD.path(self._objects.namespace, pod.name))
