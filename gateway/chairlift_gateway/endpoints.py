"""Where the gateway learns which replicas exist: a seam, and the file that a supervisor replaces.

The list holds only replicas that are ready, not draining and open to this gateway; whoever writes
it decides that. It knows nothing of load. `upstream` reads it before a retry, `app` watches it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from chairlift_gateway.choice import Replica
from chairlift_protocol.wire import RequestClass

POLL_S = 0.2

logger = logging.getLogger("chairlift_gateway.endpoints")


class EndpointsError(ValueError):
    """A list of endpoints that cannot be used; the message names the field."""


class EndpointSource(Protocol):
    """A list that changes by itself. It is never empty because it could not be read."""

    def latest(self) -> tuple[Replica, ...]:
        """The last good list, looked up anew where that is cheap."""

    async def watch(self, publish: Callable[[tuple[Replica, ...]], None]) -> None:
        """Publish every list, the first at once, until cancelled."""


class FileEndpoints:
    """A JSON file that is replaced atomically; a bad one keeps the last good list.

    The constructor reads it and raises EndpointsError: without a first list there is none to keep.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = None
        self._replicas: tuple[Replica, ...] = ()
        self._missing = False
        try:
            self._reread()
        except OSError as error:
            raise EndpointsError(f"cannot read {path}: {error.strerror}") from error

    def latest(self) -> tuple[Replica, ...]:
        try:
            self._reread()
            self._missing = False
        except EndpointsError as error:
            self._keep(str(error))
        except OSError as error:
            if not self._missing:
                self._keep(f"cannot read {self._path}: {error.strerror}")
            self._missing = True
        return self._replicas

    async def watch(self, publish: Callable[[tuple[Replica, ...]], None]) -> None:
        while True:
            publish(self.latest())
            await asyncio.sleep(POLL_S)

    def _reread(self) -> None:
        stat = os.stat(self._path)
        if (stat.st_mtime_ns, stat.st_ino, stat.st_size) == self._seen:
            return
        with self._path.open("rb") as file:
            stat = os.fstat(file.fileno())
            self._seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            content = file.read()
        try:
            self._replicas = parse_endpoints(content)
        except EndpointsError as error:
            raise EndpointsError(f"{self._path}: {error}") from error

    def _keep(self, why: str) -> None:
        logger.warning("%s; keeping the last %d replica(s)", why, len(self._replicas))


def parse_endpoints(content: bytes) -> tuple[Replica, ...]:
    """Raise EndpointsError. Unknown fields are left alone: a newer writer may know more."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise EndpointsError(f"must be JSON: {error}") from error
    listed = document.get("replicas") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise EndpointsError('must be {"replicas": [{"name": ..., "url": ..., "class": ...}]}')
    replicas = tuple(_replica(position, item) for position, item in enumerate(listed))
    names = [replica.name for replica in replicas]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise EndpointsError(f"replicas: the name {twice[0]!r} is given twice")
    return replicas


def _replica(position: int, item: Any) -> Replica:
    name, url = (item.get("name"), item.get("url")) if isinstance(item, dict) else (None, None)
    if not isinstance(name, str) or not name:
        raise EndpointsError(f"replicas[{position}].name: must be a text, not {name!r}")
    if not isinstance(url, str) or not _is_base_url(url):
        raise EndpointsError(
            f"replicas[{position}].url: must be like http://127.0.0.1:8000, not {url!r}"
        )
    serves = item.get("class", RequestClass.INTERACTIVE.value)
    if serves not in list(RequestClass):
        known = " or ".join(RequestClass)
        raise EndpointsError(f"replicas[{position}].class: must be {known}, not {serves!r}")
    return Replica(name, url.rstrip("/"), RequestClass(serves))


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    is_bare = url.isascii() and not (parts.query or parts.fragment or parts.username)
    return parts.scheme == "http" and bool(parts.hostname) and port != 0 and is_bare
