"""The ConfigMaps of a pool's keys: one, or parts of which no gateway ever acts on a half."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable
from typing import Any, cast

import pytest

from chairlift_e2e.fake_kube import FakeKube
from chairlift_operator.kube.api import ApiError
from chairlift_operator.kube.children import Owner
from chairlift_operator.kube.objects import PoolObjects
from chairlift_operator.kube.owning import Foreign
from chairlift_operator.kube.tenants_map import TenantsMap
from chairlift_operator.quotas.key_ring import MOST_IN_ONE, TenantKeys
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import parse_pool
from chairlift_protocol.quota import NUM_SHARDS, shard_of

MAP = "/api/v1/namespaces/team/configmaps/chat-tenants"
PARTS = [f"{MAP}-{number}" for number in range(NUM_SHARDS)]
POOL: InferencePool = parse_pool(
    {
        "apiVersion": "chairlift.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "chat", "namespace": "team"},
        "spec": {"model": {"name": "tiny", "source": "cache://tiny"}},
    }
)
MANY = range(MOST_IN_ONE + 1)


def _digest(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def _keys(numbers: Iterable[int], in_doubt: Iterable[int] = ()) -> TenantKeys:
    owners = {_digest(n): (f"t{n}", "interactive") for n in numbers}
    return TenantKeys(owners, frozenset(f"t{n}" for n in in_doubt))


class Maps:
    def __init__(self) -> None:
        self.kube = FakeKube()
        objects = PoolObjects(("team", "chat"), self.kube.stores)
        self.maps = TenantsMap(objects, cast(Any, self.kube), Owner("u", "system/chairlift"))

    def write(self, numbers: Iterable[int], in_doubt: Iterable[int] = ()) -> list[str]:
        return self._done(self.maps.write(POOL, _keys(numbers, in_doubt)))

    def take(self, numbers: Iterable[int], in_doubt: Iterable[int] = ()) -> list[str]:
        return self._done(self.maps.take(POOL, _keys(numbers, in_doubt)))

    def _done(self, work: Any) -> list[str]:
        """What was written, in order."""
        self.kube.writes.clear()
        asyncio.run(work)
        return [path for _, path, _ in self.kube.writes]

    def known(self) -> set[str]:
        """As a gateway that has just started sees it."""
        data = self.kube.objects[MAP]["data"]
        texts = [data.get("tenants.json")]
        if "shards" in data:
            texts = [self.kube.objects[path]["data"]["tenants.json"] for path in PARTS]
        return {each["tenant"] for text in texts for each in json.loads(text or "")["tenants"]}


def _named(numbers: Iterable[int]) -> set[str]:
    return {f"t{n}" for n in numbers}


@pytest.fixture
def maps() -> Maps:
    return Maps()


def test_a_pool_of_few_keys_has_one_configmap(maps: Maps) -> None:
    assert maps.write(range(3)) == [MAP]
    assert set(maps.kube.objects) == {MAP} and maps.known() == _named(range(3))


def test_keys_are_parted_before_it_is_said_that_they_are(maps: Maps) -> None:
    maps.write(range(3))
    assert maps.write(MANY) == [*PARTS, MAP]
    assert maps.kube.objects[MAP]["data"] == {"shards": str(NUM_SHARDS)}
    assert maps.kube.objects[PARTS[3]]["data"]["shard"] == f"3/{NUM_SHARDS}"
    assert maps.known() == _named(MANY)
    assert maps.write(MANY) == []


def test_a_changed_key_is_one_write_however_many_there_are(maps: Maps) -> None:
    maps.write(MANY)
    assert maps.write([*MANY, 77_777]) == [PARTS[shard_of(_digest(77_777))]]


def test_keys_that_were_parted_stay_so(maps: Maps) -> None:
    """Else a pool at the bound would be moved with each key."""
    maps.write(MANY)
    maps.write(range(10))
    assert maps.known() == _named(range(10)) and "shards" in maps.kube.objects[MAP]["data"]


def test_of_parts_too_keys_are_taken_before_any_is_given(maps: Maps) -> None:
    maps.write(MANY)
    wanted = [*MANY[1:], 77_777]
    assert maps.take(wanted) == [PARTS[shard_of(_digest(0))]]
    assert maps.known() == _named(MANY[1:])
    maps.write(wanted)
    assert maps.known() == _named(wanted)


def test_a_pool_that_grows_beyond_one_map_takes_from_that_one_first(maps: Maps) -> None:
    maps.write(range(3))
    assert maps.take(range(1, 9_000)) == [MAP]
    assert maps.known() == _named([1, 2])
    maps.write(range(1, 9_000))
    assert maps.known() == _named(range(1, 9_000))


def test_while_a_part_cannot_be_written_the_one_map_stays_in_force(maps: Maps) -> None:
    maps.write(range(3))
    maps.kube.refuses[PARTS[7]] = "quota exceeded"
    with pytest.raises(ApiError):
        maps.write(MANY)
    assert maps.known() == _named(range(3))
    assert maps.take(range(2)) == [MAP] and maps.known() == _named(range(2))
    maps.kube.refuses.clear()
    maps.write(MANY)
    assert maps.known() == _named(MANY)


def test_a_part_that_somebody_broke_or_deleted_is_set_again(maps: Maps) -> None:
    maps.write(MANY)
    asyncio.run(maps.kube.patch(PARTS[0], {"data": {"tenants.json": "broken"}}, "kubectl"))
    asyncio.run(maps.kube.delete(PARTS[1]))
    assert maps.take(MANY) == []  # gateways keep what they knew of both
    assert maps.write(MANY) == PARTS[:2] and maps.known() == _named(MANY)


def test_a_deleted_index_is_set_again(maps: Maps) -> None:
    maps.write(MANY)
    asyncio.run(maps.kube.delete(MAP))
    assert maps.write(MANY) == [MAP] and maps.known() == _named(MANY)


def test_a_foreign_configmap_in_the_place_of_a_part_is_left_alone(maps: Maps) -> None:
    metadata = {"name": "chat-tenants-5", "namespace": "team"}
    maps.kube.objects[PARTS[5]] = {"kind": "ConfigMap", "metadata": metadata, "data": {"a": "b"}}
    with pytest.raises(Foreign, match="chat-tenants-5 exists"):
        maps.write(MANY)
    assert maps.kube.objects[PARTS[5]]["data"] == {"a": "b"} and MAP not in maps.kube.objects


def _strip(maps: Maps, path: str) -> None:
    """Of what says that it is this operator's."""
    del maps.kube.objects[path]["metadata"]["annotations"]
    maps.kube.stores.children["ConfigMap"].put(maps.kube.objects[path])


