"""A pool's Secret: the tokens by which engines know their operator and their gateways.

Made once, by the first who comes. Nothing watches it, which would take the right to read every
Secret: it is looked at again while a pod does not come up, for that may be for want of it.
"""

from __future__ import annotations

import base64
import math
import secrets
from collections.abc import Callable
from typing import Any, Final

from chairlift_operator.kube import names
from chairlift_operator.kube.api import Api, ApiError
from chairlift_operator.kube.children import Owner, owned
from chairlift_operator.kube.objects import PoolObjects
from chairlift_operator.kube.owning import Foreign, check_ours
from chairlift_operator.kube.paths import SECRET
from chairlift_operator.spec import InferencePool

Json = dict[str, Any]
LOOK_AGAIN_S: Final = 30.0
_KEYS: Final = (names.ADMIN_TOKEN_KEY, names.INTERNAL_TOKEN_KEY)


class Tokens:
    """As one leadership knows them; `admin` after the first `ensure`."""

    def __init__(
        self, objects: PoolObjects, api: Api, owner: Owner, now_s: Callable[[], float]
    ) -> None:
        self._objects = objects
        self._api = api
        self._owner = owner
        self._now_s = now_s
        self._known: dict[str, str] = {}
        self._looked_at_s = -math.inf

    @property
    def admin(self) -> str:
        return self._known[names.ADMIN_TOKEN_KEY]

    async def ensure(self, pool: InferencePool) -> None:
        """A Secret that was deleted is made again as it was: engines run on with its tokens."""
        is_due = self._now_s() - self._looked_at_s >= LOOK_AGAIN_S
        if self._known and not (is_due and self.are_awaited()):
            return
        found = await self._found_or_made(pool)
        check_ours({**found, "kind": SECRET.name}, self._owner)
        known = {key: _text(found.get("data", {}).get(key)) for key in _KEYS}
        for key, token in known.items():
            if not token:
                name = f"Secret {pool.namespace}/{names.tokens(pool.name)}"
                raise Foreign(f"{name} holds no {key}: delete it, and a new one is made")
        self._known = known
        self._looked_at_s = self._now_s()

    def are_awaited(self) -> bool:
        """Whether a pod does not come up, perhaps for want of them."""
        engines = any(pod.counts and not pod.is_running for pod in self._objects.engines())
        return engines or any(gateway.ip is None for gateway in self._objects.gateways())

    async def _found_or_made(self, pool: InferencePool) -> Json:
        path = SECRET.path(pool.namespace, names.tokens(pool.name))
        found = await self._api.find(path)
        if found is not None:
            return found
        try:
            folder = SECRET.path(pool.namespace)
            return await self._api.create(folder, self._secret(pool), names.FIELD_MANAGER)
        except ApiError as error:
            if not error.is_conflict:
                raise
            return await self._api.get(path)

    def _secret(self, pool: InferencePool) -> Json:
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": names.tokens(pool.name)},
            "type": "Opaque",
            "stringData": {key: self._known.get(key) or secrets.token_urlsafe(32) for key in _KEYS},
        }
        return owned(body, pool, self._owner)


def _text(data: str | None) -> str:
    """As engines read it; "" for what can be no token."""
    try:
        text = base64.b64decode(data or "").decode("ascii").strip()
    except ValueError:
        return ""
    return text if text.isprintable() else ""
