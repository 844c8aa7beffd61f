"""Random walks of a pool through bad days: specs that change, calls that fail, watches that lag,
pods that are lost or come up nowhere, leaders that change. What must hold at every step, holds; and
once the bad day is over, the pool is as its spec says.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from chairlift_e2e.fake_engine import FakeEngine
from chairlift_e2e.fake_kube import FakeKube
from chairlift_e2e.hostile_kube import HostileKube
from chairlift_operator.kube.pod_view import PodView
from chairlift_operator.kube.status import from_json, to_json

Json = dict[str, Any]
Turned = Any  # conftest's
DEPLOYMENTS = "/apis/apps/v1/namespaces/team/deployments"
CLASSES = ("interactive", "batch")
NUM_STEPS = 40
NUM_CALM_TURNS = 60  # drains of 40 s, one after the other


class Day:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.kube = HostileKube(self.rng, self)
        self.kube.bad_images.add("bad")
        self.spec: Json = {}
        self.pool: Turned = None
        self.broken: list[str] = []
        self._num_before = 0  # places taken when the spec changed: what is there may stay a while

    @property
    def is_managed(self) -> bool:
        return bool(self.spec["autoscaling"]["mode"] == "Managed")

    def counts(self) -> dict[str, int]:
        paths = {c: f"{DEPLOYMENTS}/chat-{c}" for c in CLASSES}
        found = {c: self.kube.objects[p] for c, p in paths.items() if p in self.kube.objects}
        return {c: int(item["spec"].get("replicas", 1)) for c, item in found.items()}

    def pods(self) -> list[Json]:
        marked = ((i, i["metadata"]["labels"].get("chairlift.dev/role")) for p, i in
                  self.kube.objects.items() if "/pods/" in p)  # fmt: skip
        return [item for item, role in marked if role == "engine"]

    def pod_made(self) -> None:
        limit = self.spec["capacity"]["replicas"] + self.spec["capacity"]["surge"]
        if self.is_managed and len(self.pods()) > max(limit, self._num_before):
            self.broken.append(f"{len(self.pods())} engine pods, {limit} may be")

    def pod_ended(self, pod: PodView) -> None:
        """A drain may end early by its time only. A pod without a mark is one whose successor came
        first: SIGTERM drains it."""
        fake = self.kube.pods.get(pod.name)
        is_busy = isinstance(fake, FakeEngine) and fake.num_in_flight > 0
        if not self.is_managed or not is_busy or not pod.is_ready or pod.mark is None:
            return
        drained_s = self.pool.clock.now_s - pod.mark.since_s
        if 0 < drained_s <= pod.mark.timeout_s:
            self.broken.append(f"{pod.name} ended with requests, {drained_s:.0f} s into its drain")

    def count_written(self, path: str) -> None:
        is_retired = "batch" in path and not self.spec["batch"]["replicas"]["max"]
        if self.spec["autoscaling"]["mode"] == "External" and not is_retired:
            self.broken.append(f"wrote {path}, which is somebody else's")

    def change_spec(self, **fixed: Any) -> None:
        least = self.rng.randint(1, 2), self.rng.randint(0, 1)
        more = [low + self.rng.randint(0, 2) for low in least]
        self.spec = {
            "interactive": {
                "replicas": {"min": least[0], "max": more[0]},
                "batchSize": {"max": self.rng.choice([32, 64])},
            },
            "batch": {"replicas": {"min": least[1], "max": more[1]}, "borrowing": {}},
            "capacity": {
                "replicas": sum(least) + self.rng.randint(0, 2),
                "surge": self.rng.randint(0, 1),
            },
            "runtime": {"engine": "simulator", "image": self.rng.choice(["good", "new", "bad"])},
            "autoscaling": {
                "mode": self.rng.choice(["Managed", "Managed", "External"]),
                "scaleDownWindow": "15s",
                "drainTimeout": self.rng.choice(["20s", "40s"]),
            },
            **fixed,
        }
        self._num_before = max(len(self.pods()), sum(self.counts().values()))
        self.pool.set_spec(**self.spec)

    async def happen(self) -> None:
        """One thing."""
        engines = self.kube.engines()
        name = self.rng.choice(sorted(engines)) if engines else None
        what = self.rng.choice(["spec", "lost", "stuck", "busy", "busy", "leader", "calls",
                                "watch", "better"])  # fmt: skip
        if what == "spec":
            self.change_spec()
        elif what == "leader":
            self.pool.next_leader()
        elif what == "calls":
            self.kube.failing = self.rng.choice([0.1, 0.4])
        elif what == "watch":
            self.kube.lagging = 0.5
        elif what == "better":
            self.end()
        elif name is not None and what == "lost":
            await self.kube.lose(name)
        elif name is not None and what == "stuck":
            self.kube.holds.add(name)
        elif name is not None:
            engines[name].num_in_flight = 3

    def end(self) -> None:
        self.kube.failing = self.kube.lagging = 0.0
        self.kube.holds.clear()
        self.kube.flush()
        for fake in self.kube.pods.values():
            if isinstance(fake, FakeEngine):
                fake.num_in_flight = 0

    async def turn(self) -> None:
        if self.pool.controller is not None and self.rng.random() < 0.3:
            await self.pool.controller.reconcile(self.pool.body)
        await self.pool.turn()
        if self.rng.random() < 0.5 or not self.kube.lagging:
            self.kube.flush()
        status = self.pool.status
        if to_json(from_json(status)) != status:
            self.broken.append(f"a status that is none: {status}")

    def is_settled(self) -> bool:
        for request_class, count in self.counts().items():
            bounds = self.spec[request_class]["replicas"]
            shown = self.pool.status.get(request_class, {})
            if not bounds["min"] <= count <= bounds["max"] or shown.get("ready") != count:
                return False
        is_true = self.pool.condition("Reconciled")["status"] == "True"
        return is_true and not self.pool.status.get("progress")


@pytest.mark.parametrize("seed", range(6))
def test_a_bad_day_breaks_no_promise_and_ends_as_the_spec_says(run: Any, seed: int) -> None:
    day = Day(seed)

    async def body(pool: Turned) -> None:
        day.pool = pool
        day.change_spec()
        for _ in range(NUM_STEPS):
            await day.turn()
            if day.rng.random() < 0.4:
                await day.happen()
            assert day.broken == []
        day.end()
        day.change_spec()
        runtime = {"engine": "simulator", "image": "good"}
        day.spec["autoscaling"]["mode"] = "Managed"
        for request_class in CLASSES:  # then nothing is left to scale
            replicas = day.spec[request_class]["replicas"]
            replicas["max"] = replicas["min"]
        day.change_spec(**{**day.spec, "runtime": runtime})
        await pool.until(day.is_settled, NUM_CALM_TURNS)
        assert day.broken == []
        assert sum(day.counts().values()) <= day.spec["capacity"]["replicas"]
        await pool.turn(20)
        before = len(pool.kube.writes)
        await pool.turn(6)
        assert {path.rpartition("/")[2] for _, path, _ in pool.kube.writes[before:]} <= {"chat"}

    run(body, day.kube)


def test_the_bad_days_are_not_good_ones() -> None:
    """What they look for, they would see."""
    day = Day(0)
    assert isinstance(day.kube, FakeKube)
    day.spec = {"capacity": {"replicas": 0, "surge": 0}, "autoscaling": {"mode": "Managed"}}
    labels = {"chairlift.dev/role": "engine"}
    pod = {"kind": "Pod", "metadata": {"name": "a", "namespace": "team", "labels": labels}}
    day.kube.objects["/api/v1/namespaces/team/pods/a"] = pod
    day.pod_made()
    day.spec["autoscaling"]["mode"] = "External"
    day.count_written("x/scale")
    assert len(day.broken) == 2
