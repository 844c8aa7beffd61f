"""`spec.quotas`: the Redis in which tenants' quotas are kept, and what holds without it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from chairlift_operator.spec_values import SPEC_CONFIG, Name, matching, printable

# Without user names and passwords: a spec is no place for them.
REDIS_URL: Final = re.compile(r"rediss?://[^\s/?#@]+(?:/[0-9]*)?")
ENCRYPTED: Final = "rediss://"


@dataclass(frozen=True, slots=True)
class Redis:
    """password_secret: its key `password`. ca_secret: its key `ca.crt`, who signed the server's
    certificate; None for the system's authorities."""

    __pydantic_config__ = SPEC_CONFIG
    url: Annotated[
        str,
        matching(REDIS_URL, "must look like redis://redis.team:6379/0, or rediss:// for TLS"),
        printable(500),
    ]
    user: Annotated[str, printable(100)] | None = None
    password_secret: Name | None = None
    ca_secret: Name | None = None

    def __post_init__(self) -> None:
        if (wrong := _wrong_address(self.url)) is not None:
            raise ValueError(f"url {self.url!r}: {wrong}: write redis://HOST:PORT/DATABASE")
        if self.ca_secret is not None and not self.url.startswith(ENCRYPTED):
            raise ValueError(
                "caSecret only works with a url that begins with rediss://: change one"
            )
        if self.user is not None and self.password_secret is None:
            raise ValueError("user needs its password: add passwordSecret, or remove user")


def _wrong_address(url: str) -> str | None:
    """Why a client could not even try it."""
    try:
        parts = urlsplit(url)
        if parts.port == 0:
            return "the port must be 1 to 65535"
    except ValueError as error:
        return str(error)
    return None if parts.hostname else "it names no host"


@dataclass(frozen=True, slots=True)
class Quotas:
    """on_redis_failure: Local is each gateway's share of the limits."""

    __pydantic_config__ = SPEC_CONFIG
    redis: Redis
    on_redis_failure: Literal["Local", "Allow", "Deny"] = "Local"
