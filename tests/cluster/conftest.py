"""The operator against a real API server and real controllers, with a node that only pretends.

Run by `make test-cluster`, which makes a control plane and names it in E2E_CONTEXT; never by plain
`pytest`. Kubernetes' own controllers run beside it, so Deployments, garbage collection and the end
of namespaces are the real ones.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chairlift_e2e import processes
from chairlift_e2e.fake_engine import FakeEngine
from chairlift_e2e.fake_node import FakeNode
from chairlift_e2e.kube import Kube, Object, condition, eventually
from chairlift_e2e.pool import KIND
from chairlift_e2e.processes import controllers, running

ROOT = Path(__file__).parents[2]
CONTEXT = os.environ.get("E2E_CONTEXT", "")
WAIT_S = 40.0
SYSTEM = "chairlift-system"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(180))


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def kube(logs: Path) -> Iterator[Kube]:
    """The control plane with its controllers, our CRD, and the operator's namespace."""
    if not CONTEXT:
        pytest.fail("needs a control plane: make test-cluster")
    kube = Kube(CONTEXT)
    with running(controllers(), logs / "controllers.log"):
        kube.run("apply", "-f", str(ROOT / "crds"))
        eventually("the CRD is served", lambda: kube.run("api-resources", "--categories=chairlift",
                   "--no-headers"), 30.0)  # fmt: skip
        kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
        yield kube


@pytest.fixture(scope="session")
def node(kube: Kube) -> Iterator[FakeNode]:
    with FakeNode() as node:
        yield node


Start = Callable[..., Any]


@pytest.fixture(scope="session")
def start_operator(kube: Kube, logs: Path) -> Start:
    """A context manager: one operator process of that name, in that namespace."""

    def start(name: str, namespace: str = SYSTEM) -> Any:
        return processes.operator(name, namespace, logs / f"{name}.log")

    return start


@pytest.fixture(scope="module")
def operator(start_operator: Start, node: FakeNode) -> Iterator[None]:
    with start_operator("operator-0"):
        yield


@dataclass(frozen=True)
class TestPool:
    """A pool in a namespace of its own, its objects, and its engines."""

    __test__ = False

    kube: Kube
    node: FakeNode
    namespace: str
    name: str = "chat"

    def apply(self, **sections: Any) -> None:
        """Sections are laid over a pool of one simulated engine."""
        spec: Object = {
            "model": {"name": "tiny", "source": "cache://tiny"},
            "runtime": {"engine": "simulator", "image": "fake:1"},
            "gateway": {"replicas": 1},
            "autoscaling": {"scaleDownWindow": "15s", "drainTimeout": "30s"},
            **sections,
        }
        self.kube.apply(
            {
                "apiVersion": "chairlift.dev/v1alpha1",
                "kind": "InferencePool",
                "metadata": {"name": self.name, "namespace": self.namespace},
                "spec": spec,
            }
        )

    def patch(self, **sections: Any) -> None:
        self.kube.patch(KIND, self.namespace, self.name, {"spec": sections})

    def status(self) -> Object:
        found = self.kube.get(KIND, self.namespace, self.name)
        return dict((found or {}).get("status", {}))

    def condition(self, kind: str) -> Object:
        return condition(self.kube.get(KIND, self.namespace, self.name), kind)

    def deployment(self, request_class: str = "interactive") -> Object:
        found = self.kube.get("deployment", self.namespace, f"{self.name}-{request_class}")
        return found or {}

    def pods(self, request_class: str = "interactive") -> list[Object]:
        selector = f"chairlift.dev/pool={self.name},chairlift.dev/class={request_class}"
        return self.kube.list("pods", self.namespace, selector)

    def engines(self, request_class: str = "interactive") -> dict[str, FakeEngine]:
        """Of the pods that are not being ended, by name."""
        known = self.node.engines()
        alive = [p for p in self.pods(request_class) if "deletionTimestamp" not in p["metadata"]]
        names = [pod["metadata"]["name"] for pod in alive]
        return {name: known[name] for name in names if name in known}

    def until(self, what: str, probe: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
        return eventually(f"{what}; status {self.status()}", probe, timeout_s)

    def wait_ready(self, count: int = 1, request_class: str = "interactive") -> None:
        def settled() -> bool:
            known = self.status().get(request_class, {})
            others = known.get("starting", 0) + known.get("draining", 0)
            return (known.get("desired"), known.get("ready"), others) == (count, count, 0)

        self.until(f"{count} {request_class} replicas", settled)

    def scale(self, count: int, request_class: str = "interactive") -> None:
        """As an autoscaler or a person does it."""
        name = f"deployment/{self.name}-{request_class}"
        self.kube.run("scale", name, f"--namespace={self.namespace}", f"--replicas={count}")

    def events(self, reason: str) -> list[str]:
        found = self.kube.list("events", self.namespace)
        return [e["message"] for e in found if e["reason"] == reason]


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    kube.run("delete", "namespace", name, "--wait=false")


@pytest.fixture
def pool(kube: Kube, node: FakeNode, namespace: str, operator: None) -> TestPool:
    return TestPool(kube, node, namespace)


def marked(manager: str, item: Mapping[str, Any]) -> list[Any]:
    """Entries of managedFields of one manager."""
    return [m for m in item["metadata"].get("managedFields", ()) if m["manager"] == manager]
