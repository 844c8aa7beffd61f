from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from chairlift_operator.kube.pod_view import Mark, PodView
from chairlift_operator.kube.rollout import (
    DRAIN_FIRST,
    GROW_FIRST,
    RolloutStep,
    RolloutView,
    rollout_step,
)

MakePod = Callable[..., PodView]


@pytest.fixture
def step(make_pod: MakePod) -> Callable[..., RolloutStep]:
    """Of pods given as `name words`; a name that begins with `old` has the earlier revision."""

    def make(*pods: str, finished: Sequence[str] = (), **changes: Any) -> RolloutStep:
        views = []
        for pod in pods:
            name, *words = pod.split()
            revision = "before" if name.startswith("old") else "new"
            views.append(make_pod(name, *words, revision=revision))
        view = RolloutView(
            pods=views,
            revision="new",
            replicas=sum(view.counts for view in views),
            room=1,
            is_ours=True,
            may_change=True,
            finished=frozenset(finished),
            busy={},
            is_announced=False,
        )
        return rollout_step(replace(view, **changes))

    return make


def test_with_nothing_old_the_turnstile_is_open(step: Any) -> None:
    assert step("a", "b unready") == RolloutStep(paused=False)
    assert step() == RolloutStep(paused=False)


def test_the_least_busy_old_one_is_drained_first(step: Any) -> None:
    begun = step("old1", "old2", "old3", busy={"old1": 3.0, "old2": 1.0, "old3": 2.0})
    assert (begun.paused, begun.victim, begun.strategy) == (True, "old2", DRAIN_FIRST)
    assert begun.progress == "3 of 3 run earlier start-up values; old2 drains"


@pytest.mark.parametrize(
    ("pods", "finished", "paused"),
    [
        (("old1 rollout", "old2"), (), True),
        (("old1 rollout", "old2"), ("old1",), True),  # drained, but not yet seen as unready
        (("old1 rollout unready", "old2"), ("old1",), False),
        (("old1 rollout unready ending", "old2", "a pending"), ("old1",), True),
        (("old2", "a unready"), (), True),
    ],
    ids=["draining", "still ready", "drained", "ending", "successor comes up"],
)
def test_one_at_a_time_passes(
    step: Any, pods: tuple[str, ...], finished: tuple[str, ...], paused: bool
) -> None:
    made = step(*pods, finished=finished, replicas=2)
    assert made.paused is paused and made.victim is None


def test_without_room_it_waits_for_the_planner_to_make_some(step: Any) -> None:
    made = step("old1", "old2", room=0)
    assert made.paused and made.victim is None
    assert made.progress == "2 of 2 run earlier start-up values; waits for a free place"


def test_where_somebody_else_counts_it_does_not_wait_for_room(step: Any) -> None:
    assert step("old1", "old2", room=0, is_ours=False).victim == "old1"


def test_a_replica_that_is_alone_gets_its_successor_first(step: Any) -> None:
    for pods in (("old1",), ("old1", "a pending"), ("old1", "a unready"), ("old1", "a")):
        made = step(*pods, replicas=1, room=1 if len(pods) == 1 else 0)
        assert (made.paused, made.strategy, made.victim) == (False, GROW_FIRST, None), pods


def test_an_interruption_is_said_before_it_begins(step: Any) -> None:
    first = step("old1", room=0)
    assert first.interrupts and "capacity.surge" in first.interrupts
    assert (first.paused, first.victim, first.is_waiting) == (True, None, True)
    then = step("old1", room=0, is_announced=True)
    assert then.interrupts and not then.is_waiting


@pytest.mark.parametrize(
    ("pods", "strategy"),
    [
        (("old1", "old2", "old3 failing"), DRAIN_FIRST),
        (("old1", "old2 failing"), GROW_FIRST),
        (("old1 failing",), DRAIN_FIRST),
    ],
    ids=["of three", "of one and its bad successor", "the only one"],
)
def test_a_revision_that_does_not_come_up_never_blocks_its_fix(
    step: Any, pods: tuple[str, ...], strategy: tuple[int, int]
) -> None:
    made = step(*pods, replicas=1 if len(pods) < 3 else 3)
    assert (made.paused, made.strategy, made.victim) == (False, strategy, None)


def test_a_bad_revision_stops_after_one_replica_and_says_why(step: Any) -> None:
    made = step("old1", "old2", "a failing")
    assert made.paused and made.victim is None
    assert made.progress is not None and "it has ended 3 times" in made.progress


