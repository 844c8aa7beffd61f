"""Carries `rollout`'s steps out, for one class after the other, and says how far they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from chairlift_operator.kube.acting import Actor
from chairlift_operator.kube.children import classes_of
from chairlift_operator.kube.objects import PoolObjects
from chairlift_operator.kube.pod_view import ROLLOUT
from chairlift_operator.kube.pods import revision_of
from chairlift_operator.kube.rollout import RolloutStep, RolloutView, rollout_step
from chairlift_operator.kube.tending import Tender
from chairlift_operator.spec import InferencePool
from chairlift_protocol.wire import RequestClass


@dataclass(frozen=True, slots=True)
class RolloutState:
    """num_reserved: for the planner. progress and interrupts: for the status."""

    num_reserved: int = 0
    progress: tuple[str, ...] = ()
    interrupts: str | None = None


class Roller:
    """state: as of the last step. A replacement that interrupts is said for a tick before."""

    def __init__(
        self,
        objects: PoolObjects,
        tender: Tender,
        actor: Actor,
        busy: Callable[[], Mapping[str, float]],
    ) -> None:
        self._objects = objects
        self._tender = tender
        self._actor = actor
        self._busy = busy
        self._announced: frozenset[RequestClass] = frozenset()
        self.state = RolloutState()

    async def advance(self, pool: InferencePool, is_announced: bool) -> None:
        """is_announced: what the last step said is in the status by now."""
        steps: dict[RequestClass, RolloutStep] = {}
        for request_class in classes_of(pool):
            if self._objects.deployment(request_class) is None:
                continue
            is_free = all(step.progress is None for step in steps.values())  # one at a time
            step = rollout_step(self._view(pool, request_class, is_free, is_announced))
            steps[request_class] = step
            if step.victim is not None:
                await self._mark(step.victim, pool)
            await self._tender.hold(request_class, step.paused, *step.strategy)
        self._announced = frozenset(c for c, step in steps.items() if step.interrupts)
        interrupts = [step.interrupts for step in steps.values() if step.interrupts]
        self.state = RolloutState(
            _num_reserved(pool, list(steps.values())),
            tuple(f"{c.value}: {step.progress}" for c, step in steps.items() if step.progress),
            interrupts[0] if interrupts else None,
        )

    def _view(
        self, pool: InferencePool, request_class: RequestClass, is_free: bool, is_announced: bool
    ) -> RolloutView:
        limit = pool.spec.num_replicas + _surge(pool)
        return RolloutView(
            pods=self._objects.engines_of(request_class),
            revision=revision_of(pool, request_class),
            replicas=self._objects.replicas(request_class),
            room=limit - self._objects.num_held(),
            is_ours=pool.spec.autoscaling.mode == "Managed",
            may_change=pool.spec.mode == "Enforce" and is_free,
            finished=self._actor.finished,
            busy=self._busy(),
            is_announced=is_announced and request_class in self._announced,
        )

    async def _mark(self, victim: str, pool: InferencePool) -> None:
        pods = {pod.name: pod for pod in self._objects.engines()}
        await self._actor.mark(pods[victim], ROLLOUT, pool.spec.autoscaling.drain_timeout_s)


def _surge(pool: InferencePool) -> int:
    return pool.spec.capacity.surge if pool.spec.capacity else 0


def _num_reserved(pool: InferencePool, steps: Sequence[RolloutStep]) -> int:
    """Without a surge, the one that ends and its successor share the capacity with all others."""
    is_strict = pool.spec.autoscaling.mode == "Managed" and pool.spec.mode == "Enforce"
    is_rolling = any(step.progress and not step.is_waiting for step in steps)
    return int(is_strict and is_rolling and not _surge(pool))
