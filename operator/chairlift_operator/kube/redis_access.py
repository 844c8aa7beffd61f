"""The Redis of each pool: how it is reached, by Secrets that are read anew, and one client for all
pools that reach it in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from chairlift_operator.kube import names
from chairlift_operator.kube.api import Api, ApiError
from chairlift_operator.kube.key_reading import secret_text
from chairlift_operator.kube.watching import PoolKey
from chairlift_operator.quotas.store import QuotaStore, RedisAccess, StoreError
from chairlift_operator.spec_quotas import Redis

logger = logging.getLogger(__name__)

READ_EVERY_S: Final = 30.0  # a rotated password is taken so soon
READ_AGAIN_S: Final = 8.0  # and so soon where Redis does not answer as it should


class RedisStores:
    """open_store: how a client is made; tests give a store of their own."""

    def __init__(
        self, api: Api, now_s: Callable[[], float], open_store: Callable[[RedisAccess], QuotaStore]
    ) -> None:
        self._api, self._now_s, self._open = api, now_s, open_store
        self._stores: dict[RedisAccess, QuotaStore] = {}
        self._used: dict[PoolKey, tuple[Redis, RedisAccess, float]] = {}
        self._suspect: set[PoolKey] = set()

    async def of(self, key: PoolKey, redis: Redis) -> QuotaStore:
        """Raise StoreError where its Secrets do not say how it is reached."""
        known, access, read_at_s = self._used.get(key, (None, None, 0.0))
        every_s = READ_AGAIN_S if key in self._suspect else READ_EVERY_S
        if known != redis or access is None or self._now_s() - read_at_s >= every_s:
            try:
                access = await self._access(key[0], redis)
            except ApiError as error:
                if access is None or known != redis:
                    raise StoreError(f"the Secrets of Redis cannot be read: {error}") from error
                logger.warning("%s/%s: Redis is reached as before: %s", *key, error)
            self._used[key] = (redis, access, self._now_s())
            self._suspect.discard(key)
            await self._close_unused()
        if access not in self._stores:
            self._stores[access] = self._open(access)
        return self._stores[access]

    def failed(self, key: PoolKey) -> None:
        """Its Secrets may have changed."""
        self._suspect.add(key)

    async def drop(self, key: PoolKey) -> None:
        self._suspect.discard(key)
        if self._used.pop(key, None) is not None:
            await self._close_unused()

    async def close(self) -> None:
        self._used.clear()
        await self._close_unused()

    async def _close_unused(self) -> None:
        used = {access for _, access, _ in self._used.values()}
        for access in self._stores.keys() - used:
            await self._stores.pop(access).close()

    async def _access(self, namespace: str, redis: Redis) -> RedisAccess:
        password = ca = None
        if redis.password_secret is not None:
            password = await self._needed(namespace, redis.password_secret, names.PASSWORD_KEY)
        if redis.ca_secret is not None:
            ca = await self._needed(namespace, redis.ca_secret, names.CA_KEY)
        return RedisAccess(redis.url, redis.user, password, ca)

    async def _needed(self, namespace: str, name: str, field: str) -> str:
        found = await secret_text(self._api, namespace, name, field)
        if not found:
            raise StoreError(f"Secret {name} holds no {field}: add it, or make the Secret")
        return found
