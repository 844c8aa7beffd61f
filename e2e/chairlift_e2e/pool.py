"""A pool as a user writes it and reads it: manifests, status, which pod is of which class."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from chairlift_e2e.kube import Kube, Object, condition, eventually, is_true

KIND: Final = "inferencepools.chairlift.dev"
MODEL: Final = "tiny"
POOL_LABEL: Final = "chairlift.dev/pool"
ROLE_LABEL: Final = "chairlift.dev/role"
CLASS_LABEL: Final = "chairlift.dev/class"
READY_S: Final = 120.0

# Slow enough to keep two cores free for everything else. Decodes make up most of a step, so that
# slow hardware asks for a smaller batch and not only for less prefill.
COSTS: Final = {"a_ms": 20.0, "b_ms": 2.0, "c_ms": 0.3, "d_ms": 0.0}
PROFILE_FOLDER: Final = "/etc/simulator"
PROFILE_FILE: Final = "profile.toml"
EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "chat.yaml"
RESOURCES: Final = {"requests": {"cpu": "20m", "memory": "64Mi"}}
# The example, on simulated engines whose profile lies in a ConfigMap and can change under way.
CHANGES: Final[Object] = {
    "model": {"name": MODEL, "source": f"cache://{MODEL}"},
    "runtime": {
        "engine": "simulator",
        "simulator": {"profile": f"file://{PROFILE_FOLDER}/{PROFILE_FILE}"},
        "resources": RESOURCES,
        "podTemplate": {
            "spec": {
                "volumes": [{"name": "simulator", "configMap": {"name": "simulator"}}],
                "containers": [
                    {
                        "name": "engine",
                        "volumeMounts": [{"name": "simulator", "mountPath": PROFILE_FOLDER}],
                    }
                ],
            }
        },
    },
    "gateway": {"replicas": 1, "resources": RESOURCES},
    "interactive": {
        "slo": {
            "timeToFirstToken": {"threshold": "5s"},
            "interTokenLatency": {"threshold": "150ms"},
        },
    },
    "autoscaling": {"scaleDownWindow": "20s", "drainTimeout": "1m"},
}


def component(pod: Object) -> str | None:
    """interactive, batch or gateway; None for a pod of nobody's pool."""
    labels = pod["metadata"].get("labels", {})
    if POOL_LABEL not in labels:
        return None
    return str(labels.get(CLASS_LABEL) or labels.get(ROLE_LABEL))


@dataclass(frozen=True, slots=True)
class Pool:
    kube: Kube
    namespace: str
    name: str = "chat"

    def set_step_times(self, factor: float) -> None:
        """Every step of every engine takes `factor` times as long, from some seconds on."""
        profile = "".join(f"{name} = {cost * factor}\n" for name, cost in COSTS.items())
        metadata = {"name": "simulator", "namespace": self.namespace}
        self.kube.apply({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata,
            "data": {PROFILE_FILE: profile},
        })  # fmt: skip
        # A kubelet looks at a pod's volumes when the pod changes, else only once in a while.
        self.kube.run("annotate", "pods", f"--namespace={self.namespace}", "--overwrite",
                      f"--selector={ROLE_LABEL}=engine", f"e2e/speed={factor}")  # fmt: skip

    def apply(self, changes: Mapping[str, Any] | None = None) -> None:
        example = yaml.safe_load(EXAMPLE.read_text())["spec"]
        spec = merged(merged(example, CHANGES), changes or {})
        metadata = {"name": self.name, "namespace": self.namespace}
        self.kube.apply({
            "apiVersion": "chairlift.dev/v1alpha1", "kind": "InferencePool", "metadata": metadata,
            "spec": spec,
        })  # fmt: skip

    def patch(self, spec: Mapping[str, Any]) -> None:
        self.kube.patch(KIND, self.namespace, self.name, {"spec": spec})

    def found(self) -> Object | None:
        return self.kube.get(KIND, self.namespace, self.name)

    def status(self) -> Object:
        return dict((self.found() or {}).get("status", {}))

    def of_class(self, request_class: str) -> Object:
        return self.status().get(request_class) or {}

    @property
    def url(self) -> str:
        return str(self.status()["gateway"]["url"])

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        def ready() -> bool:
            return is_true(self.found(), "Ready")

        eventually(
            f"pool {self.name} is Ready", ready, timeout_s, lambda: condition(self.found(), "Ready")
        )

    def wait_replicas(self, request_class: str, count: int, timeout_s: float) -> None:
        """Until as many are ready and no more are left, starting or draining ones included."""

        def settled() -> bool:
            seen = self.of_class(request_class)
            others = seen.get("starting", 0) + seen.get("draining", 0)
            return (seen.get("desired"), seen.get("ready"), others) == (count, count, 0)

        eventually(f"{self.name} has {count} {request_class} replicas", settled, timeout_s)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """As a JSON merge patch: None removes."""
    result = copy.deepcopy(dict(base))
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(result.get(name), Mapping):
            result[name] = merged(result[name], value)
        else:
            result[name] = copy.deepcopy(value)
    return result
