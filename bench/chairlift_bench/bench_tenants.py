"""Ten thousand tenants of one pool: `make bench-tenants`.

A real Redis, the operator's part that looks after tenants and the gateway's that knows them, each a
process of its own on loopback, and an API server that keeps objects in memory. Measured: memory for
each tenant, what the operator costs at rest, how long one changed quota with a new key takes until
a gateway goes by it, and how many series metrics have after every tenant was served.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import redis

from chairlift_bench.claims import publish
from chairlift_bench.listening import listens_within
from chairlift_bench.operator_process import cpu_s, rss_mib
from chairlift_bench.redis_process import NoRedis, free_port, running_redis
from chairlift_bench.tenants_api import (
    NAMESPACE,
    POOL,
    QUOTAS,
    SECRETS,
    key,
    quota_spec,
    secret,
    tenant,
)
from chairlift_engine.residency import Gauges, TenantGauge
from chairlift_engine.server.tenant_metrics import TenantMetrics
from chairlift_gateway.metrics import GatewayMetrics
from chairlift_gateway.quota.law import REFUSALS
from chairlift_operator.kube.quota_turn import MEASURED_A_TURN, ROUND_S
from chairlift_protocol.quota import QuotaKeys
from chairlift_protocol.wire import RequestClass

Json = dict[str, Any]
NUM_TENANTS: Final = 10_000
NUM_FIRST: Final = 10  # before memory is measured for the first time
NUM_CHANGES: Final = 20
READY_S: Final = 600.0
QUIET_S: Final = 20.0  # without a status written: at rest
SETTLE_S: Final = 20.0  # after every tenant was served
WATCHED_S: Final = 60.0
MIB: Final = 1 << 20
REFUSED: Final = (*sorted(REFUSALS), "unavailable")  # why a gateway refuses a tenant
WANTED: Final = {"tenants_hot_change_s": 5.0, "operator_cores_at_rest": 0.1}


class World:
    """The three processes."""

    def __init__(
        self, port: int, redis_port: int, operator_pid: int, gateway: subprocess.Popen[str]
    ) -> None:
        self._server = f"http://127.0.0.1:{port}"
        self.redis_port, self.operator_pid, self._gateway = redis_port, operator_pid, gateway
        self.gateway_pid = gateway.pid

    def ask(self, method: str, path: str, body: Json | None = None) -> Json:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._server + path, data, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: Json = json.loads(response.read())
            return answer

    def gateway(self, do: str, *arguments: Any) -> Any:
        assert self._gateway.stdin is not None and self._gateway.stdout is not None
        self._gateway.stdin.write(json.dumps({"do": do, "with": arguments}) + "\n")
        self._gateway.stdin.flush()
        return json.loads(self._gateway.stdout.readline())

    def fill(self, num: int) -> None:
        self.ask("POST", f"/fill?num={num}")
        self.gateway("until", key(num - 1), tenant(num - 1), 8)

    def until_quiet(self) -> None:
        """Until no status was written for a while."""
        end_s, seen, since_s = time.monotonic() + READY_S, -1, 0.0
        while seen < 0 or time.monotonic() - since_s < QUIET_S:
            num_writes = self.ask("GET", "/writes")["num_writes"]
            if num_writes != seen:
                seen, since_s = num_writes, time.monotonic()
            if time.monotonic() > end_s:
                raise TimeoutError("statuses are still being written")
            time.sleep(1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tenants", type=int, default=NUM_TENANTS)
    num = parser.parse_args().tenants
    try:
        with world() as made:
            figures = measure(made, num)
    except NoRedis as error:
        print(f"bench-tenants: {error}", file=sys.stderr)
        return 2
    figures |= {"gateway_series": gateway_series(num), "engine_series": engine_series(num)}
    print(*(f"{name} {figure}" for name, figure in figures.items()), sep="\n")
    claims = {
        "tenants_redis_bytes_each": figures["redis_bytes_each"],
        "tenants_operator_bytes_each": figures["operator_bytes_each"],
        "tenants_gateway_bytes_each": figures["gateway_bytes_each"],
        "tenants_hot_change_s": figures["hot_change_max_s"],
        "tenants_metric_series": figures["gateway_series"] + figures["engine_series"],
    }
    publish("tenants", claims, figures)
    told = {**figures, **claims}
    return 0 if all(told[name] <= wanted for name, wanted in WANTED.items()) else 1


@contextmanager
def world() -> Iterator[World]:
    with ExitStack() as stack:
        redis_port = stack.enter_context(running_redis())
        port = free_port()

        def start(*arguments: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", *arguments]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        start("chairlift_bench.tenants_api", str(port))
        if not listens_within(port, 20.0):
            raise RuntimeError("the API server does not listen")
        where = (f"http://127.0.0.1:{port}", f"redis://127.0.0.1:{redis_port}/0")
        operator = start("chairlift_bench.tenants_worker", "operator", *where)
        gateway = start("chairlift_bench.tenants_worker", "gateway", *where)
        yield World(port, redis_port, operator.pid, gateway)


def measure(world: World, num: int) -> dict[str, float]:
    world.fill(NUM_FIRST)
    before = rss_mib(world.operator_pid), rss_mib(world.gateway_pid)
    began_s = time.monotonic()
    world.fill(num)
    filled_s = time.monotonic() - began_s
    time.sleep(2 * ROUND_S * num / MEASURED_A_TURN)  # until everybody was measured twice
    world.until_quiet()
    cores, num_writes = at_rest(world)
    world.gateway("play", num)
    time.sleep(SETTLE_S)
    num_more = num - NUM_FIRST
    after = rss_mib(world.operator_pid), rss_mib(world.gateway_pid)
    changes_s = [hot_change(world, number, num) for number in range(NUM_CHANGES)]
    return {
        "num_tenants": num,
        "fill_s": round(filled_s, 1),
        **redis_bytes(world.redis_port, num),
        "operator_bytes_each": round((after[0] - before[0]) * MIB / num_more),
        "gateway_bytes_each": round((after[1] - before[1]) * MIB / num_more),
        "operator_mib": round(after[0], 1),
        "gateway_mib": round(after[1], 1),
        "operator_cores_at_rest": round(cores, 4),
        "statuses_written_at_rest": num_writes,
        "hot_change_median_s": round(statistics.median(changes_s), 2),
        "hot_change_max_s": round(max(changes_s), 2),
    }


def at_rest(world: World) -> tuple[float, int]:
    """The operator's cores, and how many statuses it wrote."""
    began_s, began_cpu_s = time.monotonic(), cpu_s(world.operator_pid)
    num_writes = world.ask("GET", "/writes")["num_writes"]
    time.sleep(WATCHED_S)
    cores = (cpu_s(world.operator_pid) - began_cpu_s) / (time.monotonic() - began_s)
    return cores, world.ask("GET", "/writes")["num_writes"] - num_writes


