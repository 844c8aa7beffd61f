from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from chairlift_bench.bench_gateway import Turn, added_ms, figures_of
from chairlift_bench.gateway_load import Refused, Target, steadily, together
from chairlift_bench.gateway_setup import Cores, process_cpu_s


@pytest.fixture
def engine() -> Iterator[Target]:
    process = subprocess.Popen(
        [sys.executable, "-m", "chairlift_bench.gateway_engine", "5"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdout is not None
    yield Target("direct", int(process.stdout.readline()))
    process.kill()
    process.communicate()


def test_every_event_of_every_stream_is_counted_and_every_first_one_timed(engine: Target) -> None:
    told = asyncio.run(together(engine, num_streams=4, num_tokens=7))
    assert (told.num_events, len(told.first_s)) == (28, 4)
    told = asyncio.run(steadily(engine, requests_per_s=50, duration_s=0.2, num_tokens=3))
    assert (told.num_events, len(told.first_s)) == (30, 10)
    assert all(seconds > 0 for seconds in told.first_s)


def test_an_answer_that_is_no_stream_is_not_taken_for_a_fast_one() -> None:
    async def refused() -> None:
        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            await together(Target("t", server.sockets[0].getsockname()[1]), 1, 1)

    with pytest.raises(Refused, match="429"):
        asyncio.run(refused())


def test_what_a_way_adds_is_told_by_round_beside_the_direct_one() -> None:
    def turn(name: str, first_ms: float, events_per_cpu_s: float) -> Turn:
        return Turn(name, first_ms, 2 * first_ms, 0.5, events_per_cpu_s)

    rounds = [
        [turn("direct", 1, 0), turn("gateway", 2, 100), turn("nginx", 1.5, 900)],
        [turn("nginx", 2.5, 800), turn("direct", 2, 0), turn("gateway", 5, 200)],
    ]
    assert added_ms(rounds, "gateway", 50) == [1, 3]
    assert added_ms(rounds, "nginx", 95) == [1, 1]
    assert figures_of(rounds)["gateway_chunks_per_cpu_s"] == [100, 200]


def test_processor_time_of_a_process_is_the_kernels_count() -> None:
    end_s = time.process_time() + 0.05
    while time.process_time() < end_s:
        pass
    assert process_cpu_s(os.getpid()) == pytest.approx(time.process_time(), abs=0.1)


def test_cores_are_as_busy_as_the_time_that_was_not_idle() -> None:
    assert Cores(350, 1200).busy_share_since(Cores(300, 1000)) == 0.75
    assert Cores.now().busy_share_since(Cores.now()) <= 1
