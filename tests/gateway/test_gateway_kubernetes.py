"""The gateway's watch on EndpointSlices, against an API server that a test scripts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from chairlift_gateway.app import open_gateway
from chairlift_gateway.choice import Replica
from chairlift_gateway.config import GatewayConfig
from chairlift_gateway.identity import Identification
from chairlift_gateway.kubernetes_endpoints import KubernetesEndpoints, replicas_of
from chairlift_gateway.kubernetes_tenants import KubernetesTenants
from chairlift_gateway.kubernetes_watch import ApiAccess, NotInCluster
from chairlift_gateway.openai_errors import Refusal
from chairlift_protocol.wire import RequestClass

Json = dict[str, Any]
INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH


def _slice(
    name: str, *pods: str, of: str = "interactive", ready: bool | None = True, v6: bool = False
) -> Json:
    return {
        "metadata": {
            "name": name,
            "resourceVersion": "7",
            "labels": {"chairlift.dev/pool": "chat", "chairlift.dev/class": of},
        },
        "addressType": "IPv6" if v6 else "IPv4",
        "ports": [{"name": "http", "port": 8000}],
        "endpoints": [
            {
                "addresses": [f"fd00::{number}" if v6 else f"198.18.0.{number}"],
                "conditions": {"ready": ready},
                "targetRef": {"kind": "Pod", "name": pod},
            }
            for number, pod in enumerate(pods, start=1)
        ],
    }


def test_slices_become_replicas_of_their_class() -> None:
    known = replicas_of([_slice("a", "one", "two"), _slice("b", "three", of="batch")])
    assert known == (
        Replica("one", "http://198.18.0.1:8000", INTERACTIVE),
        Replica("three", "http://198.18.0.1:8000", BATCH),
        Replica("two", "http://198.18.0.2:8000", INTERACTIVE),
    )


@pytest.mark.parametrize(
    ("ready", "listed"), [(True, ["one"]), (None, ["one"]), (False, [])], ids=str
)
def test_only_those_that_may_get_work_are_listed(ready: bool | None, listed: list[str]) -> None:
    assert [r.name for r in replicas_of([_slice("a", "one", ready=ready)])] == listed


def test_a_pod_of_two_address_families_is_one_replica() -> None:
    both = [_slice("a6", "one", v6=True), _slice("a4", "one")]
    assert replicas_of(both) == (Replica("one", "http://198.18.0.1:8000", INTERACTIVE),)
    assert replicas_of(both[:1]) == (Replica("one", "http://[fd00::1]:8000", INTERACTIVE),)


def test_slices_of_other_services_are_left_out() -> None:
    strange = _slice("a", "one")
    strange["metadata"]["labels"]["chairlift.dev/class"] = "other"
    assert replicas_of([strange, {**_slice("b", "two"), "ports": []}]) == ()


def test_outside_of_a_pod_it_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NotInCluster, match="KUBERNETES_SERVICE_HOST"):
        ApiAccess.in_cluster(tmp_path, {})


class FakeApi:
    """Answers lists from `slices`; watchers get what is put into their queue, None ends them."""

    def __init__(self) -> None:
        self.slices: list[Json] = []
        self.events: asyncio.Queue[Json | None] = asyncio.Queue()
        self.num_lists = 0
        self.is_down = False
        self.refused = asyncio.Event()
        self.seen_tokens: set[str | None] = set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen_tokens.add(request.headers.get("Authorization"))
        if self.is_down:
            self.refused.set()
            return web.json_response({"message": "starting"}, status=503)
        if "watch" not in request.query:
            self.num_lists += 1
            return web.json_response({"metadata": {"resourceVersion": "5"}, "items": self.slices})
        response = web.StreamResponse()
        await response.prepare(request)
        while (event := await self.events.get()) is not None:
            line = json.dumps(event).encode() + b"\n"
            for part in (line[:10], line[10:]):  # as a network cuts it
                await response.write(part)
        return response


@asynccontextmanager
async def _served(api: FakeApi, path: str) -> AsyncIterator[ApiAccess]:
    app = web.Application()
    app.router.add_get(path, api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        yield ApiAccess(f"http://{host}:{port}", ssl.create_default_context(), lambda: "t0ken")
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _watched(
    api: FakeApi,
) -> AsyncIterator[tuple[KubernetesEndpoints, Callable[..., Awaitable[None]]]]:
    """The source while it watches, and a wait until it has published those names."""
    path = "/apis/discovery.k8s.io/v1/namespaces/team/endpointslices"
    async with _served(api, path) as access:
        source, published = KubernetesEndpoints(access, "team/chat"), asyncio.Queue[list[str]]()
        watching = asyncio.create_task(
            source.watch(lambda replicas: published.put_nowait([r.name for r in replicas]))
        )

        async def until(*names: str) -> None:
            async with asyncio.timeout(10):
                while await published.get() != list(names):
                    pass

        try:
            yield source, until
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


def test_changes_are_published_as_they_come() -> None:
    async def main() -> None:
        api = FakeApi()
        api.slices = [_slice("a", "one")]
        async with _watched(api) as (source, until):
            await until("one")
            api.events.put_nowait({"type": "MODIFIED", "object": _slice("a", "one", "two")})
            await until("one", "two")
            bookmark = {"metadata": {"resourceVersion": "9"}}
            api.events.put_nowait({"type": "BOOKMARK", "object": bookmark})
            api.events.put_nowait({"type": "DELETED", "object": _slice("a")})
            await until()
            assert source.latest() == () and api.num_lists == 1
            assert api.seen_tokens == {"Bearer t0ken"}

    asyncio.run(main())


def test_a_watch_that_ends_goes_on_and_one_too_old_lists_anew() -> None:
    async def main() -> None:
        api = FakeApi()
        api.slices = [_slice("a", "one")]
        async with _watched(api) as (_, until):
            await until("one")
            api.events.put_nowait(None)
            api.events.put_nowait({"type": "ADDED", "object": _slice("b", "two")})
            await until("one", "two")
            assert api.num_lists == 1
            api.slices = [_slice("c", "three")]
            gone = {"code": 410, "message": "too old"}
            api.events.put_nowait({"type": "ERROR", "object": gone})
            await until("three")

    asyncio.run(main())


def test_an_api_server_that_is_away_takes_no_replica_out() -> None:
    async def main() -> None:
        api = FakeApi()
        api.slices = [_slice("a", "one")]
        async with _watched(api) as (source, until):
            await until("one")
            api.is_down = True
            api.events.put_nowait(None)
            await asyncio.wait_for(api.refused.wait(), 10)
            assert [r.name for r in source.latest()] == ["one"]
            api.slices, api.is_down = [_slice("a", "two")], False
            await until("two")
            assert [r.name for r in source.latest()] == ["two"]

    asyncio.run(main())


def _map(*tenants: str, text: str | None = None) -> Json:
    """Each tenant's key is its name."""
    listed = [
        {"tenant": name, "keys": [{"sha256": hashlib.sha256(name.encode()).hexdigest()}]}
        for name in tenants
    ]
    data = {"tenants.json": text or json.dumps({"tenants": listed})}
    return {"metadata": {"name": "chat-tenants", "resourceVersion": "7"}, "data": data}


