"""A real model in pods, fetched from a hub: loaded, tuned, and talked to through the gateway.

The engine's image with torch is 5 GB; the simulator's has the same server, and this machine's
torch is mounted into it. So it runs on this machine's own node only.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift_e2e import fake_hub
from chairlift_e2e.kube import Kube, Object, eventually
from chairlift_e2e.load import LoadPod
from chairlift_e2e.pool import KIND, Pool
from chairlift_e2e.release import Release
from chairlift_e2e.watch import Watch
from chairlift_engine.model_source import cached_model_dir

MODEL = "smollm2-135m"
TOKEN = "hf-e2e"
HUB = "http://hub"
LIBRARIES = "/opt/venv/lib/python3.11/site-packages"


def mount(name: str, path: Path, at: str) -> tuple[Object, Object]:
    """A volume of this machine's files, and where it appears."""
    volume = {"name": name, "hostPath": {"path": str(path)}}
    return volume, {"name": name, "mountPath": at, "readOnly": True}


def hub(namespace: str, image: str) -> list[Object]:
    """A stand-in for the hub in a pod, its Service, and the token that it wants."""
    model, model_at = mount("model", cached_model_dir(MODEL), "/model")
    code, code_at = mount("code", Path(fake_hub.__file__), "/fake_hub.py")
    metadata = {"name": "hub", "namespace": namespace, "labels": {"app": "hub"}}
    container = {
        "name": "hub",
        "image": image,
        "command": ["python3", "/fake_hub.py", "/model", "8080", TOKEN],
        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
        "volumeMounts": [model_at, code_at],
    }
    ports = [{"port": 80, "targetPort": 8080}]
    return [
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata,
         "stringData": {"token": TOKEN}},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata,
         "spec": {"selector": {"app": "hub"}, "ports": ports}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata,
         "spec": {"containers": [container], "volumes": [model, code],
                  "terminationGracePeriodSeconds": 0}},
    ]  # fmt: skip


def changes(image: str) -> Object:
    libraries, libraries_at = mount("libraries", Path(sysconfig.get_path("purelib")), LIBRARIES)
    container = {"name": "engine", "volumeMounts": [libraries_at]}
    return {
        "model": {
            "name": MODEL,
            "source": "hf://owner/model@v1",
            "maxLength": 1024,
            "huggingFace": {"tokenSecret": "hub", "endpoint": HUB},
        },
        "runtime": {
            "engine": "chairlift",
            "image": image,
            "simulator": None,
            "podTemplate": {"spec": {"containers": [container], "volumes": [libraries]}},
        },
        "interactive": {"batchSize": {"max": 8}, "stepTokens": {"max": 256}},
    }


@pytest.mark.timeout(400)
def test_a_model_of_a_hub_is_loaded_tuned_and_answers(
    kube: Kube, release: Release, namespace: str, images: Callable[[str], str], tally: Any
) -> None:
    if kube.context != "one-node":
        pytest.skip("mounts this machine's torch: only on the cluster of make e2e")
    kube.apply(*hub(namespace, images("chairlift-load")))
    pool = Pool(kube, namespace)
    told: list[str] = []
    with Watch(
        kube,
        KIND,
        namespace,
        lambda event, found: told.append(found.get("status", {}).get("progress", "")),
    ):
        pool.apply(changes(images("chairlift-engine-simulator")))
        pool.wait_ready(240.0)
    assert any("loads the model" in progress for progress in told), told
    load = LoadPod(kube, namespace, "load", images("chairlift-load"), pool.url, MODEL, 0.5, 20.0,
                   max_tokens=16)  # fmt: skip
    load.start()
    eventually("a policy is confirmed",
               lambda: pool.of_class("interactive").get("policyGeneration"), 30.0)  # fmt: skip
    result = load.result(120.0)
    tally.num_requests += result.num_requests
    tally.num_failed_requests += result.num_failed
    assert result.num_requests > 0 and result.errors == ()
