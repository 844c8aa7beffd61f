"""The README's way onto a cluster: apply the example as it is, see it Ready, talk to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift_e2e.kube import Kube
from chairlift_e2e.load import LoadPod
from chairlift_e2e.pool import MODEL, Pool
from chairlift_e2e.release import Release

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.timeout(300)
def test_the_fleet_of_the_readme_serves_both_classes(
    kube: Kube, release: Release, namespace: str, images: Callable[[str], str], tally: Any
) -> None:
    kube.run("apply", f"--namespace={namespace}", f"--filename={EXAMPLES / 'fleet.yaml'}")
    pool = Pool(kube, namespace, "fleet")
    pool.wait_ready()
    loads = [
        LoadPod(kube, namespace, name, images("chairlift-load"), pool.url + path, MODEL, 1.0, 10.0)
        for name, path in (("chat", ""), ("work", "/batch"))
    ]
    for load in loads:
        load.start()
    for load in loads:
        result = load.result(60.0)
        tally.num_requests += result.num_requests
        tally.num_failed_requests += result.num_failed
        assert result.num_requests > 0 and result.errors == ()
