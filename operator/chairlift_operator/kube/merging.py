"""Manifests laid over each other, and compared: nested objects and lists of named things. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

Json = dict[str, Any]
# What tells items of a list apart, by the list's name; other lists are taken whole.
_KEYS: Final = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
}
_APPENDED: Final = frozenset({"tolerations", "envFrom", "topologySpreadConstraints"})


def merged(base: Any, over: Any, name: str = "") -> Any:
    """`base` with `over` laid over it; neither is changed."""
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        both = dict(base)
        for key, value in over.items():
            both[key] = merged(base[key], value, key) if key in base else value
        return both
    if isinstance(base, list) and isinstance(over, list):
        if name in _APPENDED:
            return [*base, *over]
        if name in _KEYS:
            return _merged_items(base, over, _KEYS[name])
    return over


def _merged_items(base: list[Any], over: list[Any], key: str) -> list[Any]:
    items = {_identity(item, key): item for item in base}
    for item in over:
        identity = _identity(item, key)
        items[identity] = merged(items[identity], item) if identity in items else item
    return list(items.values())


def _identity(item: Any, key: str) -> Any:
    known = item.get(key) if isinstance(item, Mapping) else None
    return known if isinstance(known, str | int) else id(item)


def projected(live: Any, shape: Any) -> Any:
    """What `live` says where `shape` says something: the part of an object that is ours."""
    if isinstance(shape, Mapping):
        if not isinstance(live, Mapping):
            return live
        return {key: projected(live.get(key), value) for key, value in shape.items()}
    if isinstance(shape, list) and isinstance(live, list):
        return [projected(item, ours) for item, ours in _paired(live, shape)] + [
            "and more" for _ in range(len(live) - len(shape)) if not _is_named(shape)
        ]
    return live


def _paired(live: list[Any], shape: list[Any]) -> list[tuple[Any, Any]]:
    if _is_named(shape):
        by_name = {item.get("name"): item for item in live if isinstance(item, Mapping)}
        return [(by_name.get(item["name"]), item) for item in shape]
    return [(live[i] if i < len(live) else None, item) for i, item in enumerate(shape)]


def _is_named(items: Sequence[Any]) -> bool:
    return bool(items) and all(isinstance(item, Mapping) and "name" in item for item in items)


def digest(value: Any) -> str:
    """Names a JSON value; short enough for a label."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
