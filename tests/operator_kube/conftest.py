"""Pods, pools and settings as values, and one pool with its controller against a cluster in a
dictionary: no API server, no waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import pytest

from chairlift_e2e.fake_kube import FakeKube
from chairlift_operator.kube.children import Owner
from chairlift_operator.kube.listening import Listening
from chairlift_operator.kube.pod_view import Mark, PodView
from chairlift_operator.kube.pool_controller import PoolController
from chairlift_operator.kube.settings import Images, Settings
from chairlift_operator.kube.tools import Tools
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import parse_pool
from chairlift_protocol.wire import RequestClass

Json = dict[str, Any]
POOL = "/apis/chairlift.dev/v1alpha1/namespaces/team/inferencepools/chat"
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


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


class Turned:
    """One pool, its controller and its cluster; `turn` is a tick and what comes of it."""

    def __init__(self, kube: FakeKube, tools: Tools, clock: Clock, term: int = 7) -> None:
        self.kube, self.tools, self.clock, self.term = kube, tools, clock, term
        self.body: Json = {}
        self.controller: PoolController | None = None

    def set_spec(self, **sections: Any) -> None:
        model = {"name": "tiny", "source": "cache://tiny"}
        spec = {"model": model, "runtime": {"engine": "simulator"}, **sections}
        generation = self.body.get("metadata", {}).get("generation", 0) + 1
        metadata = {"name": "chat", "namespace": "team", "uid": "u", "generation": generation}
        status = self.kube.objects.get(POOL, {}).get("status", {})
        self.body = {"metadata": metadata, "spec": spec, "status": status}
        self.kube.objects[POOL] = {"kind": "InferencePool", **self.body}

    async def turn(self, num_turns: int = 1) -> None:
        for _ in range(num_turns):
            if self.controller is None:
                self.controller = PoolController(self.body, self.term, self.tools)
            self.clock.now_s += 5.0
            await self.controller.tick(self.body)
            await self.kube.settle()

    async def until(self, probe: Callable[[], Any], num_turns: int = 40) -> Any:
        for _ in range(num_turns):
            if found := probe():
                return found
            await self.turn()
        raise AssertionError(f"not within {num_turns} turns; {self.status}")

    def next_leader(self) -> None:
        self.controller, self.term = None, self.term + 1
        self.body = {**self.body, "status": self.status}

    @property
    def status(self) -> Json:
        return dict(self.kube.objects[POOL].get("status", {}))

    @property
    def count(self) -> int:
        return int(self.kube.deployment("chat-interactive")["spec"]["replicas"])

    def condition(self, kind: str) -> Json:
        found = {c["type"]: c for c in self.status.get("conditions", ())}
        return dict(found.get(kind, {}))


Body = Callable[[Turned], Any]


@pytest.fixture
def run(settings: Settings) -> Callable[..., None]:
    """Runs a body with a pool, in a cluster of its own or the one that is given."""

    @asynccontextmanager
    async def opened(kube: FakeKube) -> AsyncIterator[Turned]:
        clock, api = Clock(), cast(Any, kube)
        async with aiohttp.ClientSession() as session:
            try:
                listening = Listening(session, clock)
                tools = Tools(api, session, kube.stores, settings, clock, listening)
                yield Turned(kube, tools, clock)
            finally:
                await kube.close()

    def runs(body: Body, kube: FakeKube | None = None) -> None:
        async def main() -> None:
            async with opened(kube or FakeKube()) as pool:
                await body(pool)

        asyncio.run(main())

    return runs
