"""Several simulated engines behind one address: more, fewer, one that dies, two classes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

# A replica carries about eight of these requests a second, so that a few processes are a fleet.
POOL = """
apiVersion: chairlift.dev/v1alpha1
kind: InferencePool
metadata: {{name: chat}}
spec:
  model: {{name: tiny, source: "cache://tiny", maxLength: 2048}}
  runtime:
    engine: simulator
    simulator: {{profile: {{a: 20ms, b: 0.5ms, c: 1ms, d: 0ms}}}}
  capacity: {{replicas: 3}}
  interactive:
    slo:
      timeToFirstToken: {{threshold: 1s}}
      interTokenLatency: {{threshold: 60ms}}
    replicas: {{min: {least}, max: 3}}
    batchSize: {{min: 1, max: 32}}
    stepTokens: {{min: 32, max: 512}}
{more}"""


@dataclass
class Traffic:
    """Streams of one class at a steady rate, each with what became of it."""

    url: str
    rate_per_s: float
    headers: dict[str, str] = field(default_factory=dict)
    max_tokens: int = 16
    num_good: int = 0
    failures: list[str] = field(default_factory=list)

    async def run(self, stop: asyncio.Event) -> None:
        timeout = aiohttp.ClientTimeout(total=60)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=self.headers) as session,
            asyncio.TaskGroup() as tasks,
        ):
            while not stop.is_set():
                tasks.create_task(self._one(session))
                await asyncio.sleep(1 / self.rate_per_s)

    async def _one(self, session: aiohttp.ClientSession) -> None:
        body = {
            "model": "tiny", "prompt": "x" * 60, "max_tokens": self.max_tokens,
            "stream": True, "ignore_eos": True,
        }  # fmt: skip
        try:
            async with session.post(f"{self.url}/completions", json=body) as response:
                text = (await response.read()).decode()
                ended = text.rstrip().endswith("data: [DONE]") and '"error"' not in text
                if response.status == 200 and ended:
                    self.num_good += 1
                else:
                    self.failures.append(f"{response.status}: {text[-300:]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            self.failures.append(repr(error))


async def _until(condition: Callable[[], bool], patience_s: float, what: str) -> None:
    try:
        async with asyncio.timeout(patience_s):
            while not condition():
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"not within {patience_s:g} s: {what}") from None


def _with_traffic(traffic: Traffic, meanwhile: Callable[[], Any]) -> None:
    async def main() -> None:
        stop = asyncio.Event()
        running = asyncio.ensure_future(traffic.run(stop))
        try:
            await meanwhile()
        finally:
            stop.set()
            await running

    asyncio.run(main())


def _replicas_said(local: Any) -> list[str]:
    return [line for line in local.lines if ": replicas " in line]


@pytest.mark.timeout(240)
def test_one_grows_to_three_and_back_to_one_without_a_failed_request(
    start_local: Callable[..., Any],
) -> None:
    local = start_local(POOL.format(least=1, more="  autoscaling: {scaleDownWindow: 15s}\n"))
    busy = Traffic(local.url, rate_per_s=16.5)
    calm = Traffic(local.url, rate_per_s=1.5)

    async def until_three() -> None:
        await _until(lambda: len(local.engines()) == 3, 90, "three engines")

    async def until_one() -> None:
        await _until(lambda: len(local.engines()) == 1, 110, "one engine")

    _with_traffic(busy, until_three)
    _with_traffic(calm, until_one)
    assert not busy.failures and not calm.failures
    assert busy.num_good > 50 and calm.num_good > 10
    said = _replicas_said(local)
    assert any("requests/s arrive" in line for line in said)
    assert sum(line.startswith("interactive: replicas") for line in said) >= 3
    local.process.send_signal(signal.SIGINT)
    assert local.end() == 130
    assert local.children() == {}


def test_one_of_two_dies_under_load_and_only_its_own_requests_with_it(
    start_local: Callable[..., Any],
) -> None:
    local = start_local(POOL.format(least=2, more="  autoscaling: {mode: 'Off'}\n"))
    traffic = Traffic(local.url, rate_per_s=6, max_tokens=24)

    async def kill_one() -> None:
        await _until(lambda: "interactive-1 is ready" in local.lines, 30, "two engines")
        await _until(lambda: traffic.num_good > 10, 30, "traffic")
        os.kill(local.engines()["interactive-1"], signal.SIGKILL)
        good = traffic.num_good
        await _until(lambda: "interactive-1 is serving again" in local.lines, 30, "replaced")
        assert traffic.num_good > good + 3  # the other one went on meanwhile
        await _until(lambda: len(local.engines()) == 2, 10, "two again")

    _with_traffic(traffic, kill_one)
    # Its share of what ran for the length of one answer; nothing that came later.
    assert len(traffic.failures) <= 8, traffic.failures
    assert traffic.num_good > 20
    assert any("interactive-1 was ended by SIGKILL" in line for line in local.lines)


def test_ctrl_c_lets_the_streams_of_every_replica_finish(start_local: Callable[..., Any]) -> None:
    local = start_local(POOL.format(least=2, more="  batch: {replicas: {min: 1, max: 1}}\n"))
    local.wait_for_line("interactive-1 is ready")
    local.wait_for_line("batch-0 is ready")
    streams = [Traffic(local.url, 1, max_tokens=60) for _ in range(4)]
    streams += [Traffic(local.url.replace("/v1", "/batch/v1"), 1, max_tokens=60)]

    async def interrupted() -> None:
        stop = asyncio.Event()
        running = [asyncio.ensure_future(stream.run(stop)) for stream in streams]
        await asyncio.sleep(0.5)  # all are on their way: an answer takes more than a second
        local.process.send_signal(signal.SIGINT)
        stop.set()
        await asyncio.gather(*running)

    asyncio.run(interrupted())
    assert [stream.failures for stream in streams] == [[]] * 5
    assert [stream.num_good for stream in streams] == [1] * 5
    assert local.end() == 130
    assert local.engines() == {}


BORROWED = """  batch:
    borrowing: {maxShare: 50}
"""


def test_batch_work_on_a_borrowed_replica_gives_way(start_local: Callable[..., Any]) -> None:
    local = start_local(POOL.format(least=1, more=BORROWED))
    batch_url = local.url.replace("/v1", "/batch/v1")
    batch = Traffic(batch_url, rate_per_s=20, max_tokens=200)
    interactive = Traffic(local.url, rate_per_s=2)

    async def main() -> None:
        stop = asyncio.Event()
        backlog = asyncio.ensure_future(batch.run(stop))
        await _until(lambda: batch.num_good > 0, 60, "batch work ends")
        serving = asyncio.ensure_future(interactive.run(stop))
        await _until(lambda: interactive.num_good > 12, 60, "interactive work ends")
        backlog.cancel()
        await asyncio.gather(backlog, return_exceptions=True)
        stop.set()
        await serving

    asyncio.run(main())
    assert not interactive.failures and not batch.failures
    records = [json.loads(line) for line in local.journal.read_text().splitlines()]
    policies = [
        replica["policy"]["effective"]
        for record in records
        if record["kind"] == "tick"
        for replica in record["snapshot"]["replicas"]
        if replica["policy"]
    ]
    assert {p["batch_class_share"] for p in policies} <= {0.0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5}
    assert policies[0]["batch_class_share"] == 0.5