def test_recommend_replaces_nothing(step: Any) -> None:
    made = step("old1", "old2", may_change=False)
    assert made.paused and made.victim is None and "Recommend" in made.progress


def _deployment(
    pods: list[PodView], step: RolloutStep, replicas: int, make_pod: MakePod, number: int
) -> list[PodView]:
    """What Kubernetes' Deployment controller does with it, in one pass."""
    if step.paused:
        return pods
    surge, gone = step.strategy
    active = [pod for pod in pods if pod.counts]
    fresh = [pod for pod in active if pod.revision == "new"]
    old = [pod for pod in active if pod.revision != "new"]
    room = replicas + surge - len(active)
    if len(fresh) < replicas and room > 0:
        return [*pods, make_pod(f"new{number}", "pending")]
    unavailable = sum(not pod.is_ready for pod in fresh)
    may_go = len(active) - (replicas - gone) - unavailable
    unhealthy = [pod for pod in old if not pod.is_ready]
    if may_go > 0 and unhealthy:
        victim = min(unhealthy, key=lambda pod: pod.deletion_rank)
    elif sum(pod.is_ready for pod in active) > replicas - gone and old and may_go > 0:
        victim = min(old, key=lambda pod: pod.deletion_rank)
    else:
        return pods
    return [replace(p, is_terminating=True, is_ready=False) if p is victim else p for p in pods]


@pytest.mark.parametrize(
    ("replicas", "capacity", "surge", "least_ready"),
    [(3, 3, 1, 2), (3, 4, 0, 2), (2, 8, 0, 1), (1, 2, 0, 1), (1, 1, 1, 1), (5, 6, 0, 4)],
)
def test_a_whole_rollout_stays_inside_capacity_and_keeps_serving(
    make_pod: MakePod, replicas: int, capacity: int, surge: int, least_ready: int
) -> None:
    """Pods come up three passes after they are made, end three passes after they are told to."""
    pods = [make_pod(f"old{n}", revision="before") for n in range(replicas)]
    ages: dict[str, int] = {}
    finished: frozenset[str] = frozenset()
    for number in range(200):
        view = RolloutView(
            pods=pods,
            revision="new",
            replicas=replicas,
            room=capacity + surge - len(pods),
            is_ours=True,
            may_change=True,
            finished=finished,
            busy={},
            is_announced=True,
        )
        made = rollout_step(view)
        if made.progress is None and all(pod.counts for pod in pods):
            break
        if made.victim is not None:
            mark = Mark(0.0, 1.0, "rollout")
            pods = [
                replace(p, mark=mark, deletion_cost=-1) if p.name == made.victim else p
                for p in pods
            ]
        else:  # drained by the next pass, and unready by the one after
            done = {p.name for p in pods if p.mark is not None}
            pods = [replace(p, is_ready=p.is_ready and p.name not in finished) for p in pods]
            finished = frozenset(done)
        pods = _deployment(pods, made, replicas, make_pod, number)
        serving = [p for p in pods if p.is_ready and p.mark is None]
        assert len(serving) >= least_ready, number
        assert len(pods) <= capacity + surge, number
        for pod in pods:
            if pod.is_terminating or not pod.is_ready and pod.revision == "new":
                ages[pod.name] = ages.get(pod.name, 0) + 1
        pods = [p for p in pods if not (p.is_terminating and ages[p.name] > 3)]
        pods = [
            replace(p, is_running=True, is_ready=True)
            if p.revision == "new" and ages.get(p.name, 0) > 3 and not p.is_terminating
            else p
            for p in pods
        ]
    assert [p.revision for p in pods] == ["new"] * replicas


@pytest.mark.parametrize(("room", "is_ours", "paused"), [(0, True, False), (-1, True, True),
    (-1, False, False)])  # fmt: skip
def test_a_successor_is_made_when_there_is_a_place_for_it(
    step: Any, room: int, is_ours: bool, paused: bool
) -> None:
    made = step("old1 rollout ending", "old2", replicas=2, room=room, is_ours=is_ours)
    assert made.paused is paused and made.victim is None


@pytest.mark.parametrize(("room", "is_ours", "paused"), [(1, True, False), (0, True, True),
    (0, False, False)])  # fmt: skip
def test_one_that_is_of_no_use_is_replaced_when_there_is_a_place_while_it_ends(
    step: Any, room: int, is_ours: bool, paused: bool
) -> None:
    made = step("old1 failing", "old2", room=room, is_ours=is_ours)
    assert made.paused is paused and made.victim is None
