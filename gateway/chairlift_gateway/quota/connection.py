"""How Redis is reached: address, TLS, user, and a password that is read anew for each connection.

`store` and `upkeep` use the client that this makes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from redis.asyncio import Connection, ConnectionPool, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.maint_notifications import MaintNotificationsConfig

from chairlift_gateway.quota.patience import Patience

# A request waits no longer for its quota, on an event loop that has time.
TIMEOUT_S: Final = 0.02
# Opening a connection takes several round trips; no request waits for that longer than TIMEOUT_S.
CONNECT_TIMEOUT_S: Final = 1.0
MAX_CONNECTIONS: Final = 8
# What an ACL user of gateways may do, on the pool's keys alone.
NEEDED_RIGHTS: Final = (
    "+evalsha", "+script|load", "+time", "+hello", "+auth",
    "+get", "+hget", "+hmget", "+hset", "+hdel", "+hincrby", "+hscan", "+exists", "+pexpire",
    "+zadd", "+zrem", "+zcard", "+zrange", "+zrangebyscore", "+zremrangebyscore",
)  # fmt: skip


class RedisUrlError(ValueError):
    """An address of Redis that cannot be used; the message says what it must be."""


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """url: redis:// or rediss:// (TLS), without secrets. ca_path: who signed the server's
    certificate; None for the system's authorities."""

    url: str
    user: str | None = None
    password_path: Path | None = None
    ca_path: Path | None = None

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_usable = parts.scheme in ("redis", "rediss") and parts.hostname and parts.port != 0
        except ValueError:  # a port that is none, half an IPv6 address
            is_usable = False
        if not is_usable:
            raise RedisUrlError(f"must be like redis://host:6379/0 or rediss://…, not {self.url!r}")
        if parts.password is not None:
            raise RedisUrlError("must not hold a password, which process lists show; give a file")

    @property
    def is_encrypted(self) -> bool:
        return self.url.startswith("rediss:")


class _FileCredentials(CredentialProvider):
    """A rotated password is taken by the next connection."""

    def __init__(self, user: str | None, path: Path) -> None:
        self._user = user
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        # What is no text is a wrong password, as Redis will say; it ends no gateway.
        password = self._path.read_text(encoding="utf-8", errors="replace").strip()
        return (password,) if self._user is None else (self._user, password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


class PatientConnection(Connection):
    """Each read and write has TIMEOUT_S; the client's own timeouts also count what the event loop
    was busy with. `wire` takes over what it has connected."""

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        async with Patience(TIMEOUT_S):
            await super().send_packed_command(*args, **kwargs)

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        async with Patience(TIMEOUT_S):
            return await super().read_response(*args, **kwargs)

    def hand_over(self) -> asyncio.StreamWriter:
        """What was connected, of which this object then knows nothing any more."""
        writer = self._writer
        assert writer is not None
        self._reader = self._writer = None
        return writer


class _PatientTlsConnection(PatientConnection, SSLConnection):
    pass


def open_client(address: RedisAddress) -> Redis:
    """It never tries twice: `store` knows which of its commands may be repeated."""
    settings: dict[str, Any] = {
        "socket_timeout": None,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "max_connections": MAX_CONNECTIONS,
        # Three commands less at each connection, and no right to them is needed.
        "driver_info": None,
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }
    if address.password_path is not None:
        settings["credential_provider"] = _FileCredentials(address.user, address.password_path)
    elif address.user is not None:
        settings["username"] = address.user
    if address.is_encrypted and address.ca_path is not None:
        settings["ssl_ca_certs"] = str(address.ca_path)
    pool = ConnectionPool.from_url(address.url, **settings)
    pool.connection_class = _PatientTlsConnection if address.is_encrypted else PatientConnection
    return Redis.from_pool(pool)
