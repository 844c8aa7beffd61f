"""Pods, pools and settings as values, for everything that decides without a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chairlift_operator.kube.children import Owner
from chairlift_operator.kube.pod_view import Mark, PodView
from chairlift_operator.kube.settings import Images, Settings
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import parse_pool
from chairlift_protocol.wire import RequestClass

SETTINGS = Settings(
    identity="operator-0",
    namespace="chairlift-system",
    instance="chairlift",
    namespaces=(),
    images=Images("engine:1", "simulator:1", "gateway:1"),
)


@pytest.fixture
def settings() -> Settings:
    return SETTINGS


@pytest.fixture
def owner() -> Owner:
    return Owner("uid-1", SETTINGS.operator)


@pytest.fixture
def make_pool() -> Callable[..., InferencePool]:
    """A simulated pool in namespace `team`; sections are laid over its spec."""

    def make(**sections: Any) -> InferencePool:
        spec = {
            "model": {"name": "tiny", "source": "cache://tiny"},
            "runtime": {"engine": "simulator"},
            **sections,
        }
        return parse_pool(
            {
                "apiVersion": "chairlift.dev/v1alpha1",
                "kind": "InferencePool",
                "metadata": {"name": "chat", "namespace": "team"},
                "spec": spec,
            }
        )

    return make


@pytest.fixture
def make_pod() -> Callable[..., PodView]:
    """A pod that serves; words after the name say how it is otherwise."""

    def make(name: str, *words: str, revision: str = "new", cost: int = 0) -> PodView:
        known = {"pending", "unassigned", "unready", "ending", "scale", "rollout", "failing"}
        assert set(words) <= known
        is_up = not {"pending", "unassigned"} & set(words)
        marks = [word for word in words if word in ("scale", "rollout")]
        return PodView(
            name=name,
            uid=f"uid-{name}",
            request_class=RequestClass.INTERACTIVE,
            revision=revision,
            ip="198.18.0.9" if is_up else None,
            is_assigned="unassigned" not in words,
            is_running=is_up,
            is_ready=is_up and not {"unready", "failing"} & set(words),
            is_terminating="ending" in words,
            mark=Mark(100.0, 60.0, marks[0]) if marks else None,
            deletion_cost=cost or (-1_000_000 if marks else 0),
            created_s=0.0,
            trouble="it has ended 3 times" if "failing" in words else None,
        )

    return make
