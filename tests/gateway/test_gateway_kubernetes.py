"""The gateway's watches on EndpointSlices and on tenants, by an API server that tests script."""

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
from chairlift_gateway.kubernetes_tenants import KeyParts, KubernetesTenants
from chairlift_gateway.kubernetes_watch import ApiAccess, NotInCluster
from chairlift_gateway.openai_errors import Refusal
from chairlift_protocol.quota import NUM_SHARDS, shard_of
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
async def _served(api: FakeApi | MapsApi, path: str) -> AsyncIterator[ApiAccess]:
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


class MapsApi:
    """ConfigMaps, listed and watched by name; `put` and `drop` are told to whoever watches."""

    def __init__(self) -> None:
        self.maps: dict[str, Json] = {}
        self.watchers: dict[str, list[asyncio.Queue[Json]]] = {}
        self.version = 10

    def put(self, name: str, **data: str) -> None:
        self.version += 1
        metadata = {"name": name, "resourceVersion": str(self.version)}
        self.maps[name] = {"metadata": metadata, "data": data}
        self._tell("MODIFIED", name, self.maps[name])

    def drop(self, name: str) -> None:
        self.version += 1
        item = self.maps.pop(name)
        item["metadata"]["resourceVersion"] = str(self.version)
        self._tell("DELETED", name, item)

    def put_part(self, of_key: str, *keys: str, mark: str | None = None) -> None:
        """The part that a key belongs to, with those of these that do."""
        number = shard_of(_sha(of_key))
        own = [key for key in keys if shard_of(_sha(key)) == number]
        text = _map(*own)["data"]["tenants.json"]
        data = {"shard": mark or f"{number}/{NUM_SHARDS}", "tenants.json": text}
        self.put(f"chat-tenants-{number}", **data)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        name = request.query["fieldSelector"].removeprefix("metadata.name=")
        if "watch" not in request.query:
            items = [self.maps[name]] if name in self.maps else []
            version = {"resourceVersion": str(self.version)}
            return web.json_response({"metadata": version, "items": items})
        events: asyncio.Queue[Json] = asyncio.Queue()
        self.watchers.setdefault(name, []).append(events)
        known = self.maps.get(name)
        since = int(request.query["resourceVersion"])
        if known is not None and int(known["metadata"]["resourceVersion"]) > since:
            events.put_nowait({"type": "MODIFIED", "object": known})
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(json.dumps(await events.get()).encode() + b"\n")

    def _tell(self, kind: str, name: str, item: Json) -> None:
        for events in self.watchers.get(name, []):
            events.put_nowait({"type": kind, "object": item})


def _sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Parted:
    """A gateway's look at a pool's keys. `until` waits for what a request with a key is told."""

    def __init__(self, api: MapsApi, tenants: KubernetesTenants) -> None:
        self.api = api
        self.tenants = tenants
        self.who = Identification(tenants, serves_anonymous=False)

    def answer(self, key: str) -> str | int:
        return _answer(self.who, key)

    async def until(self, key: str, answer: str | int) -> None:
        async with asyncio.timeout(10):
            while self.answer(key) != answer:
                await asyncio.sleep(0.01)


@pytest.fixture
def run_parted() -> Callable[[Callable[[Parted], Awaitable[None]]], None]:
    async def main(body: Callable[[Parted], Awaitable[None]]) -> None:
        api = MapsApi()
        async with _served(api, "/api/v1/namespaces/team/configmaps") as access:
            tenants = KubernetesTenants(access, "team", "chat-tenants")
            watching = asyncio.create_task(tenants.watch())
            try:
                await body(Parted(api, tenants))
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    return lambda body: asyncio.run(main(body))


INDEX = {"shards": str(NUM_SHARDS)}
# Keys of two parts, each of the tenant of its name.
ONE, OTHER = "acme", next(k for k in ("b", "c", "d") if shard_of(_sha(k)) != shard_of(_sha("acme")))


def test_a_key_of_a_part_that_was_not_seen_is_not_unknown(run_parted: Any) -> None:
    async def body(parted: Parted) -> None:
        parted.api.put("chat-tenants", **INDEX)
        parted.api.put_part(ONE, ONE)
        await parted.until(ONE, ONE)
        assert parted.answer(OTHER) == 503
        parted.api.put_part(OTHER)
        await parted.until(OTHER, 401)
        parted.api.put_part(OTHER, OTHER)
        await parted.until(OTHER, OTHER)
        parted.api.put_part(ONE)
        await parted.until(ONE, 401)
        assert parted.answer(OTHER) == OTHER

    run_parted(body)


def test_when_keys_are_parted_nobody_is_refused_meanwhile(run_parted: Any) -> None:
    async def body(parted: Parted) -> None:
        parted.api.put("chat-tenants", **_map(ONE, OTHER)["data"])
        await parted.until(ONE, ONE)
        assert parted.answer("stranger") == 401
        parted.api.put("chat-tenants", **INDEX)
        await parted.until("stranger", 503)  # its part may know it
        assert [parted.answer(ONE), parted.answer(OTHER)] == [ONE, OTHER]
        parted.api.put_part(ONE)  # taken from it since
        await parted.until(ONE, 401)
        assert parted.answer(OTHER) == OTHER
        parted.api.put("chat-tenants", **_map(ONE)["data"])  # and back to one
        await parted.until(OTHER, 401)
        assert [parted.answer(ONE), parted.answer("stranger")] == [ONE, 401]

    run_parted(body)


def test_once_every_part_was_seen_nothing_is_kept_of_before(run_parted: Any) -> None:
    async def body(parted: Parted) -> None:
        parted.api.put("chat-tenants", **_map(ONE, OTHER)["data"])
        await parted.until(ONE, ONE)
        empty = _map()["data"]["tenants.json"]
        for n in range(NUM_SHARDS):
            data = {"shard": f"{n}/{NUM_SHARDS}", "tenants.json": empty}
            parted.api.put(f"chat-tenants-{n}", **data)
        parted.api.put("chat-tenants", **INDEX)
        await parted.until(OTHER, 401)
        await parted.until(ONE, 401)
        assert isinstance(parted.tenants.keys, KeyParts)
        async with asyncio.timeout(10):
            while parted.tenants.keys.before.callers:
                await asyncio.sleep(0.01)

    run_parted(body)


def test_a_part_of_another_number_or_gone_or_broken_changes_nothing(
    run_parted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(parted: Parted) -> None:
        parted.api.put("chat-tenants", **INDEX)
        parted.api.put_part(ONE, ONE)
        await parted.until(ONE, ONE)
        number = shard_of(_sha(ONE))
        name, mark = f"chat-tenants-{number}", {"shard": f"{number}/{NUM_SHARDS}"}

        async def told(what: str) -> None:
            async with asyncio.timeout(10):
                while what not in caplog.text:
                    await asyncio.sleep(0.01)
            assert parted.answer(ONE) == ONE

        caplog.clear()
        parted.api.put_part(ONE, mark=f"{number}/{2 * NUM_SHARDS}")
        await told(f"ConfigMap {name}: is not part {number}/{NUM_SHARDS}")
        parted.api.put(name, **mark, **{"tenants.json": "broken"})
        await told(f"ConfigMap {name}: must be JSON")
        parted.api.drop(name)
        await told(f"ConfigMap {name}: is not there")
        parted.api.put("chat-tenants", shards="64")  # of a newer operator
        await told("shards must be 16, not '64'")
        parted.api.drop("chat-tenants")
        await told("ConfigMap chat-tenants: is not there")
        assert parted.answer(OTHER) == 503

    run_parted(body)


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
