"""A team's quotas: TenantQuotas and Secrets in a cluster in a dictionary, and a Redis that keeps
what it is given.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, cast

from chairlift_e2e.fake_kube import FakeKube
from chairlift_operator.kube.key_reading import KeyReader
from chairlift_operator.kube.paths import QUOTA
from chairlift_operator.kube.quota_turn import PoolQuotas, QuotaTools
from chairlift_operator.kube.redis_access import RedisStores
from chairlift_operator.kube.settings import Settings
from chairlift_operator.kube.watching import Store
from chairlift_operator.quotas.key_secrets import KEYS_TYPE
from chairlift_operator.quotas.ledger import Counts
from chairlift_operator.quotas.store import RedisAccess, StoreError
from chairlift_protocol.quota import NUM_SHARDS, SHARDS_KEY, TENANTS_KEY

Json = dict[str, Any]
KEY: Final = ("team", "chat")
MAP: Final = "/api/v1/namespaces/team/configmaps/chat-tenants"
REDIS: Final = {"url": "redis://redis:6379/0"}


class FakeRedis:
    """A store that keeps what it is given. fails: what it says instead. log: of all that is done,
    with what gateways knew at that moment."""

    def __init__(self, kube: FakeKube, access: RedisAccess) -> None:
        self.kube, self.access = kube, access
        self.limits: dict[str, str] = {}
        self.counts: dict[str, Counts] = {}
        self.rates: dict[str, int] = {}
        self.is_idle = False
        self.is_forgotten = False
        self.fails: str | None = None
        self.on_sync: Callable[[], None] = lambda: None
        self.log: list[tuple[set[str], set[str]]] = []
        self.asked: list[str] = []  # whose counts, by the last sync

    async def sync(
        self, pool: str, limits: Mapping[str, str], holders: Sequence[str], *, is_idle: bool,
        rates: Mapping[str, int],
    ) -> Mapping[str, Counts]:  # fmt: skip
        assert pool == "team/chat"
        self.on_sync()
        if self.fails is not None:
            raise StoreError(self.fails)
        self.log.append((set(limits), tenants_of(self.kube)))
        self.asked = list(holders)
        self.limits, self.is_idle, self.rates = dict(limits), is_idle, dict(rates)
        return {holder: self.counts.get(holder, Counts(0, 0, 0)) for holder in holders}

    async def forget(self, pool: str) -> None:
        if self.fails is not None:
            raise StoreError(self.fails)
        self.limits, self.is_forgotten = {}, True

    async def close(self) -> None:
        pass


def tenants_of(kube: FakeKube) -> set[str]:
    """Whose keys gateways know; nobody's of a document that somebody broke."""
    data = kube.objects.get(MAP, {}).get("data", {})
    paths = [f"{MAP}-{n}" for n in range(NUM_SHARDS)] if SHARDS_KEY in data else [MAP]
    known: set[str] = set()
    for path in paths:
        text = kube.objects.get(path, {}).get("data", {}).get(TENANTS_KEY, "")
        with suppress(ValueError):
            known |= {each["tenant"] for each in json.loads(text)["tenants"]}
    return known


class Team:
    """A pool with its quotas; `turn` is one look at them."""

    def __init__(self, settings: Settings) -> None:
        self.kube = FakeKube()
        self.now_s = 1_800_000_000.0
        self.quotas = Store(
            key_of=lambda q: (q["metadata"]["namespace"], q["spec"]["poolRef"]["name"])
        )
        self.opened: list[FakeRedis] = []
        self.leads = True
        self.body: Json | None = None
        api = cast(Any, self.kube)
        redis = RedisStores(api, lambda: self.now_s, self._open)
        reader = KeyReader(api, lambda: self.now_s)
        self.tools = QuotaTools(
            api, self.kube.stores, self.quotas, reader, redis, settings,
            lambda: self.now_s, lambda: self.leads,
        )  # fmt: skip
        self.turns = PoolQuotas(KEY, self.tools)
        self.num_made = 0
        self.set_pool()

    def lead_anew(self) -> None:
        """Another leader, which knows nothing yet but what it lists."""
        for item in self.quotas.all():
            name = item["metadata"]["name"]
            self.quotas.put({**item, "status": self.status(name)})
        reader = KeyReader(self.tools.api, lambda: self.now_s)
        self.tools = replace(self.tools, keys=reader)
        self.turns = PoolQuotas(KEY, self.tools)

    def _open(self, access: RedisAccess) -> FakeRedis:
        self.opened.append(FakeRedis(self.kube, access))
        return self.opened[-1]

    @property
    def redis(self) -> FakeRedis:
        return self.opened[-1]

    def set_pool(self, quotas: Json | None = None) -> None:
        spec = {
            "model": {"name": "tiny", "source": "cache://tiny"},
            "quotas": {"redis": REDIS} if quotas is None else quotas,
        }
        if not spec["quotas"]:
            del spec["quotas"]
        self.body = {"metadata": {"name": "chat", "namespace": "team", "uid": "u"}, "spec": spec}

    def set_quota(self, name: str, tenant: str, **spec: Any) -> None:
        self.num_made += 1
        path = QUOTA.path("team", name)
        before = self.kube.objects.get(path, {"metadata": {}, "status": {}})
        item = {
            "kind": "TenantQuota",
            "metadata": {
                "name": name,
                "namespace": "team",
                "uid": f"uid-{name}",
                "generation": before["metadata"].get("generation", 0) + 1,
                "resourceVersion": str(1_000_000 + self.num_made),  # newer than any status
                "creationTimestamp": f"2026-01-01T00:00:{self.num_made:02}Z",
            },
            "spec": {"poolRef": {"name": "chat"}, "tenant": tenant, **spec},
            "status": before["status"],
        }
        self.kube.objects[path] = item
        self.quotas.put(json.loads(json.dumps(item)))

    def drop_quota(self, name: str) -> None:
        self.quotas.drop(self.kube.objects.pop(QUOTA.path("team", name)))

    def set_secret(self, name: str, kind: str = KEYS_TYPE, **values: str) -> None:
        data = {key: base64.b64encode(text.encode()).decode() for key, text in values.items()}
        secret = {"kind": "Secret", "type": kind, "data": data, "metadata": {"name": name}}
        self.kube.objects[f"/api/v1/namespaces/team/secrets/{name}"] = secret

    def drop_secret(self, name: str) -> None:
        del self.kube.objects[f"/api/v1/namespaces/team/secrets/{name}"]

    async def turn(self, num: int = 1) -> bool:
        is_kept = True
        for _ in range(num):
            self.now_s += 4.0
            is_kept = await self.turns.turn(self.body)
        return is_kept

    def status(self, name: str) -> Json:
        return dict(self.kube.objects[QUOTA.path("team", name)]["status"])

    def condition(self, name: str, kind: str) -> tuple[str, str, str]:
        found = {c["type"]: c for c in self.status(name)["conditions"]}[kind]
        return found["status"], found["reason"], found["message"]
