"""How often Secrets of keys are read."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, cast

import pytest

from chairlift_operator.kube.api import ApiError
from chairlift_operator.kube.key_reading import (
    LEAST_S,
    MOST_AGAIN,
    MOST_NEW,
    NUM_AT_ONCE,
    READS_PER_S,
    KeyReader,
)
from chairlift_operator.quotas.key_secrets import SecretKeys, read_keys


class Shelf:
    """Secrets that are all missing, and how often each was asked for."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.asked: list[str] = []
        self.error: ApiError | None = None
        self.broken: set[str] = set()
        self.is_cut = False
        self.reader = KeyReader(cast(Any, self), lambda: self.now_s)

    async def find(self, path: str) -> None:
        self.asked.append(path.rpartition("/")[2])
        if self.asked[-1] in self.broken:
            raise ApiError(500, "no matching key was found for AES-CBC transformer")
        if self.error is not None:
            raise self.error

    def read(self, names: Collection[str], fresh: Collection[str] = ()) -> dict[str, Any]:
        """What is known, after a round; `asked` is of this one."""
        self.asked = []
        self.now_s += LEAST_S
        reading = asyncio.run(self.reader.read("team", names, set(fresh)))
        self.is_cut = reading.is_cut
        return dict(reading.secrets)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def test_a_few_secrets_are_read_each_round(shelf: Shelf) -> None:
    for _ in range(3):
        shelf.read(["a", "b", "a"])
        assert shelf.asked == ["a", "b"]


def test_many_are_read_in_turn_and_each_within_its_time(shelf: Shelf) -> None:
    names = [f"s{number:04}" for number in range(1000)]
    for _ in range(1000 // MOST_NEW):
        shelf.read(names)
    assert set(shelf.reader._known) == {("team", name) for name in names}
    seen = list[str]()
    for _ in range(round(1000 / READS_PER_S / LEAST_S) + 1000 // MOST_AGAIN + 1):
        shelf.read(names)
        assert len(shelf.asked) <= MOST_AGAIN
        seen += shelf.asked
    assert set(seen) == set(names)


def test_those_of_a_changed_quota_do_not_wait_for_their_turn(shelf: Shelf) -> None:
    names = [f"s{number:04}" for number in range(200)]
    shelf.read(names)
    shelf.read(names, fresh=["s0123"])
    assert "s0123" in shelf.asked


def test_those_of_a_changed_quota_come_before_new_ones_that_are_left(shelf: Shelf) -> None:
    names = [f"s{number:04}" for number in range(3 * MOST_NEW)]
    shelf.read(names)
    known, left = names[0], names[-1]
    shelf.read(names, fresh=[known, left])
    assert shelf.is_cut and {known, left} <= set(shelf.asked[:NUM_AT_ONCE])


def test_so_many_new_ones_are_read_in_a_turn_and_the_rest_is_said_to_be_left(shelf: Shelf) -> None:
    names = [f"s{number:04}" for number in range(MOST_NEW + 1)]
    first = shelf.read(names)
    assert shelf.is_cut and sum(read is None for read in first.values()) == 1
    assert None not in shelf.read(names).values() and not shelf.is_cut


def test_a_changed_quotas_secret_that_could_not_be_read_does_not_wait_for_its_turn(
    shelf: Shelf,
) -> None:
    names = [f"s{number:04}" for number in range(200)]
    shelf.read(names)
    shelf.error = ApiError(503, "starting")
    shelf.read(names, fresh=["s0123"])
    shelf.error = None
    assert shelf.now_s - 1000.0 < 200 / READS_PER_S  # so none is due again
    shelf.read(names)
    assert shelf.asked == ["s0123"]


def test_changed_quotas_secrets_beyond_those_of_one_turn_are_the_nexts(shelf: Shelf) -> None:
    names = [f"s{number:04}" for number in range(MOST_NEW + 1)]
    for _ in range(2):
        shelf.read(names)
    shelf.read(names, fresh=names)
    seen = set(shelf.asked)
    shelf.read(names)
    assert shelf.asked and seen | set(shelf.asked) == set(names)


@pytest.mark.parametrize("status", [0, 429, 500, 503])
def test_a_server_that_is_away_or_busy_is_not_asked_for_every_secret(
    shelf: Shelf, status: int
) -> None:
    shelf.error = ApiError(status, "no")
    shelf.read([f"s{number:04}" for number in range(MOST_NEW + 1)])
    assert len(shelf.asked) <= NUM_AT_ONCE and not shelf.is_cut


def test_secrets_that_the_server_always_fails_on_hold_up_no_others(shelf: Shelf) -> None:
    """Such as those that it cannot decrypt any more."""
    bad = [f"a{number:02}" for number in range(3 * NUM_AT_ONCE)]
    shelf.broken = set(bad)
    for _ in range(4):
        known = shelf.read([*bad, "b"])
    assert known["b"] == read_keys("b", None) and all(known[name].is_unknown for name in bad)


def test_only_another_content_counts_as_a_change(shelf: Shelf) -> None:
    shelf.read(["a"])
    before = shelf.reader.num_changes
    shelf.read(["a"])
    assert shelf.reader.num_changes == before
    shelf.read(["a", "b"])
    assert shelf.reader.num_changes > before


@pytest.mark.parametrize(
    ("error", "is_known"),
    [
        (ApiError(0, "the API server did not answer in time"), False),
        (ApiError(503, "starting"), False),
        (ApiError(403, "forbidden"), True),
        (ApiError(500, "etcdserver: request timed out"), True),
    ],
    ids=str,
)
def test_only_an_answer_says_that_a_secret_cannot_be_had(
    shelf: Shelf, error: ApiError, is_known: bool
) -> None:
    shelf.error = error
    read = shelf.read(["a"])["a"]
    assert (read is not None) is is_known
    if is_known:
        assert read.is_unknown and "Secret a cannot be read" in read.trouble.message


def test_what_was_known_stays_and_what_nobody_names_is_forgotten(shelf: Shelf) -> None:
    def known() -> SecretKeys | None:
        found: SecretKeys | None = shelf.read(["a"])["a"]
        return found

    before = known()
    shelf.error = ApiError(403, "forbidden")
    assert known() is before
    shelf.error = ApiError(0, "away")
    assert known() is before
    shelf.reader.keep_only(set())
    assert known() is None
