"""Helm for the chart's tests: the one on the PATH, or the one that `make helm` builds.

Without it they are skipped, which pytest's summary says; with CHAIRLIFT_NEEDS_HELM set, as
`make test-cluster` does, they fail instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "chairlift"
CLUSTER = ("--namespace=system", "--kube-version=1.34.0")
CACHE = Path(os.environ.get("ONE_NODE_HOME") or Path.home() / ".cache" / "one-node")


@dataclass(frozen=True, slots=True)
class Helm:
    """Renders the chart as release `chairlift` in namespace `system`."""

    binary: str

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.binary, *arguments], capture_output=True, text=True)

    def template(self, settings: Sequence[str] = ()) -> str:
        sets = [part for setting in settings for part in ("--set", setting)]
        rendered = self.run("template", "chairlift", str(CHART), *CLUSTER, *sets)
        assert rendered.returncode == 0, rendered.stderr
        return rendered.stdout

    def objects(self, settings: Sequence[str] = ()) -> list[dict[str, Any]]:
        return [found for found in yaml.safe_load_all(self.template(settings)) if found]


@pytest.fixture(scope="session")
def helm() -> Helm:
    binary = shutil.which("helm", path=f"{os.environ['PATH']}{os.pathsep}{CACHE / 'bin'}")
    if binary is None:
        if os.environ.get("CHAIRLIFT_NEEDS_HELM"):
            pytest.fail("no helm: `make helm` builds it")
        pytest.skip("no helm, the chart is not rendered: `make helm` builds it")
    return Helm(binary)