def _answer(who: Identification, key: str) -> str | int:
    """The tenant, or the status of the refusal."""
    try:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        return who.caller(headers, is_batch_path=False).tenant
    except Refusal as refusal:
        return refusal.status


def test_a_key_that_the_operator_writes_or_takes_counts_at_once() -> None:
    async def main() -> None:
        api = FakeApi()
        async with _served(api, "/api/v1/namespaces/team/configmaps") as access:
            tenants = KubernetesTenants(access, "team", "chat-tenants")
            who = Identification(tenants, serves_anonymous=False)
            watching = asyncio.create_task(tenants.watch())

            async def until(key: str, answer: str | int) -> None:
                async with asyncio.timeout(10):
                    while _answer(who, key) != answer:
                        await asyncio.sleep(0.01)

            try:
                while not api.num_lists:
                    await asyncio.sleep(0.01)
                assert _answer(who, "acme") == 503  # not 401: nobody has said who there is
                api.events.put_nowait({"type": "ADDED", "object": _map("acme")})
                await until("acme", "acme")
                api.events.put_nowait({"type": "MODIFIED", "object": _map("beta")})
                await until("acme", 401)
                assert _answer(who, "beta") == "beta"
                # What cannot be read, and what is gone, takes no key from anybody.
                api.events.put_nowait({"type": "MODIFIED", "object": _map(text="broken")})
                api.events.put_nowait({"type": "DELETED", "object": _map()})
                api.events.put_nowait({"type": "ADDED", "object": _map("beta", "gamma")})
                seen = set()
                async with asyncio.timeout(10):
                    while _answer(who, "gamma") != "gamma":
                        seen.add(_answer(who, "beta"))
                        await asyncio.sleep(0)
                assert seen <= {"beta"}
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(main())


class NoReplicas:
    def latest(self) -> tuple[Replica, ...]:
        return ()

    async def watch(self, publish: Callable[[tuple[Replica, ...]], None]) -> None:
        await asyncio.Event().wait()


def test_a_gateway_watches_its_tenants_for_as_long_as_it_runs(tmp_path: Path) -> None:
    async def main() -> None:
        api = FakeApi()
        api.slices = [_map("acme")]
        config = GatewayConfig(None, "token", "team/chat", kubernetes_tenants="chat-tenants")
        async with _served(api, "/api/v1/namespaces/team/configmaps") as access:
            tenants = KubernetesTenants(access, "team", "chat-tenants")
            async with asyncio.timeout(10), open_gateway(config, NoReplicas(), tenants):
                while tenants.keys is None:
                    await asyncio.sleep(0.01)
            assert tenants.keys.find(b"acme") is not None

    asyncio.run(main())
