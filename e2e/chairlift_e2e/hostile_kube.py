"""The cluster in a dictionary on a bad day: calls fail, answers get lost, watches lag.

`watch` is told of each engine pod that is made or ended, and of each count that is written.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar

from chairlift_e2e.fake_kube import FakeKube
from chairlift_operator.kube.api import ApiError
from chairlift_operator.kube.pod_view import PodView, pod_view

Json = dict[str, Any]
T = TypeVar("T")
FAILURES: Final = (0, 403, 404, 409, 422, 429, 500, 503)  # 0: no answer, and perhaps done


class Watch(Protocol):
    def pod_made(self) -> None: ...
    def pod_ended(self, pod: PodView) -> None: ...
    def count_written(self, path: str) -> None: ...


class HostileKube(FakeKube):
    """failing: the share of calls that fail. lagging: the share of changes told only by `flush`."""

    def __init__(self, rng: random.Random, watch: Watch) -> None:
        super().__init__()
        self._rng, self._watch = rng, watch
        self.failing = self.lagging = 0.0
        self._untold: list[tuple[bool, Json]] = []

    async def find(self, path: str) -> Json | None:
        return await self._tried(f"GET {path}", lambda: FakeKube.find(self, path))

    async def create(self, path: str, manifest: Json, manager: str) -> Json:
        made = lambda: FakeKube.create(self, path, manifest, manager)  # noqa: E731
        return await self._tried(f"POST {path}", made)

    async def apply(self, path: str, manifest: Json, manager: str) -> Json:
        made = lambda: FakeKube.apply(self, path, manifest, manager)  # noqa: E731
        return await self._tried(f"APPLY {path}", made)

    async def patch(self, path: str, body: Json, manager: str) -> Json:
        if path.endswith("/scale"):
            self._watch.count_written(path)
        made = lambda: FakeKube.patch(self, path, body, manager)  # noqa: E731
        return await self._tried(f"PATCH {path}", made)

    async def delete(self, path: str, uid: str = "", grace_s: int | None = None) -> None:
        async def deleted() -> None:
            if path in self.objects:
                await FakeKube.delete(self, path, uid, grace_s)

        await self._tried(f"DELETE {path}", deleted)

    async def lose(self, name: str) -> None:
        """The pod and its node are gone, without a word."""
        if (fake := self.pods.pop(name, None)) is not None:
            await fake.stop()
        path = next(p for p in self.objects if p.endswith(f"/pods/{name}"))
        self._drop(path)

    def flush(self) -> None:
        untold, self._untold = self._untold, []
        for is_there, item in untold:
            if is_there:
                super()._tell(item)
            elif item["kind"] == "Pod":
                self.stores.pods.drop(item)
            elif item["kind"] in self.stores.children:
                self.stores.children[item["kind"]].drop(item)

    async def _tried(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        if self._rng.random() >= self.failing:
            return await work()
        status = self._rng.choice(FAILURES)
        if status == 0 and self._rng.random() < 0.5:
            await work()
        raise ApiError(status, f"{what}: a bad day")

    def _tell(self, item: Json) -> None:
        self._told(True, item)

    def _drop(self, path: str) -> None:
        self._told(False, self.objects.pop(path))

    def _told(self, is_there: bool, item: Json) -> None:
        self._untold.append((is_there, copy.deepcopy(item)))
        if self._rng.random() >= self.lagging:
            self.flush()

    def _make(self, owner: Json, template: Json) -> None:
        super()._make(owner, template)
        self._watch.pod_made()

    def _end(self, pod: Json) -> None:
        if (view := pod_view(pod)) is not None:
            self._watch.pod_ended(view)
        super()._end(pod)
