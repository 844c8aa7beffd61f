"""Secrets that quotas name, read one by one: nothing watches them, which would take the right to
read every Secret.

Each is read again every few seconds, less often where there are many. What could not be read again
stays as it was known.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from chairlift_operator.kube.api import Api, ApiError
from chairlift_operator.kube.paths import SECRET
from chairlift_operator.quotas.key_secrets import KeyTrouble, SecretKeys, read_keys

logger = logging.getLogger(__name__)

Json = dict[str, Any]
SecretKey = tuple[str, str]  # namespace, name
LEAST_S: Final = 3.5  # less than a round, so that each round reads
# What reading Secrets again may cost the API server: beyond 70 of them each is read less often.
READS_PER_S: Final = 20.0
MOST_AGAIN: Final = 80  # in one turn, so that they do not all come due together for ever


class KeyReader:
    """All Secrets of keys that one operator reads."""

    def __init__(self, api: Api, now_s: Callable[[], float]) -> None:
        self._api, self._now_s = api, now_s
        self._known: dict[SecretKey, SecretKeys] = {}
        self._read_at_s: dict[SecretKey, float] = {}

    async def read(
        self, namespace: str, names: Iterable[str], fresh: Collection[str]
    ) -> Mapping[str, SecretKeys | None]:
        """By name; None where nothing is known. fresh: named by a changed quota, so read now."""
        keys = [(namespace, name) for name in sorted(set(names))]
        every_s = max(LEAST_S, len(self._read_at_s) / READS_PER_S)
        now = [key for key in keys if key[1] in fresh or key not in self._known]
        due_s = self._now_s() - every_s
        again = [key for key in keys if key not in now and self._read_at_s[key] <= due_s]
        again = sorted(again, key=lambda key: self._read_at_s[key])[:MOST_AGAIN]
        for key in (*now, *again):
            self._read_at_s[key] = self._now_s()
            await self._read_one(key)
        return {name: self._known.get((namespace, name)) for _, name in keys}

    def keep_only(self, used: set[SecretKey]) -> None:
        """Forget those that no quota names any more."""
        for key in self._read_at_s.keys() - used:
            del self._read_at_s[key]
            self._known.pop(key, None)

    async def _read_one(self, key: SecretKey) -> None:
        namespace, name = key
        try:
            secret = await self._api.find(SECRET.path(namespace, name))
        except ApiError as error:
            logger.warning("%s/%s: its keys stay as they are known: %s", namespace, name, error)
            if error.is_refusal:
                told = f"Secret {name} cannot be read: {error}"
                self._known.setdefault(key, SecretKeys(trouble=KeyTrouble("NotReadable", told)))
            return
        self._known[key] = read_keys(name, secret)


async def secret_text(api: Api, namespace: str, name: str, field: str) -> str | None:
    """One value of a Secret; None where there is none. Raise ApiError."""
    secret = await api.find(SECRET.path(namespace, name))
    data = (secret or {}).get("data") or {}
    try:
        return base64.b64decode(data[field]).decode().strip()
    except (KeyError, ValueError):
        return None
