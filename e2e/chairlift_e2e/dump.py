"""What a failed test leaves for its reader: objects, events and logs of all namespaces."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from chairlift_e2e.kube import Kube, KubectlError

LOOKS = {
    "pods.txt": ("get", "pods", "--all-namespaces", "--output=wide"),
    "pods.yaml": ("get", "pods", "--all-namespaces", "--output=yaml"),
    "events.txt": ("get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"),
    "pools.yaml": ("get", "inferencepools.chairlift.dev", "--all-namespaces", "--output=yaml"),
    "quotas.yaml": ("get", "tenantquotas.chairlift.dev", "--all-namespaces", "--output=yaml"),
    "workloads.yaml": ("get", "deployments,replicasets,services,configmaps,leases",
                       "--all-namespaces", "--output=yaml"),
}  # fmt: skip


def dump(kube: Kube, folder: Path) -> str:
    """Write everything; the two short looks are also the answer, for the terminal."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = []
    for name, arguments in LOOKS.items():
        text = _look(kube, *arguments)
        (folder / name).write_text(text)
        if name in ("pods.txt", "events.txt"):
            shown.append(text[-6000:])
    names = _look(kube, "get", "pods", "--all-namespaces", "--output=jsonpath={range .items[*]}"
                  "{.metadata.namespace}/{.metadata.name}{\"\\n\"}{end}")  # fmt: skip
    for pod in names.splitlines():
        namespace, _, name = pod.partition("/")
        for previous in ("false", "true"):
            log = _look(kube, "logs", name, f"--namespace={namespace}", "--all-containers",
                        f"--previous={previous}")  # fmt: skip
            if previous == "false" or "previous terminated container" not in log:
                suffix = ".previous.log" if previous == "true" else ".log"
                (folder / f"{namespace}.{name}{suffix}").write_text(log)
    return "\n".join([f"everything is in {folder}", *shown])


def _look(kube: Kube, *arguments: str) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        try:
            return kube.run(*arguments)
        except KubectlError as error:
            return str(error)
    return "kubectl took too long"