def test_one_part_that_cannot_be_written_keeps_no_key_of_another_in_force(maps: Maps) -> None:
    maps.write(MANY)
    _strip(maps, PARTS[3])
    maps.kube.refuses[PARTS[9]] = "quota exceeded"
    left = [n for n in MANY if n % 2]
    with pytest.raises(Foreign, match="chat-tenants-3 exists"):
        maps.take(left)
    out_of_reach = {n for n in MANY if shard_of(_digest(n)) in (3, 9)}
    assert maps.known() == _named({*left, *out_of_reach})
    with pytest.raises(Foreign, match="chat-tenants-3 exists"):
        maps.write(MANY)
    maps.kube.refuses.clear()
    with pytest.raises(Foreign):
        maps.write(left)
    assert maps.known() == _named({*left, *(n for n in MANY if shard_of(_digest(n)) == 3)})


def test_a_server_that_is_away_is_not_asked_for_every_part(
    maps: Maps, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    async def away(path: str, manifest: Any, manager: str) -> Any:
        tried.append(path)
        raise ApiError(0, "the API server did not answer in time")

    monkeypatch.setattr(maps.kube, "apply", away)
    with pytest.raises(ApiError, match="did not answer"):
        maps.write(MANY)
    assert len(tried) == 1


@pytest.mark.parametrize("before", [range(3), MANY], ids=["one map", "parts"])
def test_of_tenants_in_doubt_no_key_is_taken_of_others_those_that_went(
    maps: Maps, before: range
) -> None:
    maps.write(before)
    maps.take([2], in_doubt=[0])
    assert maps.known() == _named([0, 2])
    maps.write([2, 3], in_doubt=[0])
    assert maps.known() == _named([0, 2, 3])
    assert maps.write([2, 3], in_doubt=[0]) == []
    maps.take([2, 3])
    assert maps.known() == _named([2, 3])


def test_tenants_in_doubt_keep_their_keys_while_these_are_parted(maps: Maps) -> None:
    maps.write(range(3))
    maps.write(MANY[1:], in_doubt=[0])
    assert "shards" in maps.kube.objects[MAP]["data"] and maps.known() == _named(MANY)


def test_a_pool_without_quotas_keeps_no_part(maps: Maps) -> None:
    maps.write(MANY)
    asyncio.run(maps.maps.remove(POOL))
    assert maps.kube.objects == {}
