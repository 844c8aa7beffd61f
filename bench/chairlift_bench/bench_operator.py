"""What 1,000 pools cost the operator, at rest and when a spec changes: `make bench-operator`.

A real API server with Kubernetes' own controllers, the real operator process, and a node that only
pretends: its pods answer what real engines and gateways say at rest, from a process of its own.
First all pools are made and left alone, then the operator is watched at rest, then specs change.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from chairlift_bench.claims import publish
from chairlift_bench.operator_changes import apply_times_s
from chairlift_bench.operator_process import Cost, Spent, rss_mib, spent
from chairlift_bench.outcomes import percentile
from chairlift_e2e.kube import Kube, condition, eventually
from chairlift_e2e.processes import controllers, operator, running
from chairlift_operator.kube.access import read_access
from chairlift_operator.kube.api import Api
from chairlift_operator.kube.paths import POOL, Kind
from chairlift_operator.kube.settings import LOOK_S, REST_S

Json = dict[str, Any]
NUM_POOLS: Final = 1000
NUM_NAMESPACES: Final = 20
NUM_MAKERS: Final = 8
NUM_CHANGES: Final = 120
READY_WITHIN_S: Final = 900.0
SETTLE_S: Final = REST_S + LOOK_S  # until idle pools are at rest, then a first round of looks
WATCHED_S: Final = LOOK_S
SHOWN_S: Final = 30.0
METRICS_PORT: Final = 18082
SYSTEM: Final = "chairlift-system"
NAMESPACE: Final = Kind("Namespace", "/api/v1", "namespaces")
ROOT: Final = Path(__file__).parents[2]
# Deployments of a thousand pools in minutes, not in an hour.
HURRIED: Final = (
    "--kube-api-qps=400", "--kube-api-burst=800",
    "--concurrent-deployment-syncs=16", "--concurrent-replicaset-syncs=16",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class World:
    """kube: the cluster. pid: the operator's."""

    kube: Kube
    pid: int

    def spent(self) -> Spent:
        return spent(self.pid, METRICS_PORT, self.kube.run("get", "--raw", "/metrics"))


def main() -> int:
    context = os.environ.get("E2E_CONTEXT")
    if not context:
        print("needs a control plane: make bench-operator", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as logs, world(Kube(context), Path(logs)) as made:
        asyncio.run(measure(made))
    return 0


@contextmanager
def world(kube: Kube, logs: Path) -> Iterator[World]:
    with ExitStack() as stack:
        stack.enter_context(running(controllers(*HURRIED), logs / "controllers.log"))
        kube.run("apply", "-f", str(ROOT / "crds"))
        eventually("the CRD is served", lambda: kube.run("api-resources", "--categories=chairlift",
                   "--no-headers"), 30.0)  # fmt: skip
        kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
        fleet = [sys.executable, "-m", "chairlift_e2e.fleet"]
        stack.enter_context(running(fleet, logs / "fleet.log"))
        process = stack.enter_context(
            operator("operator-0", SYSTEM, logs / "operator.log", METRICS_PORT)
        )
        yield World(kube, process.pid)


async def measure(made: World) -> None:
    async with aiohttp.ClientSession() as session:
        api = Api(session, read_access)
        begun_s = time.monotonic()
        keys = await make_pools(api)
        await until_ready(api)
        ready_s = time.monotonic() - begun_s
        rest = await watch_at_rest(made)
        print(f"changing {NUM_CHANGES} specs ...")
        times_s = await apply_times_s(api, keys[:: max(1, len(keys) // NUM_CHANGES)])
    claims = {
        "operator_apply_p95_s": percentile(times_s, 95),
        "operator_idle_cores": rest.cores,
        "operator_api_calls_per_pool_minute": rest.server_calls_per_minute / NUM_POOLS,
        "operator_rss_mib": rss_mib(made.pid),
    }
    figures = {
        "num_pools": NUM_POOLS,
        "ready_s": ready_s,
        "rest": asdict(rest),
        "rss_peak_mib": rss_mib(made.pid, "VmHWM"),
        "apply_p50_s": percentile(times_s, 50),
        "apply_max_s": max(times_s),
        "num_changes": len(times_s),
    }
    publish("operator", claims, figures)


async def make_pools(api: Api) -> list[tuple[str, str]]:
    """Spread over namespaces; a few requests at a time, as people and pipelines do."""
    namespaces = [f"bench-{number:02}" for number in range(NUM_NAMESPACES)]
    for name in namespaces:
        body = {"apiVersion": "v1", "kind": NAMESPACE.name, "metadata": {"name": name}}
        await api.create(NAMESPACE.path(), body, "bench")
    keys = [(namespaces[i % NUM_NAMESPACES], f"pool-{i:04}") for i in range(NUM_POOLS)]
    slots = asyncio.Semaphore(NUM_MAKERS)

    async def make(namespace: str, name: str) -> None:
        async with slots:
            await api.create(POOL.path(namespace), pool(namespace, name), "bench")

    await asyncio.gather(*(make(*key) for key in keys))
    print(f"{len(keys)} pools made")
    return keys


def pool(namespace: str, name: str) -> Json:
    """One engine and one gateway."""
    return {
        "apiVersion": "chairlift.dev/v1alpha1",
        "kind": POOL.name,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"name": "tiny", "source": "cache://tiny"},
            "runtime": {"engine": "simulator", "image": "fake:1"},
            "gateway": {"replicas": 1},
        },
    }


async def until_ready(api: Api) -> None:
    ends_s = time.monotonic() + READY_WITHIN_S
    while True:
        pools = (await api.list(POOL.path())).items
        num_ready = sum(
            all(condition(p, kind).get("status") == "True" for kind in ("Ready", "Tuned"))
            and p["status"].get("gateway", {}).get("ready") == 1
            for p in pools
        )
        print(f"{num_ready} of {len(pools)} pools are ready")
        if num_ready == NUM_POOLS:
            return
        if time.monotonic() > ends_s:
            raise TimeoutError(f"{num_ready} of {NUM_POOLS} pools after {READY_WITHIN_S:.0f} s")
        await asyncio.sleep(10)


async def watch_at_rest(made: World) -> Cost:
    print(f"left alone for {SETTLE_S:.0f} s, then watched for {WATCHED_S:.0f} s ...")
    begun_s = time.monotonic()
    before = last = made.spent()
    while (passed_s := time.monotonic() - begun_s) < SETTLE_S + WATCHED_S:
        await asyncio.sleep(SHOWN_S)
        now = made.spent()
        show(passed_s + SHOWN_S, Cost.between(last, now), rss_mib(made.pid))
        if passed_s < SETTLE_S:
            before = now
        last = now
    return Cost.between(before, last)


def show(at_s: float, cost: Cost, rss: float) -> None:
    own, server = cost.own_calls_per_minute, cost.server_calls_per_minute
    print(
        f"{at_s:4.0f} s: {cost.cores:.3f} cores, {own / NUM_POOLS:.2f} calls per pool and minute "
        f"({server / NUM_POOLS:.2f} by the server's count), {rss:.0f} MiB"
    )


if __name__ == "__main__":
    sys.exit(main())
