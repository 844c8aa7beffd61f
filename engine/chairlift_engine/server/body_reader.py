"""From the bytes of a request to a checked body. Knows no tokenizer and no engine.

`HeldBody` bounds what a client may send, `BodyMemory` what all of them may. `parse` may take tens
of milliseconds for a big body, so it runs off the event loop.
"""

from __future__ import annotations

import json
import reprlib
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect

from chairlift_engine.server.bodies import Body
from chairlift_engine.server.errors import ApiError, busy, invalid
from chairlift_protocol.wire import IGNORED_FIELDS_HEADER

MAX_BODY_BYTES: Final = 10 * 2**20
# A client that is still sending does not read: what is over the bound is taken in and dropped, up
# to here, so that it gets its answer rather than a reset connection.
MAX_DROPPED_BYTES: Final = 4 * MAX_BODY_BYTES
# Bodies that are held at once; a storm of big ones is refused beyond it.
MAX_HELD_BYTES: Final = 256 * 2**20
MAX_IGNORED_BYTES: Final = 1024

B = TypeVar("B", bound=Body)


class BodyMemory:
    """What all bodies that are being received or read hold together."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0

    def body(self) -> HeldBody:
        return HeldBody(self)


class HeldBody:
    """A body's bytes, from its first one until it has been read: `drop` it then."""

    def __init__(self, memory: BodyMemory) -> None:
        self.raw = b""
        self._memory = memory
        self._num_bytes = 0

    async def receive(self, request: Request) -> None:
        """Raise ApiError when it is too big, or when too much is held."""
        chunks: list[bytes] = []
        num_bytes = 0
        try:
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes <= MAX_BODY_BYTES:
                    self._hold(len(chunk))
                    chunks.append(chunk)
                else:
                    chunks.clear()
                    self.drop()
                    if num_bytes > MAX_DROPPED_BYTES:
                        break
        except ClientDisconnect:
            raise ApiError(400, "the body ended before it was complete") from None
        if num_bytes > MAX_BODY_BYTES:
            raise ApiError(
                413, f"the body must not exceed {MAX_BODY_BYTES} bytes", code="request_too_large"
            )
        self.raw = b"".join(chunks)

    def drop(self) -> None:
        self.raw = b""
        self._memory.held_bytes -= self._num_bytes
        self._num_bytes = 0

    def _hold(self, num_bytes: int) -> None:
        if self._memory.held_bytes + num_bytes > self._memory.max_bytes:
            raise busy()
        self._memory.held_bytes += num_bytes
        self._num_bytes += num_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.drop()


def parse_object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(value).__name__}")
    return value


def parse(raw: bytes, body: type[B]) -> B:
    try:
        return body.model_validate(parse_object(raw))
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0]) from None


def ignored_headers(names: list[str]) -> dict[str, str]:
    return {IGNORED_FIELDS_HEADER: _quoted(names)} if names else {}


def _quoted(names: list[str]) -> str:
    """Bounded and plain ASCII, whatever the names are."""
    text = ""
    for name in names:
        quoted = quote(name, safe="-_.", errors="replace")
        if len(text) + len(quoted) > MAX_IGNORED_BYTES:
            return f"{text},..." if text else "..."
        text += f",{quoted}" if text else quoted
    return text


def _refusal(error: ErrorDetails) -> ApiError:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return invalid(name, "is missing")
    message = error["msg"].removeprefix("Value error, ").replace("Input should", "must")
    if error["type"] != "value_error":
        message += f", not {_shown(error['input'])}"
    return invalid(name, message)


def _shown(value: object) -> str:
    """Short and printable: a client's own mistake, quoted back."""
    return reprlib.repr(value).encode("ascii", "backslashreplace").decode()
