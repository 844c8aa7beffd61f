from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_operator.kube.draining import blocking, is_over, num_removable
from chairlift_operator.kube.pod_view import Mark, PodView
from chairlift_protocol.wire import RequestClass

MakePod = Callable[..., PodView]


@pytest.mark.parametrize(
    ("others", "replicas", "removable"),
    [
        ([], 1, 1),
        (["a"], 2, 1),
        (["a pending"], 2, 0),
        (["a unassigned"], 2, 0),
        (["a unready"], 2, 1),  # by cost, before the victim of the same rank
        (["a ending"], 1, 1),  # Kubernetes does not count it either
        (["a"], 1, 0),  # lowered already, not yet carried out
    ],
)
def test_a_count_falls_only_when_the_drained_one_would_go(
    make_pod: MakePod, others: list[str], replicas: int, removable: int
) -> None:
    pods = [make_pod("victim", "scale", "unready"), *(make_pod(*o.split()) for o in others)]
    assert num_removable(pods, {"victim"}, replicas) == removable


def test_a_pending_sibling_in_the_way_is_named(make_pod: MakePod) -> None:
    pods = [make_pod("victim", "scale", "unready"), make_pod("late", "pending")]
    found = blocking(pods, {"victim"})
    assert found is not None and found.name == "late"
    assert blocking([pods[0], make_pod("a")], {"victim"}) is None


def _kubernetes_takes(pods: Sequence[PodView], count: int) -> list[PodView]:
    """A ReplicaSet's order: unassigned, pending, unready, lowest cost."""
    active = [pod for pod in pods if pod.counts]
    return sorted(active, key=lambda p: (p.is_assigned, p.is_running, p.is_ready, p.deletion_cost))[
        :count
    ]


@st.composite
def _pods(draw: st.DrawFn) -> list[PodView]:
    pods = []
    for number in range(draw(st.integers(1, 6))):
        is_assigned = draw(st.booleans())
        is_running = is_assigned and draw(st.booleans())
        marked = draw(st.booleans())
        pods.append(
            PodView(
                name=f"p{number}",
                uid=f"u{number}",
                request_class=RequestClass.INTERACTIVE,
                revision="r",
                ip=None,
                is_assigned=is_assigned,
                is_running=is_running,
                is_ready=is_running and draw(st.booleans()),
                is_terminating=draw(st.booleans()),
                mark=Mark(0.0, 1.0, "scale") if marked else None,
                deletion_cost=-1_000_000 if marked else 0,
                created_s=0.0,
            )
        )
    return pods


@given(_pods(), st.integers(0, 6), st.data())
def test_what_is_removed_is_always_drained(
    pods: list[PodView], replicas: int, data: st.DataObject
) -> None:
    marked = [pod.name for pod in pods if pod.mark]
    finished = set(data.draw(st.lists(st.sampled_from(marked), unique=True))) if marked else set()
    count = num_removable(pods, finished, replicas)
    active = sum(pod.counts for pod in pods)
    taken = _kubernetes_takes(pods, active - (replicas - count)) if count else []
    assert {pod.name for pod in taken} <= finished


@pytest.mark.parametrize(
    ("words", "num_left", "now_s", "over"),
    [
        (("scale",), 0, 101.0, True),
        (("scale",), 3, 101.0, False),
        (("scale",), None, 101.0, False),
        (("scale",), 3, 161.0, True),
        (("scale", "pending"), None, 101.0, True),
        (("scale", "failing"), None, 101.0, True),
        ((), 0, 101.0, False),
    ],
    ids=["idle", "busy", "silent", "too late", "never served", "crash loop", "not marked"],
)
def test_when_a_marked_pod_may_go(
    make_pod: MakePod, words: tuple[str, ...], num_left: int | None, now_s: float, over: bool
) -> None:
    assert is_over(make_pod("a", *words), num_left, now_s) is over


def test_a_mark_survives_its_annotation_and_a_strange_one_means_at_once() -> None:
    mark = Mark(12.5, 600.0, "rollout")
    assert Mark.from_text(mark.to_text()) == mark
    assert Mark.from_text("yes please") == Mark(0.0, 0.0, "scale")
    assert Mark.from_text(None) is None


def test_a_pod_that_comes_back_unready_is_no_reason_to_lower(make_pod: MakePod) -> None:
    victim = make_pod("victim", "scale")  # drained, but not yet seen as unready
    assert num_removable([victim, make_pod("a", "unready")], {"victim"}, 2) == 0
    assert num_removable([replace(victim, is_ready=False), make_pod("a")], {"victim"}, 2) == 1
