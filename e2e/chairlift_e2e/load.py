"""Load from inside the cluster: a pod that streams chats through a gateway and sums up."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from chairlift_e2e.kube import Kube, Object, eventually


@dataclass(frozen=True, slots=True)
class LoadResult:
    num_requests: int
    num_failed: int
    errors: tuple[str, ...]
    summary: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LoadPod:
    """One run of chairlift_bench.steady_load; its arrivals take `duration_s`, answers longer."""

    kube: Kube
    namespace: str
    name: str
    image: str
    url: str
    model: str
    requests_per_s: float
    duration_s: float
    max_tokens: int = 64
    prompt_chars: int = 200
    seed: int = 0

    def start(self) -> None:
        self.kube.apply(self._manifest())

    def has_ended(self) -> bool:
        pod = self.kube.get("pod", self.namespace, self.name)
        return pod is not None and pod["status"].get("phase") in ("Succeeded", "Failed")

    def result(self, timeout_s: float) -> LoadResult:
        """Wait for its end and remove it."""
        eventually(f"load {self.name} has ended", self.has_ended, timeout_s)
        output = self.kube.logs(self.namespace, self.name)
        self.kube.run("delete", "pod", self.name, f"--namespace={self.namespace}", "--wait=false")
        try:
            summary = json.loads(output.splitlines()[-1])
        except (IndexError, ValueError):
            raise AssertionError(f"load {self.name} gave no summary:\n{output}") from None
        return LoadResult(
            summary["num_requests"], summary["num_failed"], tuple(summary["errors"]), summary
        )

    def _manifest(self) -> Object:
        arguments = {
            "--requests-per-s": self.requests_per_s,
            "--duration-s": self.duration_s,
            "--max-tokens": self.max_tokens,
            "--prompt-chars": self.prompt_chars,
            "--seed": self.seed,
        }
        container = {
            "name": "load",
            "image": self.image,
            "args": [self.url, self.model, *(f"{k}={v}" for k, v in arguments.items())],
            "resources": {"requests": {"cpu": "10m"}},
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "containers": [container],
            },
        }
