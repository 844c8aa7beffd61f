"""The chart as a user installs it: helm install, upgrade, uninstall."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CHART: Final = Path(__file__).parents[2] / "helm" / "chairlift"
HELM_S: Final = 180


class HelmError(RuntimeError):
    """helm said no; the message is its own."""


@dataclass(frozen=True, slots=True)
class Release:
    context: str
    namespace: str
    registry: str
    tag: str
    name: str = "chairlift"

    def install(self, *settings: str) -> None:
        """Install or upgrade, and wait until the operator runs."""
        values = (
            f"images.registry={self.registry}",
            f"images.tag={self.tag}",
            "replicas=2",
            *settings,
        )
        sets = [part for value in values for part in ("--set", value)]
        self._helm("upgrade", "--install", self.name, str(CHART), "--create-namespace", "--wait",
                   f"--timeout={HELM_S}s", *sets)  # fmt: skip

    def uninstall(self) -> None:
        self._helm("uninstall", self.name, "--ignore-not-found", "--wait", f"--timeout={HELM_S}s")

    def _helm(self, *arguments: str) -> None:
        command = ["helm", f"--kube-context={self.context}", f"--namespace={self.namespace}"]
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=HELM_S + 60
        )
        if done.returncode != 0:
            raise HelmError(f"helm {' '.join(arguments)}: {done.stderr.strip()}")
