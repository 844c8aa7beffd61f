"""What an operator does that finds no API server, no CRD or no rights when it starts."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable
from typing import Any

import pytest
from aiohttp import web

from chairlift_operator.kube import leading, starting
from chairlift_operator.kube.access import Access
from chairlift_operator.kube.api import ApiError, Listed
from chairlift_operator.kube.leading import Operator
from chairlift_operator.kube.settings import Settings
from chairlift_operator.kube.starting import PAUSE_S, CannotOperate, until_served


class ScriptedApi:
    """Answers a list with one error after the other, then with nothing wrong."""

    def __init__(self, *errors: ApiError) -> None:
        self.errors = list(errors)
        self.paths: list[str] = []

    async def list(self, path: str, selector: str = "") -> Listed:
        self.paths.append(path)
        if self.errors:
            raise self.errors.pop(0)
        return Listed([], "1")


def _start(api: Any, namespace: str | None = None) -> list[float]:
    """The pauses between tries, and that each try showed that the operator is alive."""
    pauses: list[float] = []
    tries: list[int] = []

    def pause(pause_s: float) -> Awaitable[None]:
        pauses.append(pause_s)
        return asyncio.sleep(0)

    try:
        asyncio.run(until_served(api, namespace, lambda: tries.append(1), pause))
    finally:
        assert len(tries) == len(api.paths)
    return pauses


@pytest.mark.parametrize("status", [0, 429, 500, 503])
def test_a_server_that_is_away_is_waited_for(status: int, caplog: pytest.LogCaptureFixture) -> None:
    away = [ApiError(status, f"away {number}") for number in range(30)]
    with caplog.at_level(logging.WARNING):
        assert _start(ScriptedApi(*away)) == [PAUSE_S] * 30
    assert "away 29; tried again in 5 s" in caplog.text


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (404, "knows no inferencepools.chairlift.dev: apply crds/"),
        (403, "GET /pools: forbidden: give the operator's service account the rights in docs/rbac"),
        (401, "GET /pools: forbidden"),
    ],
)
def test_what_no_waiting_heals_says_what_to_do(status: int, sentence: str) -> None:
    api = ScriptedApi(ApiError(0, "away"), ApiError(status, "GET /pools: forbidden"))
    with pytest.raises(CannotOperate) as caught:
        _start(api)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("namespace", "path"),
    [
        (None, "/apis/chairlift.dev/v1alpha1/inferencepools"),
        ("team", "/apis/chairlift.dev/v1alpha1/namespaces/team/inferencepools"),
    ],
)
def test_it_asks_where_it_has_the_right_to(namespace: str | None, path: str) -> None:
    api = ScriptedApi()
    assert _start(api, namespace) == []
    assert api.paths == [path]


class BusyServer:
    """Refuses the first list of each kind, and has none of any."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.leases: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/leases") and request.method == "POST":
            self.leases.append(await request.json())
            return web.json_response(self.leases[-1])
        if "/leases/" in request.path:
            return web.json_response({"message": "none"}, status=404)
        if request.path not in self.refused:
            self.refused.add(request.path)
            return web.json_response({"message": "too many requests"}, status=429)
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.Event().wait()
        return response


def test_an_operator_that_comes_before_its_server_leads_once_it_is_there(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "PAUSE_S", 0.0)

    async def main() -> None:
        server, app = BusyServer(), web.Application()
        app.router.add_route("*", "/{path:.*}", server.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        access = Access(f"http://{host}:{port}", ssl.create_default_context(), None)
        monkeypatch.setattr(leading, "read_access", lambda: access)
        operator = Operator(settings, {})
        operator.turned_at_s = -1e9  # as if it hung
        running = asyncio.create_task(operator.run())
        async with asyncio.timeout(20):
            while not (operator.is_synced and operator.lease and operator.lease.is_held()):
                assert not running.done()
                await asyncio.sleep(0.01)
        assert operator.turned_at_s > 0 and len(server.leases) == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await runner.cleanup()

    asyncio.run(main())
