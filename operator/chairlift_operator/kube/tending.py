"""A pool's children as its spec has them: made, changed with the spec, set right when somebody else
changed them, removed when they are not wanted any more.

Compares before it writes, so a pool at rest costs no call. Whose an object is, is asked before
anything is written: what is not ours is left alone, and said.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chairlift_operator.kube import names
from chairlift_operator.kube.api import Api, ApiError
from chairlift_operator.kube.children import Owner, children
from chairlift_operator.kube.merging import digest, projected
from chairlift_operator.kube.objects import PoolObjects
from chairlift_operator.kube.owning import check_name, check_ours
from chairlift_operator.kube.paths import CONFIG_MAP, DEPLOYMENT, path_of
from chairlift_operator.kube.rollout import DRAIN_FIRST
from chairlift_operator.kube.settings import Settings
from chairlift_operator.spec import InferencePool
from chairlift_protocol.wire import RequestClass

logger = logging.getLogger(__name__)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Applied:
    """manifest: its digest. as_stored: what the server made of the part that is ours."""

    manifest: str
    as_stored: Any


class Tender:
    def __init__(
        self,
        objects: PoolObjects,
        api: Api,
        settings: Settings,
        owner: Owner,
        say: Callable[[str, str], None],
    ) -> None:
        self._objects = objects
        self._api = api
        self._settings = settings
        self._owner = owner
        self._say = say
        self._applied: dict[tuple[str, str], _Applied] = {}

    async def tend(self, pool: InferencePool, may_roll: bool) -> tuple[str, ...]:
        """What the API server refuses, in its words; everything else is as it should be.

        may_roll: whether running engines may be replaced for new start-up values.
        """
        wanted = children(pool, self._owner, self._settings)
        for item in self._objects.children():
            check_ours(item, self._owner)
        refused = []
        for manifest in wanted:
            try:
                if _is_engines(manifest):
                    await self._tend_engines(manifest, may_roll)
                else:
                    await self._tend_child(manifest)
            except ApiError as error:
                if not error.is_refusal:
                    raise
                refused.append(str(error))
        await self._prune({(m["kind"], m["metadata"]["name"]) for m in wanted})
        return tuple(refused)

    async def hold(
        self, request_class: RequestClass, paused: bool, surge: int, unavailable: int
    ) -> None:
        """The turnstile of a rollout: how the Deployment replaces pods, and whether it may now."""
        live = self._objects.deployment(request_class)
        rolling = {"maxSurge": surge, "maxUnavailable": unavailable}
        if live is None or _turnstile(live) == (paused, rolling):
            return
        await self._set_turnstile(live, paused, surge, unavailable)

    async def close(self, request_class: RequestClass) -> None:
        """No pod passes until the next `hold` says so."""
        await self.hold(request_class, True, *DRAIN_FIRST)

    async def _set_turnstile(self, live: Json, paused: bool, surge: int, unavailable: int) -> None:
        manifest = {
            "apiVersion": "apps/v1",
            "kind": DEPLOYMENT.name,
            "metadata": {
                "name": live["metadata"]["name"],
                "namespace": live["metadata"]["namespace"],
            },
            "spec": _turnstile_spec(paused, surge, unavailable),
        }
        path = path_of(manifest)
        self._objects.note(await self._api.apply(path, manifest, names.ROLLOUT_MANAGER))

    async def _tend_child(self, manifest: Json) -> None:
        live = self._objects.child(manifest["kind"], manifest["metadata"]["name"])
        if live is None:
            await check_name(self._api, manifest, self._owner)
            await self._apply(manifest)
        elif _rendered(live) != _rendered(manifest):
            await self._apply(manifest)
        elif self._has_drifted(live, manifest):
            self._tell_drift(manifest)
            await self._restore(manifest)

    async def _tend_engines(self, manifest: Json, may_roll: bool) -> None:
        """A release that renders the same spec otherwise restarts no engine."""
        live = self._objects.child(manifest["kind"], manifest["metadata"]["name"])
        if live is None:
            await check_name(self._api, manifest, self._owner)
            # Made by the turnstile's manager, closed: no pod before its number is known.
            closed = {**manifest["spec"], **_turnstile_spec(True, *DRAIN_FIRST)}
            first = {**manifest, "spec": closed}
            await self._api.apply(path_of(manifest), first, names.ROLLOUT_MANAGER)
            await self._apply(manifest)
        elif _revision(live) != _revision(manifest):
            if may_roll:
                await self._set_turnstile(live, True, *DRAIN_FIRST)
                await self._apply(manifest)
        elif _rendered(live) == _rendered(manifest) and self._has_drifted(live, manifest):
            self._tell_drift(manifest)
            await self._restore(manifest)

    async def _apply(self, manifest: Json) -> None:
        stored = await self._api.apply(path_of(manifest), manifest, names.FIELD_MANAGER)
        self._objects.note(stored)
        as_stored = projected(stored, _content(manifest))
        self._applied[_key(manifest)] = _Applied(digest(manifest), as_stored)

    async def _restore(self, manifest: Json) -> None:
        """Server-side apply leaves what others added to a list, and that may stand in the way: a
        second port of the same name. Then the lists become ours whole."""
        try:
            await self._apply(manifest)
        except ApiError as error:
            if not error.is_refusal:
                raise
            await self._api.patch(path_of(manifest), _content(manifest), names.FIELD_MANAGER)
            await self._apply(manifest)

    def _has_drifted(self, live: Json, manifest: Json) -> bool:
        """Compared with what the server made of it: it spells some values otherwise."""
        known = self._applied.get(_key(manifest))
        ours = projected(live, _content(manifest))
        if known is None or known.manifest != digest(manifest):
            return bool(ours != _content(manifest))
        return bool(ours != known.as_stored)

    def _tell_drift(self, manifest: Json) -> None:
        if _key(manifest) in self._applied:  # else it may only be spelled otherwise
            name = f"{manifest['kind']} {manifest['metadata']['name']}"
            self._say("DriftRepaired", f"{name} was changed by somebody else, and is set again")

    async def _prune(self, wanted: set[tuple[str, str]]) -> None:
        """Engines of a class that the spec has no more go once they have drained."""
        for item in self._objects.children():
            name = item["metadata"]["name"]
            if (item["kind"], name) in wanted or item["kind"] == CONFIG_MAP.name:
                continue
            if item["kind"] == DEPLOYMENT.name and self._still_runs(item):
                continue
            await self._api.delete(path_of(item), item["metadata"]["uid"])
            self._objects.forget(item)

    def _still_runs(self, deployment: Json) -> bool:
        request_class = deployment["metadata"].get("labels", {}).get(names.CLASS_LABEL)
        pods = [p for p in self._objects.engines() if p.request_class.value == request_class]
        return bool(deployment["spec"].get("replicas", 1) or pods)


def _key(manifest: Json) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _content(manifest: Json) -> Json:
    """Without what items of a list do not say of themselves."""
    return {name: part for name, part in manifest.items() if name not in ("apiVersion", "kind")}


def _is_engines(manifest: Json) -> bool:
    labels = manifest["metadata"]["labels"]
    return manifest["kind"] == DEPLOYMENT.name and names.CLASS_LABEL in labels


def _revision(item: Json) -> str:
    return str(item["metadata"].get("labels", {}).get(names.REVISION_LABEL, ""))


def _rendered(item: Json) -> str:
    return str(item["metadata"].get("annotations", {}).get(names.RENDERED_ANNOTATION, ""))


def _turnstile_spec(paused: bool, surge: int, unavailable: int) -> Json:
    rolling = {"maxSurge": surge, "maxUnavailable": unavailable}
    return {"paused": paused, "strategy": {"type": "RollingUpdate", "rollingUpdate": rolling}}


def _turnstile(live: Json) -> tuple[bool, Json | None]:
    spec = live["spec"]
    return bool(spec.get("paused")), spec.get("strategy", {}).get("rollingUpdate")
