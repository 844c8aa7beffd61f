"""What Kopf is told, and its index as a mapping: the rest of the operator sees plain objects."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import kopf

from chairlift_operator.kube.settings import CONNECT_S, REQUEST_S, WATCH_S, WATCH_SILENCE_S
from chairlift_operator.kube.watching import PoolKey, interned

Json = dict[str, Any]


def configure(settings: kopf.OperatorSettings) -> None:
    # Events come from the plan's reasons, not from log lines.
    settings.posting.enabled = False
    # Who leads is decided by a Lease. Kopf's peering stops nobody who is mid-write, and lets
    # operators of equal priority freeze each other.
    settings.peering.standalone = True
    # Pools are all we serve: no need for the right to watch every CRD and namespace.
    settings.scanning.disabled = True
    # A watch can hang silently behind a proxy.
    settings.watching.server_timeout = int(WATCH_S)  # sent as it is: "300.0" is refused
    settings.watching.client_timeout = WATCH_SILENCE_S
    settings.watching.connect_timeout = CONNECT_S
    settings.networking.request_timeout = REQUEST_S
    settings.networking.connect_timeout = CONNECT_S
    # After the last of its tries Kopf ends the process: an API server may be away for longer.
    settings.networking.error_backoffs = Patience()


class Patience:
    """Pauses between tries, in seconds, without an end."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1.0, 2.0, 5.0), itertools.repeat(10.0))


def slim(body: Mapping[str, Any]) -> Json:
    """Without what is never read and is half of the object."""
    metadata = {k: v for k, v in body["metadata"].items() if k != "managedFields"}
    slimmed: Json = interned({**body, "metadata": metadata})
    return slimmed


class PoolIndex(Mapping[PoolKey, Json]):
    """A live view. Of two objects of one name, one of them gone soon, the newer counts."""

    def __init__(self, index: kopf.Index[PoolKey, Json]) -> None:
        self._index = index

    def __getitem__(self, key: PoolKey) -> Json:
        return max(self._index[key], key=_version)

    def __iter__(self) -> Iterator[PoolKey]:
        return iter(list(self._index))

    def __len__(self) -> int:
        return len(self._index)


def _version(body: Json) -> int:
    return int(body["metadata"]["resourceVersion"])
