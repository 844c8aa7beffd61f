from __future__ import annotations

from typing import Any

import pytest

from chairlift_operator.exposition import GatewayClassSample
from chairlift_operator.kube.gateways import summed
from chairlift_operator.kube.objects import PoolObjects, Stores
from chairlift_operator.kube.observing import progress_of
from chairlift_operator.kube.paths import CHILD_KINDS
from chairlift_operator.kube.pod_view import PodView, pod_view
from chairlift_operator.kube.watching import Store
from chairlift_protocol.wire import RequestClass

Json = dict[str, Any]
LABELS = {
    "chairlift.dev/pool": "chat",
    "chairlift.dev/role": "engine",
    "chairlift.dev/class": "interactive",
    "chairlift.dev/revision": "r1",
}


def _pod(status: Json | None = None, **metadata: Any) -> Json:
    return {
        "kind": "Pod",
        "metadata": {
            "name": "chat-0",
            "namespace": "team",
            "uid": "u",
            "resourceVersion": "5",
            "labels": LABELS,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            **metadata,
        },
        "spec": {},
        "status": status or {},
    }


def _view(status: Json | None = None, **metadata: Any) -> PodView:
    view = pod_view(_pod(status, **metadata))
    assert view is not None
    return view


def _waiting(reason: str, **more: Any) -> Json:
    state = {"state": {"waiting": {"reason": reason, "message": "no such tag"}}, **more}
    return {"phase": "Pending", "containerStatuses": [state]}


CREATED_S = 1767225600.0
UNSCHEDULABLE: Json = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/1 nodes: Insufficient nvidia.com/gpu",
            "lastTransitionTime": "2026-01-01T00:00:10Z",
        }
    ],
}


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ({"phase": "Pending"}, "waits for a node"),
        (UNSCHEDULABLE, "waits for a node: 0/1 nodes: Insufficient nvidia.com/gpu"),
        ({"phase": "Running"}, "waits for a node"),
        (_waiting("ImagePullBackOff"), "its image cannot be had: no such tag"),
        (_waiting("CreateContainerConfigError"), "it cannot be made: no such tag"),
        (
            _waiting(
                "CrashLoopBackOff",
                restartCount=4,
                lastState={
                    "terminated": {"exitCode": 2, "message": "starts\nmodel.source: none\n"}
                },
            ),
            "it has ended 4 times, last with exit code 2: model.source: none",
        ),
    ],
)
def test_progress_says_what_a_pod_waits_for(status: Json, told: str) -> None:
    assert progress_of(_view(status), CREATED_S + 30) == told


def test_a_pod_that_loads_says_since_when() -> None:
    pod = _pod({"phase": "Running"})
    view = pod_view({**pod, "spec": {"nodeName": "n"}})
    assert view is not None
    assert progress_of(view, CREATED_S + 30) == "loads the model, 30 s since its pod was made"


def test_an_unschedulable_pod_knows_since_when() -> None:
    assert _view(UNSCHEDULABLE).unschedulable_since_s == CREATED_S + 10


@pytest.mark.parametrize(
    "pod",
    [
        _pod(labels={**LABELS, "chairlift.dev/role": "gateway"}),
        _pod(labels={**LABELS, "chairlift.dev/class": "other"}),
        _pod({"phase": "Failed"}),
    ],
    ids=["gateway", "strange class", "ended"],
)
def test_what_is_no_engine_is_left_out(pod: Json) -> None:
    assert pod_view(pod) is None


def test_gateways_arrivals_add_up_by_class() -> None:
    def sample(received: float, held: float) -> tuple[GatewayClassSample, ...]:
        return (GatewayClassSample(RequestClass.INTERACTIVE, received, held),)

    assert summed([sample(3, 1), sample(4, 0)]) == sample(7, 1)


@pytest.fixture
def stores() -> Stores:
    return Stores(Store(), {kind.name: Store() for kind in CHILD_KINDS})


def _deployment(replicas: int, version: str = "3") -> Json:
    return {
        "kind": "Deployment",
        "metadata": {
            "name": "chat-interactive",
            "namespace": "team",
            "resourceVersion": version,
            "labels": LABELS,
        },
        "spec": {"replicas": replicas},
    }


def test_pods_that_are_still_to_be_made_hold_their_place(stores: Stores) -> None:
    objects = PoolObjects(("team", "chat"), stores)
    objects.note(_deployment(3))
    objects.note_pod(_pod())
    assert objects.num_missing(RequestClass.INTERACTIVE) == 2
    assert objects.num_held() == 3
    objects.note_pod(_pod(deletionTimestamp="2026-01-01T00:01:00Z", resourceVersion="6"))
    assert objects.num_held() == 4  # what ends still holds its place, and its successor's is added


def test_an_own_write_is_not_undone_by_an_event_from_before_it(stores: Stores) -> None:
    objects = PoolObjects(("team", "chat"), stores)
    objects.note(_deployment(1, "3"))
    scale = {"metadata": {"resourceVersion": "9"}, "spec": {"replicas": 4}}
    objects.note_replicas(RequestClass.INTERACTIVE, scale)
    stores.children["Deployment"].put(_deployment(1, "8"))
    assert objects.replicas(RequestClass.INTERACTIVE) == 4
    stores.children["Deployment"].put(_deployment(2, "10"))
    assert objects.replicas(RequestClass.INTERACTIVE) == 2


def test_a_new_list_drops_what_it_does_not_name(stores: Stores) -> None:
    woken: list[tuple[str, str]] = []
    store = Store(woken.append)
    store.put(_pod())
    store.put(_pod(name="chat-1"))
    store.replace([_pod(name="chat-1", resourceVersion="8")], None)
    assert list(store.of(("team", "chat"))) == ["chat-1"]
    store.replace([], "other")
    assert list(store.of(("team", "chat"))) == ["chat-1"]
    assert set(woken) == {("team", "chat")}
