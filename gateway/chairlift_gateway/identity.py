"""Who asks: from an API key, a trusted header, or nobody, one tenant and its class.

Keys are known by their SHA-256 alone; they are long and random, so no slow hash is needed. The file
of tenants may be replaced at any time. `proxy` asks, and gives the one answer to quota, engine and
metrics.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from chairlift_gateway.headers import RawHeaders, bearer_key, find, find_all
from chairlift_gateway.openai_errors import not_yet_known, unauthorized
from chairlift_protocol.quota import ANONYMOUS, TENANT_PATTERN
from chairlift_protocol.wire import RequestClass

REREAD_S: Final = 1.0
NOT_KNOWN: Final = "The API key is not known."
DIGEST: Final = re.compile(r"[0-9a-f]{64}")

logger = logging.getLogger("chairlift_gateway.identity")


class TenantsError(ValueError):
    """A file of tenants that cannot be used; the message names the field."""


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str
    request_class: RequestClass


class NotLearnt(LookupError):
    """It was not said yet whose a key is, or that it is nobody's."""


class KeyBook(Protocol):
    def find(self, key: bytes) -> Caller | None:
        """None for a key that is nobody's. Raise NotLearnt."""
        ...


@dataclass(frozen=True, slots=True)
class Keys:
    """Whose each key is, by its digest."""

    callers: Mapping[str, Caller] = field(default_factory=dict)

    def find(self, key: bytes) -> Caller | None:
        """The time that a look-up takes tells of digests alone, which nobody can steer."""
        return self.callers.get(hashlib.sha256(key).hexdigest())


class TenantsSource(Protocol):
    """Keys that change by themselves. None before any was first read."""

    @property
    def keys(self) -> KeyBook | None: ...


class TenantsFile:
    """The keys in a JSON file that is replaced atomically; a bad one keeps the last good keys.

    The constructor reads it and raises TenantsError: without first keys there are none to keep.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] = ()
        self._looked_at_s = time.monotonic()
        self._said: str | None = None
        self._keys = Keys()
        try:
            self._reread()
        except OSError as error:
            raise TenantsError(f"cannot read {path}: {error.strerror}") from error

    @property
    def keys(self) -> Keys:
        now_s = time.monotonic()
        if now_s - self._looked_at_s >= REREAD_S:
            self._looked_at_s = now_s
            try:
                self._reread()
                self._said = None
            except (TenantsError, OSError) as error:
                self._keep(str(error))
        return self._keys

    def _keep(self, why: str) -> None:
        """Said once, however long the file is away."""
        if why != self._said:
            logger.warning("keeping the last tenants: %s", why)
        self._said = why

    def _reread(self) -> None:
        stat = os.stat(self._path)
        seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if seen == self._seen:
            return
        content = self._path.read_bytes()
        self._seen = seen
        try:
            self._keys = parse_tenants(content)
        except TenantsError as error:
            raise TenantsError(f"{self._path}: {error}") from error


@dataclass(frozen=True, slots=True)
class Identification:
    """tenants: None where keys name nobody. trusted_header: in which another gateway in front of
    this one names the tenant; clients must not reach this one past it."""

    tenants: TenantsSource | None
    serves_anonymous: bool
    batch_key_digests: tuple[str, ...] = ()
    trusted_header: bytes | None = None

    def caller(self, headers: RawHeaders, *, is_batch_path: bool) -> Caller:
        """Raise Refusal."""
        if len(find_all(headers, b"authorization")) > 1:
            raise unauthorized("The authorization header was sent more than once; send one key.")
        key = bearer_key(headers)
        known = self._by_header(headers) or self._by_key(key)
        if known is None and not self.serves_anonymous:
            raise unauthorized(_without_key(headers) if key is None else NOT_KNOWN)
        caller = known or Caller(ANONYMOUS, RequestClass.INTERACTIVE)
        is_batch = is_batch_path or (key is not None and self._is_batch_key(key))
        return Caller(caller.tenant, RequestClass.BATCH) if is_batch else caller

    def _by_header(self, headers: RawHeaders) -> Caller | None:
        given = find_all(headers, self.trusted_header) if self.trusted_header else []
        if not given:
            return None
        if len(given) > 1:
            # One of them may be the client's own, beside which the gateway in front put another.
            raise unauthorized(
                "The header that names the tenant was sent more than once; the gateway in front "
                "has to replace what clients send."
            )
        name = given[0].decode("latin-1")
        if not TENANT_PATTERN.fullmatch(name):
            raise unauthorized("The header that names the tenant holds no tenant's name.")
        return Caller(name, RequestClass.INTERACTIVE)

    def _by_key(self, key: bytes | None) -> Caller | None:
        if key is None or self.tenants is None:
            return None
        is_batch_key = self._is_batch_key(key)
        try:
            caller = _find(self.tenants.keys, key)
        except NotLearnt:
            if is_batch_key:
                return None
            raise not_yet_known() from None
        if caller is None and not is_batch_key:
            raise unauthorized(NOT_KNOWN)
        return caller

    def _is_batch_key(self, key: bytes) -> bool:
        """Compare with every digest, in a time that does not tell which one matched."""
        if not self.batch_key_digests:
            return False
        digest = hashlib.sha256(key).hexdigest()
        matches = [hmac.compare_digest(digest, known) for known in self.batch_key_digests]
        return any(matches)


def _find(keys: KeyBook | None, key: bytes) -> Caller | None:
    """Raise NotLearnt."""
    if keys is None:
        raise NotLearnt
    return keys.find(key)


def _without_key(headers: RawHeaders) -> str:
    if find(headers, b"authorization") is None:
        return "No API key was given; send one as `Authorization: Bearer KEY`."
    return "The authorization header holds no Bearer key; write `Authorization: Bearer KEY`."


def parse_tenants(content: bytes) -> Keys:
    """Raise TenantsError. Unknown fields are left alone: a newer writer may know more."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TenantsError(f"must be JSON: {error}") from error
    listed = document.get("tenants") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise TenantsError('must be {"tenants": [{"tenant": ..., "keys": [{"sha256": ...}]}]}')
    callers: dict[str, Caller] = {}
    for position, item in enumerate(listed):
        for digest, caller in _keys_of(f"tenants[{position}]", item):
            if callers.setdefault(digest, caller).tenant != caller.tenant:
                raise TenantsError(f"tenants[{position}]: a key of another tenant")
    return Keys(callers)


def _keys_of(where: str, item: Any) -> Iterator[tuple[str, Caller]]:
    name, keys = (item.get("tenant"), item.get("keys")) if isinstance(item, dict) else (None, None)
    if not isinstance(name, str) or not TENANT_PATTERN.fullmatch(name):
        raise TenantsError(
            f"{where}.tenant: must be at most 63 of a-z, 0-9, '-', '.' and '_', not {name!r}"
        )
    if not isinstance(keys, list):
        raise TenantsError(f"{where}.keys: must be a list")
    for number, key in enumerate(keys):
        digest = key.get("sha256") if isinstance(key, dict) else None
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise TenantsError(f"{where}.keys[{number}].sha256: must be 64 hex digits")
        serves = key.get("class", RequestClass.INTERACTIVE.value)
        if serves not in list(RequestClass):
            known = " or ".join(RequestClass)
            raise TenantsError(f"{where}.keys[{number}].class: must be {known}, not {serves!r}")
        yield digest, Caller(name, RequestClass(serves))
