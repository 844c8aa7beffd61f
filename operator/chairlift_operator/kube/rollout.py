"""Replacing replicas whose start-up values are old: one at a time, each drained first. Pure.

The Deployment does the replacing; its `paused` is the turnstile. It is open only while exactly one
pod may pass: a drained one goes, its successor comes. Where a class has one replica and there is
room for a second, the successor comes first instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from chairlift_operator.kube.pod_view import ROLLOUT, PodView

# maxSurge and maxUnavailable of a Deployment.
DRAIN_FIRST: Final = (0, 1)
GROW_FIRST: Final = (1, 0)


@dataclass(frozen=True, slots=True)
class RolloutView:
    """room: engine pods that may still be added, surge included. is_ours: replicas are this
    operator's to set. busy: requests by pod."""

    pods: Sequence[PodView]
    revision: str
    replicas: int
    room: int
    is_ours: bool
    may_change: bool
    finished: frozenset[str]
    busy: Mapping[str, float]
    is_announced: bool


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """paused and strategy (surge, unavailable): what the Deployment shall say. victim: to be
    drained from now on. progress: None when nothing is old. interrupts: what will be missing
    meanwhile; is_waiting: nothing is done before that has been said."""

    paused: bool
    strategy: tuple[int, int] = DRAIN_FIRST
    victim: str | None = None
    progress: str | None = None
    interrupts: str | None = None
    is_waiting: bool = False


def rollout_step(view: RolloutView) -> RolloutStep:
    active = [pod for pod in view.pods if pod.counts]
    old = [pod for pod in active if pod.revision != view.revision]
    if not old:
        return RolloutStep(paused=False)
    told = f"{len(old)} of {len(active)} run earlier start-up values"
    if not view.may_change:
        return RolloutStep(True, progress=f"{told}; mode is Recommend, so they stay")
    fresh = [pod for pod in active if pod.revision == view.revision]
    useless = [pod for pod in old if not pod.is_ready and pod.mark is None]
    is_alone = view.replicas == 1 and not useless
    if is_alone and (view.room >= 1 or fresh):
        return RolloutStep(False, GROW_FIRST, progress=f"{told}; its successor comes first")
    if len(active) < view.replicas:  # the one that went has no successor yet: let it be made
        if view.room < 0 and view.is_ours:  # where it would go, somebody still ends
            return RolloutStep(True, progress=f"{told}; waits for a free place")
        return RolloutStep(False, progress=f"{told}; a successor is made")
    if any(pod.is_terminating for pod in view.pods):
        return RolloutStep(True, progress=f"{told}; one is ending")
    if starting := [pod for pod in fresh if not pod.is_ready]:
        why = f": {starting[0].trouble}" if starting[0].trouble else ""
        return RolloutStep(True, progress=f"{told}; {starting[0].name} comes up{why}")
    return _next(view, old, useless, told)


def _next(
    view: RolloutView, old: Sequence[PodView], useless: Sequence[PodView], told: str
) -> RolloutStep:
    if useless:  # nothing to drain: a revision that does not come up never blocks its fix
        if view.room < 1 and view.is_ours:  # the planner frees one, and takes the useless first
            return RolloutStep(True, progress=f"{told}; waits for a free place")
        protects = view.replicas == 1 and any(pod.is_ready for pod in view.pods)
        strategy = GROW_FIRST if protects else DRAIN_FIRST
        return RolloutStep(False, strategy, progress=f"{told}; {useless[0].name} is replaced")
    in_hand = [pod for pod in old if pod.mark is not None and pod.mark.why == ROLLOUT]
    if in_hand:
        victim = in_hand[0]
        # One that still says it is ready would not be the one that Kubernetes takes.
        if victim.name in view.finished and not victim.is_ready:
            return RolloutStep(False, progress=f"{told}; {victim.name} is replaced")
        return RolloutStep(True, progress=f"{told}; {victim.name} drains")
    interrupts = _interrupts(view)
    if interrupts and not view.is_announced:
        return RolloutStep(True, progress=told, interrupts=interrupts, is_waiting=True)
    if view.room < 1 and view.is_ours:
        return RolloutStep(True, progress=f"{told}; waits for a free place", interrupts=interrupts)
    candidates = [pod for pod in old if pod.mark is None]
    if not candidates:  # all of them go anyway
        return RolloutStep(True, progress=told)
    victim = min(candidates, key=lambda pod: (view.busy.get(pod.name, 0.0), pod.name))
    return RolloutStep(
        True, victim=victim.name, progress=f"{told}; {victim.name} drains", interrupts=interrupts
    )


def _interrupts(view: RolloutView) -> str | None:
    if view.replicas != 1:
        return None
    return (
        "the only replica is replaced, and there is no place for a second: requests wait or fail "
        "meanwhile; set capacity.surge to 1, or have two replicas"
    )
