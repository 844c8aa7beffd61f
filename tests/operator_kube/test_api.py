"""The API client and its reflector against a server that a test scripts."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from chairlift_operator.kube.access import Access
from chairlift_operator.kube.api import Api, ApiError, NotLeader
from chairlift_operator.kube.paths import POD
from chairlift_operator.kube.watching import PoolKey, Reflector, Store

Json = dict[str, Any]


def _pod(name: str, version: int) -> Json:
    labels = {"chairlift.dev/pool": "chat"}
    metadata = {"name": name, "namespace": "team", "labels": labels, "uid": name}
    return {"kind": "Pod", "metadata": {**metadata, "resourceVersion": str(version)}}


class Server:
    """Lists two at a time; watchers get what is put into `events`, None ends them."""

    def __init__(self) -> None:
        self.pods = [_pod("a", 1), _pod("b", 2), _pod("c", 3)]
        self.events: asyncio.Queue[Json | None] = asyncio.Queue()
        self.calls: list[str] = []
        self.token = "first"
        self.access = Access("", ssl.create_default_context(), "first")

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(f"{request.method} {request.path}")
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"message": "who are you?"}, status=401)
        if request.method != "GET":
            return web.json_response({"message": "it was changed meanwhile"}, status=409)
        if "watch" in request.query:
            return await self._watch(request)
        begin = int(request.query.get("continue", 0))
        more = {"continue": str(begin + 2)} if begin + 2 < len(self.pods) else {}
        items = [{k: v for k, v in p.items() if k != "kind"} for p in self.pods[begin : begin + 2]]
        return web.json_response({"metadata": {"resourceVersion": "9", **more}, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while (event := await self.events.get()) is not None:
            line = json.dumps(event).encode() + b"\n"
            await response.write(line[:7])
            await response.write(line[7:])
        return response

    def renew(self) -> Access:
        return replace(self.access, token=self.token)


@asynccontextmanager
async def _served() -> AsyncIterator[tuple[Server, Api]]:
    server, app = Server(), web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    server.access = replace(server.access, server=f"http://{host}:{port}")
    async with aiohttp.ClientSession() as session:
        yield server, Api(session, server.renew)
    await runner.cleanup()


def test_long_lists_are_read_to_their_end() -> None:
    async def main() -> None:
        async with _served() as (_, api):
            listed = await api.list(POD.path("team"))
            assert [p["metadata"]["name"] for p in listed.items] == ["a", "b", "c"]
            assert listed.resource_version == "9"

    asyncio.run(main())


def test_a_token_that_was_renewed_is_read_again() -> None:
    async def main() -> None:
        async with _served() as (server, api):
            server.token = "second"
            assert (await api.list(POD.path())).resource_version == "9"

    asyncio.run(main())


def test_a_refusal_says_what_was_asked_and_why() -> None:
    async def main() -> None:
        async with _served() as (_, api):
            with pytest.raises(ApiError, match="PATCH /api/v1/pods/a: it was changed") as caught:
                await api.patch(POD.path(None, "a"), {}, "us")
            assert caught.value.is_conflict and not caught.value.is_missing

    asyncio.run(main())


def test_who_does_not_lead_reads_and_writes_nothing() -> None:
    async def main() -> None:
        async with _served() as (server, api):
            guarded = api.guarded_by(lambda: False)
            await guarded.list(POD.path())
            before = len(server.calls)
            for write in (
                guarded.create("/a", {}, "us"),
                guarded.apply("/a", {}, "us"),
                guarded.patch("/a", {}, "us"),
                guarded.replace("/a", {}, "us"),
                guarded.delete("/a"),
            ):
                with pytest.raises(NotLeader):
                    await write
            assert len(server.calls) == before

    asyncio.run(main())


def test_a_server_that_is_away_is_an_error_in_words() -> None:
    async def main() -> None:
        async with _served() as (server, api):
            server.access = replace(server.access, server="http://127.0.0.1:1")
            away = Api(api._session, server.renew)
            with pytest.raises(ApiError, match="the API server cannot be reached"):
                await away.get("/version")

    asyncio.run(main())


def test_a_reflector_follows_and_lists_anew_when_it_is_too_late() -> None:
    async def main() -> None:
        async with _served() as (server, api):
            changed = asyncio.Event()
            store = Store(lambda key: changed.set())
            reflector = Reflector(api, POD, store)
            following = asyncio.create_task(reflector.run())

            async def until(*names: str) -> None:
                async with asyncio.timeout(10):
                    while sorted(store.of(("team", "chat"))) != list(names):
                        changed.clear()
                        await changed.wait()

            await reflector.is_synced.wait()
            await until("a", "b", "c")
            server.events.put_nowait({"type": "DELETED", "object": _pod("a", 10)})
            server.events.put_nowait({"type": "ADDED", "object": _pod("d", 11)})
            await until("b", "c", "d")
            server.events.put_nowait(None)  # goes on from where it was
            server.events.put_nowait({"type": "ADDED", "object": _pod("e", 12)})
            await until("b", "c", "d", "e")
            server.pods = [_pod("f", 20)]
            gone = {"code": 410, "message": "too old", "metadata": {"resourceVersion": "0"}}
            server.events.put_nowait({"type": "ERROR", "object": gone})
            await until("f")
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    asyncio.run(main())


def test_an_object_that_is_given_another_pools_label_leaves_the_first() -> None:
    told: list[PoolKey] = []
    store = Store(told.append)
    store.put(_pod("a", 1))
    moved = _pod("a", 2)
    moved["metadata"]["labels"] = {"chairlift.dev/pool": "debug"}
    store.put(moved)
    assert list(store.of(("team", "debug"))) == ["a"] and not store.of(("team", "chat"))
    assert told[1:] == [("team", "chat"), ("team", "debug")]
    store.drop(_pod("a", 3))
    assert not store.of(("team", "debug"))


@pytest.mark.parametrize(("status", "is_refusal"), [(400, True), (403, True), (422, True),
    (500, True), (409, False), (429, False), (503, False), (0, False)])  # fmt: skip
def test_an_apply_of_fields_that_a_kind_does_not_have_is_a_refusal_too(
    status: int, is_refusal: bool
) -> None:
    assert ApiError(status, "").is_refusal is is_refusal
