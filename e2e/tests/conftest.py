"""One cluster and one release for all tests; what failed is dumped; what went wrong is counted.

Nothing here runs without E2E_CONTEXT, the name of the context that may be touched: `make e2e` makes
a cluster of its own and names it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from chairlift_e2e.dump import dump
from chairlift_e2e.kube import Kube, eventually
from chairlift_e2e.pool import KIND, POOL_LABEL
from chairlift_e2e.release import Release

RESULTS = Path(__file__).parents[1] / "results"
CONTEXT = os.environ.get("E2E_CONTEXT", "")
SYSTEM = "chairlift-system"


@dataclass(slots=True)
class Tally:
    """What must be 0 at the end: requests that failed, restarts of pods that nobody ended."""

    num_failed_requests: int = 0
    num_pod_restarts: int = 0
    num_requests: int = 0


TALLY = pytest.StashKey[Tally]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TALLY] = Tally()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not CONTEXT:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="runs on a cluster: make e2e"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed and CONTEXT:
        folder = RESULTS / re.sub(r"\W+", "-", f"{item.name}-{report.when}")
        shutil.rmtree(folder, ignore_errors=True)
        report.sections.append(("the cluster", dump(Kube(CONTEXT), folder)))
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    tally = config.stash[TALLY]
    if tally.num_requests:
        terminalreporter.write_line(f"{tally.num_requests} requests")
        terminalreporter.write_line(f"claim e2e_failed_requests {tally.num_failed_requests}")
        terminalreporter.write_line(f"claim e2e_pod_restarts {tally.num_pod_restarts}")


@pytest.fixture(scope="session")
def tally(request: pytest.FixtureRequest) -> Tally:
    return request.config.stash[TALLY]


@pytest.fixture(scope="session")
def kube() -> Kube:
    return Kube(CONTEXT)


@pytest.fixture(scope="session")
def images() -> Callable[[str], str]:
    """Full reference of an image by its name."""
    return lambda name: f"{os.environ['E2E_REGISTRY']}/{name}:{os.environ['E2E_TAG']}"


@pytest.fixture(scope="session")
def release(kube: Kube) -> Iterator[Release]:
    release = Release(CONTEXT, SYSTEM, os.environ["E2E_REGISTRY"], os.environ["E2E_TAG"])
    release.install()
    yield release
    release.uninstall()


@pytest.fixture
def namespace(kube: Kube, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace for one test, gone after it."""
    name = "e2e-" + re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_"))[:40].strip(
        "-"
    )
    kube.run("create", "namespace", name)
    yield name
    if kube.run("get", "namespace", name, "--ignore-not-found", "--output=name"):
        # First: Kubernetes looks at a namespace again only after half of the longest grace period.
        kube.run("delete", KIND, "--all", f"--namespace={name}", "--timeout=60s")
        eventually("its pods are gone", lambda: not kube.list("pods", name, POOL_LABEL), 120.0)
    kube.run("delete", "namespace", name, "--ignore-not-found", "--timeout=120s", timeout_s=150)
