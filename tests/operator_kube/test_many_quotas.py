"""A pool of many tenants: no turn does for all of them what one of them needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from chairlift_e2e.fake_tenants import MAP, Team, tenants_of
from chairlift_operator.kube.api import ApiError
from chairlift_operator.kube.paths import QUOTA
from chairlift_operator.kube.quota_reporting import MOST_MEASURED, MOST_WRITES
from chairlift_operator.kube.quota_turn import MEASURED_A_TURN
from chairlift_operator.kube.settings import STATUS_S, Settings
from chairlift_operator.quotas.key_ring import MOST_IN_ONE
from chairlift_operator.quotas.ledger import Counts

Json = dict[str, Any]
Body = Callable[[Team], Any]


def _key(number: int) -> str:
    return f"ck-{number:030}"


@pytest.fixture
def run(settings: Settings) -> Callable[[Body], None]:
    async def main(body: Body) -> None:
        await body(Team(settings))

    return lambda body: asyncio.run(main(body))


def _fill(team: Team, num: int) -> list[str]:
    names = [f"t{number:04}" for number in range(num)]
    for name in names:
        team.set_quota(name, name, interactive={"concurrency": 9})
    return names


def _statuses(team: Team) -> list[str]:
    """Whose status was written since last asked, in order."""
    written = [path for _, path, _ in team.kube.writes if "/tenantquotas/" in path]
    team.kube.writes.clear()
    return [path.rpartition("/")[2] for path in written]


async def _settle(team: Team) -> None:
    """Until two minutes were watched, and nothing is left to be said."""
    await team.turn(40)
    while team.turns.is_behind:
        await team.turn()
    team.kube.writes.clear()


def test_more_keys_than_one_map_holds_come_after_their_limits_and_go_before_them(run: Any) -> None:
    async def body(team: Team) -> None:
        keys = {f"k{number}": _key(number) for number in range(MOST_IN_ONE)}
        team.set_secret("many", **keys)
        team.set_secret("one", key=_key(-1))
        team.set_quota("many", "many", keys=[{"secret": "many"}], interactive={})
        await team.turn()
        assert "tenants.json" in team.kube.objects[MAP]["data"]
        team.set_quota("one", "one", keys=[{"secret": "one"}], interactive={})
        await team.turn()
        assert team.kube.objects[MAP]["data"] == {"shards": "16"}
        limits, known = team.redis.log[-1]
        assert "one/interactive" in limits and known == {"many"}
        assert tenants_of(team.kube) == {"many", "one"}
        team.drop_quota("one")
        await team.turn()
        assert team.redis.log[-1][1] == {"many"}
        team.redis.fails = "Redis did not answer in time"
        team.set_quota("one", "one", keys=[{"secret": "one"}], interactive={})
        team.drop_quota("many")
        await team.turn()
        assert tenants_of(team.kube) == set()  # taken, and none given

    run(body)


def test_every_tenant_is_measured_in_turn(run: Any) -> None:
    async def body(team: Team) -> None:
        names = _fill(team, 2 * MEASURED_A_TURN + 1)
        for _ in range(2):
            asked: list[str] = []
            for _ in range(3):
                await team.turn()
                assert len(team.redis.asked) <= 2 * MEASURED_A_TURN
                asked += team.redis.asked
            assert sorted(asked) == sorted(
                f"{n}/{c}" for n in names for c in ("batch", "interactive")
            )

    run(body)


def test_those_that_ask_are_measured_in_every_turn(run: Any) -> None:
    async def body(team: Team) -> None:
        names = _fill(team, 2 * MEASURED_A_TURN + 1)
        await team.turn(3)
        busy = {f"{name}/interactive" for name in (names[0], names[MEASURED_A_TURN], names[-1])}
        for holder in busy:
            team.redis.counts[holder] = Counts(100, 0, 1, 50)
        await team.turn(3)  # each was read since
        for _ in range(3):
            await team.turn()
            assert busy <= set(team.redis.asked)

    run(body)


def test_so_many_statuses_are_written_in_a_turn_and_the_rest_at_once_after_it(run: Any) -> None:
    async def body(team: Team) -> None:
        names = _fill(team, 2 * MOST_WRITES + 1)
        seen: list[str] = []
        for num, is_behind in ((MOST_WRITES, True), (MOST_WRITES, True), (1, False)):
            await team.turn()
            written = _statuses(team)
            assert (len(written), team.turns.is_behind) == (num, is_behind)
            seen += written
        assert sorted(seen) == names

    run(body)


def test_a_changed_quota_is_told_so_before_others_are_measured_again(run: Any) -> None:
    async def body(team: Team) -> None:
        names = _fill(team, 2 * MOST_WRITES)
        await _settle(team)
        for name in names:
            team.redis.counts[f"{name}/interactive"] = Counts(500, 0, 1)
        team.set_quota(names[-1], names[-1], interactive={"concurrency": 10})
        await team.turn()
        written = _statuses(team)
        assert written[0] == names[-1] and len(written) <= 1 + MOST_MEASURED
        assert team.status(names[-1])["observedGeneration"] == 2

    run(body)


def test_what_everybody_uses_is_written_in_turn(run: Any) -> None:
    async def body(team: Team) -> None:
        names = _fill(team, 2 * MOST_MEASURED)
        await _settle(team)
        seen: list[str] = []
        for turn in range(1, 3):
            for name in names:
                team.redis.counts[f"{name}/interactive"] = Counts(500 * turn, 0, 1)
            team.now_s += STATUS_S  # so that everybody's is due
            await team.turn()
            written = _statuses(team)
            assert len(written) <= MOST_MEASURED
            seen += written
        assert sorted(seen) == names

    run(body)


def test_nothing_is_written_while_nothing_changes_by_a_new_leader_neither(run: Any) -> None:
    async def body(team: Team) -> None:
        _fill(team, MEASURED_A_TURN + 10)
        await _settle(team)
        await team.turn(60)
        assert team.kube.writes == []
        team.lead_anew()
        await team.turn(60)
        assert team.kube.writes == [] and not team.turns.is_behind

    run(body)


def test_an_api_server_that_is_away_is_not_asked_to_write_every_status(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(team: Team) -> None:
        _fill(team, 2 * MOST_WRITES)
        tried: list[str] = []

        async def away(path: str, body: Json, manager: str) -> Json:
            tried.append(path)
            raise ApiError(0, "the API server did not answer in time")

        with monkeypatch.context() as patched:
            patched.setattr(team.kube, "apply", away)
            await team.turn()
        assert len([path for path in tried if "/tenantquotas/" in path]) == 1
        assert not team.turns.is_behind  # the next round is the next try
        await team.turn()
        assert len(_statuses(team)) == MOST_WRITES

    run(body)


def test_a_quota_that_is_edited_does_not_wait_for_the_statuses_of_others(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(team: Team) -> None:
        names = _fill(team, MOST_WRITES)
        apply = team.kube.apply

        async def edited(path: str, body: Json, manager: str) -> Json:
            answer = await apply(path, body, manager)
            if path.endswith("/t0000/status"):
                team.set_quota("t0001", "t0001", interactive={"concurrency": 10})
            return answer

        with monkeypatch.context() as patched:
            patched.setattr(team.kube, "apply", edited)
            await team.turn()
        first = _statuses(team)
        assert first == ["t0000"]
        await team.turn()
        assert sorted({*first, *_statuses(team)}) == names

    run(body)


def test_an_annotation_has_a_quotas_secret_read_at_once(run: Any) -> None:
    """So that a key that was replaced in its Secret need not wait, where there are many."""

    async def body(team: Team) -> None:
        for number in range(100):
            team.set_secret(f"s{number}", key=_key(number))
            team.set_quota(f"t{number}", f"t{number}", keys=[{"secret": f"s{number}"}])
        await team.turn()
        for number in range(100):
            team.set_secret(f"s{number}", key=_key(1000 + number))
        item = team.kube.objects[QUOTA.path("team", "t7")]
        metadata = {**item["metadata"], "annotations": {"touched": "1"}}
        team.quotas.put({**item, "metadata": {**metadata, "resourceVersion": "2000000"}})
        assert team.turns.has_news
        team.now_s -= 4.0  # so that no other Secret is due
        before = team.kube.objects[MAP]["data"]["tenants.json"]
        await team.turn()
        after = team.kube.objects[MAP]["data"]["tenants.json"]
        assert sum(a != b for a, b in zip(before.split("{"), after.split("{"), strict=True)) == 1

    run(body)


def test_a_turn_at_rest_makes_nothing_anew(run: Any) -> None:
    async def body(team: Team) -> None:
        team.set_secret("s", key=_key(1))
        team.set_quota("acme", "acme", keys=[{"secret": "s"}])
        await team.turn()
        made = team.turns._roster
        await team.turn()
        assert team.turns._roster is made
        team.set_secret("s", key=_key(2))
        await team.turn()
        assert team.turns._roster is not made

    run(body)
