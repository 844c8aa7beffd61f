from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from chairlift_cli.errors import USAGE_EXIT_CODE, CliError
from chairlift_cli.gateway_process import HOST, GatewayProcess
from chairlift_cli.run_dir import open_run_dir


def test_another_program_that_took_the_port_is_not_taken_for_the_gateway(tmp_path: Path) -> None:
    """Not even when it answers as a gateway would, and an older log says that ours once did."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response()

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, HOST, 0)
        await site.start()
        port = runner.addresses[0][1]
        with open_run_dir(tmp_path) as run_dir:
            gateway = GatewayProcess(port, run_dir, [], 0.0)
            run_dir.log_file("gateway").write_text(
                f"chairlift-gateway: listening on {gateway.url}\n"
            )
            try:
                async with aiohttp.ClientSession() as session:
                    await asyncio.wait_for(gateway.start(session), 20)
            finally:
                await gateway.end()
                await runner.cleanup()

    with pytest.raises(CliError, match=re.escape("--port: 127.0.0.1:")) as caught:
        asyncio.run(run())
    assert "is in use; choose another" in str(caught.value)
    assert caught.value.exit_code == USAGE_EXIT_CODE
