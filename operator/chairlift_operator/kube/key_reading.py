"""Secrets that quotas name, read one by one: nothing watches them, which would take the right to
read every Secret.

Each is read again every few seconds, less often where there are many. What could not be read again
stays as it was known, and where nothing was known its tenant's keys stay as gateways know them.
"""

from __future__ import annotations

import asyncio
import base64
import heapq
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from chairlift_operator.kube.api import Api, ApiError
from chairlift_operator.kube.paths import SECRET
from chairlift_operator.quotas.key_secrets import SecretKeys, read_keys, unreadable

logger = logging.getLogger(__name__)

Json = dict[str, Any]
SecretKey = tuple[str, str]  # namespace, name
LEAST_S: Final = 3.5  # less than a round, so that each round reads
# What reading Secrets again may cost the API server: beyond 70 of them each is read less often.
READS_PER_S: Final = 20.0
MOST_AGAIN: Final = 80  # in one turn, so that they do not all come due together for ever
# Those of new and changed quotas are read at once; of so many that a turn takes a second or two.
MOST_NEW: Final = 500
NUM_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class Reading:
    """secrets: by name, None where nothing is known. is_cut: there were more new ones than one turn
    may read, and the API server answers them all."""

    secrets: Mapping[str, SecretKeys | None]
    is_cut: bool


class KeyReader:
    """All Secrets of keys that one operator reads."""

    def __init__(self, api: Api, now_s: Callable[[], float]) -> None:
        self._api, self._now_s = api, now_s
        self._known: dict[SecretKey, SecretKeys] = {}
        self._read_at_s: dict[SecretKey, float] = {}
        self._new: dict[SecretKey, None] = {}  # in the order in which they are to be read
        self.num_changes = 0  # as long as it stays, so does what is known

    async def read(self, namespace: str, names: Collection[str], fresh: Collection[str]) -> Reading:
        """fresh: named by a changed quota, so read first."""
        keys = [(namespace, name) for name in dict.fromkeys(names)]
        self._new = {(namespace, name): None for name in sorted(fresh)} | self._new
        self._new |= {key: None for key in keys if key not in self._known}
        new = [key for key in self._new if key[0] == namespace]
        due_s = self._now_s() - max(LEAST_S, len(self._read_at_s) / READS_PER_S)
        again = (key for key in keys if key not in self._new and self._read_at_s[key] <= due_s)
        oldest = heapq.nsmallest(MOST_AGAIN, again, key=lambda key: (self._read_at_s[key], key))
        due = iter((*new[:MOST_NEW], *oldest))
        answered = await asyncio.gather(*(self._work(due) for _ in range(NUM_AT_ONCE)))
        known = {name: self._known.get((namespace, name)) for _, name in keys}
        return Reading(known, len(new) > MOST_NEW and all(answered))

    def keep_only(self, used: Collection[SecretKey]) -> None:
        """Forget those that no quota names any more."""
        for known in (self._read_at_s, self._known, self._new):
            for key in known.keys() - used:
                del known[key]

    async def _work(self, due: Iterator[SecretKey]) -> bool:
        """A server that does not answer, or has too much to do, is not asked for the rest of them
        in this turn: False."""
        for key in due:
            self._read_at_s[key] = self._now_s()
            try:
                secret = await self._api.find(SECRET.path(*key))
            except ApiError as error:
                logger.warning("%s/%s: its keys stay as they are known: %s", *key, error)
                if error.is_refusal:
                    self._note(key, self._known.get(key, unreadable(key[1], str(error))))
                # A server error is noted too, so that one Secret of which nothing else can be had
                # holds up no others.
                if not error.is_refusal or error.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                    return False
                continue
            self._note(key, read_keys(key[1], secret))
        return True

    def _note(self, key: SecretKey, read: SecretKeys) -> None:
        self._new.pop(key, None)
        if self._known.get(key) != read:
            self._known[key] = read
            self.num_changes += 1


async def secret_text(api: Api, namespace: str, name: str, field: str) -> str | None:
    """One value of a Secret; None where there is none. Raise ApiError."""
    secret = await api.find(SECRET.path(namespace, name))
    data = (secret or {}).get("data") or {}
    try:
        return base64.b64decode(data[field]).decode().strip()
    except (KeyError, ValueError):
        return None
