"""Tenants' quotas on a real Redis over loopback: `make bench-quota`.

First what it costs, one client process and one Redis alone: the time of a reservation at a steady
load, and reservations and settlements a second at full load. Then whether it stays true: gateways
play requests of known use, are killed at random and replaced, send commands twice, and the clock
that leases are measured by is set back and forth. Once leases have ended, every tenant's account is
compared with the gateways' journals. Engines that die are played too: their requests end early.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import redis

from chairlift_bench.claims import publish
from chairlift_bench.quota_truth import Redis, Told, Verdict, judge, read_journal
from chairlift_bench.quota_worker import CHAT, CLOCK, CLOCKED_SCRIPT, NUM_TENANTS, POOL
from chairlift_bench.redis_process import NoRedis, running_redis
from chairlift_gateway.quota.connection import RedisAddress
from chairlift_gateway.quota.keeper import Keeper, OnRedisFailure
from chairlift_gateway.quota.leases import LEASE_MS
from chairlift_gateway.quota.script import script_keys
from chairlift_gateway.quota.store import RedisFailure
from chairlift_gateway.quota.upkeep import open_keeper
from chairlift_protocol.quota import Limits, QuotaKeys, default_holder, holder_of

STEADY_PER_S: Final = 500
STEADY_S: Final = 10.0
FULL_S: Final = 5.0
FULL_AT_ONCE: Final = 128
NUM_GATEWAYS: Final = 3
REQUESTS_A_LIFE: Final = 5_000
# At each turn, one of them.
KILL_CHANCE: Final = 0.05
# Below what late settlements are remembered for; further would be another experiment.
CLOCK_STEPS_S: Final = (-60, 60)
KEYS: Final = QuotaKeys(POOL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=200_000)
    args = parser.parse_args()
    try:
        with running_redis() as port:
            write_limits(port, Limits())
            cost = asyncio.run(measure_cost(port))
        with running_redis() as port, tempfile.TemporaryDirectory() as folder:
            write_limits(port, Limits(tokens_per_minute=10_000_000, concurrency=60))
            verdict = measure_truth(port, Path(folder), args.requests)
    except NoRedis as error:
        print(f"bench-quota: {error}", file=sys.stderr)
        return 2
    claims = {
        "quota_reserve_p99_ms": cost["reserve_p99_ms"],
        "quota_ops_per_s": cost["ops_per_s"],
        "quota_drift_tokens": verdict.drift_tokens,
        "quota_unbounded_killed": verdict.num_unbounded_killed,
        "quota_leases_left": verdict.num_leases,
    }
    figures = {**cost, **dataclasses.asdict(verdict)}
    print(*(f"{name} {figure}" for name, figure in figures.items()), sep="\n")
    publish("quota", claims, figures)
    is_true = not (verdict.drift_tokens or verdict.num_unbounded_killed or verdict.num_leases)
    has_played = verdict.num_granted > verdict.num_local
    return 0 if is_true and has_played and cost["reserve_p99_ms"] <= 1 else 1


def write_limits(port: int, limits: Limits) -> None:
    with redis.Redis(port=port) as client:
        client.hset(KEYS.limits, default_holder(CHAT), limits.to_json())


async def measure_cost(port: int) -> dict[str, float]:
    address = RedisAddress(f"redis://127.0.0.1:{port}/0")
    async with open_keeper(address, POOL, OnRedisFailure.LOCAL) as keeper:
        await _steadily(keeper, 1.0)
        times_ms = await _steadily(keeper, STEADY_S)
        cuts = statistics.quantiles(times_ms, n=100)
        num_ops = await _fully(keeper, FULL_S)
        return {
            "reserve_p50_ms": round(cuts[49], 3),
            "reserve_p99_ms": round(cuts[98], 3),
            "steady_requests_per_s": STEADY_PER_S,
            "ops_per_s": round(num_ops / FULL_S),
            "without_redis": keeper.num_without_redis,
        }


async def _steadily(keeper: Keeper, duration_s: float) -> list[float]:
    """Milliseconds of each reservation of a load that arrives whatever the last one took."""
    times_ms: list[float] = []

    async def one(name: str) -> None:
        began_s = time.perf_counter()
        grant = await keeper.reserve(f"t{len(times_ms) % NUM_TENANTS}", CHAT, name, 100)
        times_ms.append((time.perf_counter() - began_s) * 1000)
        await asyncio.sleep(0.05)
        keeper.settle(grant.lease, 90)

    begin_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(int(duration_s * STEADY_PER_S)):
            await asyncio.sleep(begin_s + number / STEADY_PER_S - time.perf_counter())
            tasks.create_task(one(f"s{begin_s}-{number}"))
    return times_ms


async def _fully(keeper: Keeper, duration_s: float) -> int:
    """Reservations and settlements that were answered, by the store alone."""
    end_s = time.perf_counter() + duration_s
    num_ops = 0

    async def client(name: str) -> None:
        nonlocal num_ops
        holder = holder_of(f"t{hash(name) % NUM_TENANTS}", CHAT)
        ask = functools.partial(keeper.store.submit, holder, default_holder(CHAT))
        number = 0
        while time.perf_counter() < end_s:
            number += 1
            with contextlib.suppress(RedisFailure):
                await ask("reserve", f"{name}-{number}", 100, LEASE_MS).future
                num_ops += 1
                await ask("settle", f"{name}-{number}", 90, 0).future
                num_ops += 1

    await asyncio.gather(*(client(f"f{n}") for n in range(FULL_AT_ONCE)))
    return num_ops


def measure_truth(port: int, folder: Path, num_requests: int) -> Verdict:
    with redis.Redis(port=port) as client:
        told = _played(client, port, folder, num_requests)
        return judge(told, _settled_state(client))


def _played(client: redis.Redis, port: int, folder: Path, num_requests: int) -> dict[str, Told]:
    """Gateways live and die until they have told of so many requests: what they told."""
    chance = random.Random(7)
    told: dict[str, Told] = {}
    running: dict[Path, subprocess.Popen[bytes]] = {}
    num_begun = 0
    while len(told) < num_requests or running:
        while len(told) < num_requests and len(running) < NUM_GATEWAYS:
            path = folder / f"g{num_begun}"
            running[path] = _start(port, path)
            num_begun += 1
        time.sleep(chance.uniform(0.1, 1.0))
        client.set(CLOCK, chance.randint(*CLOCK_STEPS_S))
        if running and chance.random() < KILL_CHANCE:
            running[chance.choice(list(running))].kill()
        for path, process in list(running.items()):
            if process.poll() is not None:
                del running[path]
                if path.exists():
                    with path.open() as lines:
                        told |= read_journal(lines, is_killed=process.returncode != 0)
    client.set(CLOCK, 0)
    return told


def _start(port: int, path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "chairlift_bench.quota_worker"]
    return subprocess.Popen([*command, str(port), str(path), path.name, str(REQUESTS_A_LIFE)])


def _settled_state(client: redis.Redis) -> Redis:
    """Once every lease has ended: the clock is set past them."""
    client.set(CLOCK, CLOCK_STEPS_S[1] + LEASE_MS // 1000 + 1)
    run = client.register_script(CLOCKED_SCRIPT)
    used: dict[str, int] = {}
    expired: dict[str, int] = {}
    num_leases = 0
    for number in range(NUM_TENANTS):
        holder = holder_of(f"t{number}", CHAT)
        fallback = default_holder(CHAT)
        run(keys=script_keys(KEYS, holder, fallback), args=["sweep", holder, fallback])
        account: Any = client.hgetall(KEYS.account(holder))
        used[holder] = int(account.get(b"used", 0))
        num_leases += client.zcard(KEYS.leases(holder))
        for name, value in account.items():
            if name.startswith(b"r:") and value.startswith(b"x"):
                expired[name[2:].decode()] = int(value[1:].partition(b":")[0])
    return Redis(used, expired, num_leases)


if __name__ == "__main__":
    sys.exit(main())