def hot_change(world: World, number: int, num: int) -> float:
    """Seconds from a changed quota, with a new Secret, until a gateway goes by both."""
    which = (number * 7919) % num
    name, fresh, concurrency = tenant(which), f"ck-fresh-{number:030}", 20 + number
    keys = f"{name}-keys-{number}"
    world.ask("PATCH", f"{SECRETS}/{keys}", secret(keys, fresh))
    began_s = time.time()
    spec = quota_spec(which, concurrency, f"{name}-keys", keys)
    world.ask("PATCH", f"{QUOTAS}/{name}", {"metadata": {"name": name}, "spec": spec})
    return float(world.gateway("until", fresh, name, concurrency)) - began_s


def redis_bytes(port: int, num: int) -> dict[str, float]:
    """Of limits, and of the account of a tenant that was served in one class."""
    keys = QuotaKeys(f"{NAMESPACE}/{POOL}")
    with redis.Redis(port=port) as client:
        limits = int(client.memory_usage(keys.limits, samples=0) or 0) / num
        found = client.scan_iter(match=keys.account("*/interactive"), count=1000)
        accounts = [int(client.memory_usage(name, samples=0) or 0) for name in found]
    account = statistics.mean(accounts)
    return {
        "redis_bytes_each": round(limits + account),
        "redis_limits_bytes_each": round(limits),
        "redis_account_bytes_each": round(account),
        "redis_accounts": len(accounts),
    }


def gateway_series(num: int) -> int:
    """Series by tenant of a gateway that counted tokens and each refusal of everybody."""
    metrics = GatewayMetrics()
    for number in range(num):
        for request_class in RequestClass:
            metrics.count_tenant_tokens(tenant(number), request_class, 1)
            for why in REFUSED:
                metrics.count_tenant_refused(tenant(number), request_class, why)
    lines = metrics.exposition().decode().splitlines()
    return sum("{" in line and "tenant=" in line and "_created" not in line for line in lines)


def engine_series(num: int) -> int:
    """Series by tenant of an engine that everybody has a request at."""
    metrics = TenantMetrics()
    running = {tenant(number): TenantGauge(1, 0) for number in range(num)}
    metrics.observe_gauges(Gauges({}, {}, {}, 0, 0, tenants=running))
    return sum(len(family.samples) for family in metrics.collect())


if __name__ == "__main__":
    sys.exit(main())
