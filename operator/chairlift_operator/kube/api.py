"""The Kubernetes API over HTTP, as little of it as the operator needs: read, list, watch, create,
apply, patch.

Every failure is an `ApiError` with one sentence. Knows no kind but by its path; decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Self

import aiohttp

from chairlift_operator.kube.access import Access
from chairlift_operator.kube.settings import CONNECT_S, REQUEST_S, WATCH_S, WATCH_SILENCE_S

Json = dict[str, Any]
APPLY: Final = "application/apply-patch+yaml"  # JSON is YAML
MERGE: Final = "application/merge-patch+json"
_MAX_EVENT_BYTES: Final = 16 << 20
_LONGEST_MESSAGE: Final = 1000  # a server quotes what it refuses, and that may be a megabyte
_READS: Final = frozenset({"GET", "WATCH"})
_REFUSALS: Final = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        # What an apply of fields that the kind does not have is answered with.
        HTTPStatus.INTERNAL_SERVER_ERROR,
    }
)


class ApiError(RuntimeError):
    """status: 0 when no answer came."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_missing(self) -> bool:
        return self.status == HTTPStatus.NOT_FOUND

    @property
    def is_conflict(self) -> bool:
        return self.status == HTTPStatus.CONFLICT

    @property
    def is_refusal(self) -> bool:
        """What was asked for is not allowed or not valid, and another write may well be."""
        return self.status in _REFUSALS

    @property
    def is_gone(self) -> bool:
        """A watch from too long ago: list anew."""
        return self.status == HTTPStatus.GONE


class NotLeader(ApiError):
    """Nothing was written: somebody else may be leading."""

    def __init__(self) -> None:
        super().__init__(0, "not written: this operator does not lead, or not any more")


@dataclass(frozen=True, slots=True)
class Listed:
    items: list[Json]
    resource_version: str


@dataclass(frozen=True, slots=True)
class WatchEvent:
    type: str
    object: Json


class Api:
    """read_access: asked at the start, and again when the server does not know us any more.

    may_write: asked before each write. on_call: told verb and status of each call.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        read_access: Callable[[], Access],
        may_write: Callable[[], bool] = lambda: True,
        on_call: Callable[[str, int], None] = lambda verb, status: None,
    ) -> None:
        self._session = session
        self._read_access = read_access
        self._access = read_access()
        self._may_write = may_write
        self._on_call = on_call

    def guarded_by(self, may_write: Callable[[], bool]) -> Self:
        """The same server, written to only while the guard says so."""
        return type(self)(self._session, self._read_access, may_write, self._on_call)

    async def get(self, path: str) -> Json:
        return await self._ask("GET", path)

    async def find(self, path: str) -> Json | None:
        try:
            return await self.get(path)
        except ApiError as error:
            if error.is_missing:
                return None
            raise

    async def list(self, path: str, selector: str = "") -> Listed:
        items: list[Json] = []
        params = {"labelSelector": selector, "limit": "500"}
        while True:
            page = await self._ask("GET", path, params=params)
            items += page.get("items") or []
            metadata = page["metadata"]
            if not metadata.get("continue"):
                return Listed(items, metadata["resourceVersion"])
            params["continue"] = metadata["continue"]

    async def create(self, path: str, manifest: Json, manager: str) -> Json:
        return await self._ask("POST", path, manifest, {"fieldManager": manager})

    async def replace(self, path: str, manifest: Json, manager: str) -> Json:
        """Only over what its resourceVersion names."""
        return await self._ask("PUT", path, manifest, {"fieldManager": manager})

    async def apply(self, path: str, manifest: Json, manager: str) -> Json:
        params = {"fieldManager": manager, "force": "true"}
        return await self._ask("PATCH", path, manifest, params, APPLY)

    async def patch(self, path: str, body: Json, manager: str) -> Json:
        return await self._ask("PATCH", path, body, {"fieldManager": manager}, MERGE)

    async def delete(self, path: str, uid: str = "", grace_s: int | None = None) -> None:
        """Gone already is as good. uid: only that very object. grace_s: a pod's, else its own."""
        body: Json = {"propagationPolicy": "Background"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            await self._ask("DELETE", path, body)
        except ApiError as error:
            if not error.is_missing:
                raise

    async def watch(
        self, path: str, selector: str, resource_version: str
    ) -> AsyncIterator[WatchEvent]:
        """Until the server ends it, as it does after a while."""
        params = {
            "watch": "true",
            "labelSelector": selector,
            "resourceVersion": resource_version,
            "timeoutSeconds": f"{WATCH_S:.0f}",
            "allowWatchBookmarks": "true",
        }
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_S, sock_read=WATCH_SILENCE_S)
        with _translated():
            async with self._request("GET", path, params=params, timeout=timeout) as response:
                self._on_call("WATCH", response.status)
                if response.status != HTTPStatus.OK:
                    raise await _error(response)
                async for event in _lines(response):
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise ApiError(status.get("code", 500), status.get("message", "watch"))
                    yield WatchEvent(event["type"], event["object"])

    async def _ask(
        self,
        verb: str,
        path: str,
        body: Json | None = None,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Json:
        if verb not in _READS and not self._may_write():
            raise NotLeader
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type} if data is not None else {}
        timeout = aiohttp.ClientTimeout(total=REQUEST_S, sock_connect=CONNECT_S)
        with _translated():
            for is_last in (False, True):
                async with self._request(
                    verb, path, params=params, data=data, headers=headers, timeout=timeout
                ) as response:
                    self._on_call(verb, response.status)
                    if response.status == HTTPStatus.UNAUTHORIZED and not is_last:
                        self._access = self._read_access()
                        continue
                    if response.status >= HTTPStatus.BAD_REQUEST:
                        raise await _error(response)
                    answer: Json = await response.json()
                    return answer
        raise AssertionError("the loop returns or raises")

    def _request(
        self, verb: str, path: str, headers: Mapping[str, str] | None = None, **options: Any
    ) -> Any:
        told = dict(headers or {})
        if self._access.token:
            told["Authorization"] = f"Bearer {self._access.token}"
        url = self._access.server + path
        return self._session.request(verb, url, headers=told, ssl=self._access.tls, **options)


@contextmanager
def _translated() -> Iterator[None]:
    """The HTTP client's errors as ours."""
    try:
        yield
    except TimeoutError as error:
        raise ApiError(0, "the API server did not answer in time") from error
    except aiohttp.ClientError as error:
        why = str(error) or type(error).__name__
        raise ApiError(0, f"the API server cannot be reached: {why}") from error
    except json.JSONDecodeError as error:
        raise ApiError(0, f"the API server's answer is not understood: {error}") from error


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    """One JSON object a line; lines longer than the client's own limit too."""
    buffer = bytearray()
    async for chunk in response.content.iter_any():
        buffer += chunk
        *lines, rest = bytes(buffer).split(b"\n") if b"\n" in chunk else [bytes(buffer)]
        buffer = bytearray(rest)
        if len(buffer) > _MAX_EVENT_BYTES:
            raise ApiError(0, "a watch event is larger than any object may be")
        for line in lines:
            if line:
                yield json.loads(line)


async def _error(response: aiohttp.ClientResponse) -> ApiError:
    text = await response.text()
    try:
        message = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        message = text.strip()[:200] or response.reason or "no reason given"
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE]} ..."
    return ApiError(response.status, f"{response.method} {response.url.path}: {message}")
