from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import aiohttp
import pytest

from chairlift_cli import fleet
from chairlift_cli.fleet import LocalFleet
from chairlift_cli.run_dir import open_run_dir
from chairlift_operator.decisions import SetReplicas
from chairlift_operator.plan import Plan
from chairlift_operator.spec_parsing import parse_pool
from chairlift_protocol.wire import RequestClass

POOL = """
apiVersion: chairlift.dev/v1alpha1
kind: InferencePool
metadata: {name: chat}
spec:
  model: {name: tiny, source: "cache://tiny", maxLength: 512}
  runtime: {engine: simulator, simulator: {profile: fast}}
  interactive: {replicas: {min: 1, max: 2}, batchSize: {max: 8}, stepTokens: {max: 128}}
"""


class Said:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def show(self, plan: Plan) -> None: ...

    def close(self) -> None: ...


def test_a_run_folder_that_is_gone_is_said_once_and_written_again_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "RETRY_S", 0.01)
    view, folder = Said(), tmp_path / "run"

    async def run() -> None:
        with open_run_dir(folder) as run_dir:
            async with aiohttp.ClientSession() as session:
                pool = LocalFleet(parse_pool(POOL), run_dir, session, "http://127.0.0.1:9", view)
                try:
                    await pool.start_first()
                    keeping = asyncio.ensure_future(pool.keep())
                    shutil.rmtree(folder)
                    grow = SetReplicas(RequestClass.INTERACTIVE, 2, (), "more", 1.0)
                    pool.set_replicas(grow)  # it cannot start, and that ends nothing either
                    async with asyncio.timeout(10):
                        while not any("cannot tell" in line for line in view.lines):
                            await asyncio.sleep(0.01)
                        await asyncio.sleep(0.1)
                        assert not keeping.done()
                        folder.mkdir()
                        while not run_dir.endpoints_file.exists():
                            await asyncio.sleep(0.01)
                    keeping.cancel()
                    await asyncio.gather(keeping, return_exceptions=True)
                finally:
                    await pool.end()

    asyncio.run(run())
    assert sum("cannot tell the gateway which engines serve" in line for line in view.lines) == 1
    assert any("cannot write" in line and "interactive-1" in line for line in view.lines)
