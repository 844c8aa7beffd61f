"""Which headers cross the gateway, in either direction, and what a request is called.

It knows no sockets. `proxy` and `relay` let headers cross; both sides' connections write heads.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from chairlift_protocol.wire import (
    IGNORED_FIELDS_HEADER,
    INTERNAL_HEADERS,
    REQUEST_ID_HEADER,
)

RawHeader = tuple[bytes, bytes]
RawHeaders = Iterable[RawHeader]

_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
     b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)  # fmt: skip
# Headers that the gateway writes itself towards the engine, or that end here: an API key is for the
# gateway's eyes, and an answer that came compressed could not be read for its tokens.
_NOT_TO_ENGINE = _HOP_BY_HOP | {
    b"host", b"content-length", b"expect", b"authorization", b"cookie", b"accept-encoding",
    REQUEST_ID_HEADER.encode(), *(name.encode() for name in INTERNAL_HEADERS),
}  # fmt: skip
_NOT_TO_CLIENT = _HOP_BY_HOP | {b"content-length", b"date", b"server", REQUEST_ID_HEADER.encode()}
# An engine may know internal headers that this gateway does not.
_INTERNAL_PREFIX = b"x-chairlift-"
_FOR_CLIENTS = frozenset((IGNORED_FIELDS_HEADER.encode(),))

_LONGEST_ID = 128
_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,%d}" % _LONGEST_ID)
_NUM_UNIQUE_HEX = 12


@dataclass(frozen=True, slots=True)
class RequestNames:
    """What the client calls its request, and the name that no other request has."""

    for_client: str
    unique: str


def request_names(given: bytes | None) -> RequestNames:
    """Keep a sane client's id; two live requests of one id still differ towards the engine."""
    suffix = secrets.token_hex(_NUM_UNIQUE_HEX // 2)
    if given is not None and _SANE_ID.fullmatch(given):
        name = given.decode("ascii")
        return RequestNames(name, f"{name[: _LONGEST_ID - _NUM_UNIQUE_HEX - 1]}-{suffix}")
    name = f"req-{secrets.token_hex(4)}{suffix}"
    return RequestNames(name, name)


def towards_engine(headers: RawHeaders, trusted_header: bytes | None = None) -> list[RawHeader]:
    """What a client's headers leave for the engine, before the gateway adds its own.

    trusted_header: what another gateway told this one alone.
    """
    ends_here = _NOT_TO_ENGINE | {trusted_header} if trusted_header else _NOT_TO_ENGINE
    kept = _crossing(headers, ends_here)
    return [pair for pair in kept if not pair[0].startswith(_INTERNAL_PREFIX)]


def towards_client(headers: RawHeaders) -> list[RawHeader]:
    return [
        (name, value)
        for name, value in _crossing(headers, _NOT_TO_CLIENT)
        if name in _FOR_CLIENTS or not name.startswith(_INTERNAL_PREFIX)
    ]


def written_head(first_line: bytes, headers: RawHeaders) -> bytes:
    """As it is sent. Raise ValueError for what would end a line early."""
    lines = [first_line, *(name + b": " + value for name, value in headers)]
    head = b"\r\n".join([*lines, b"", b""])
    num_ends = len(lines) + 1
    if not num_ends == head.count(b"\r") == head.count(b"\n") or b"\0" in head:
        raise ValueError("a header must be one line of text")
    return head


def find(headers: RawHeaders, name: bytes) -> bytes | None:
    return next((value for key, value in headers if key.lower() == name), None)


def find_all(headers: RawHeaders, name: bytes) -> list[bytes]:
    return [value for key, value in headers if key.lower() == name]


def bearer_key(headers: RawHeaders) -> bytes | None:
    given = find(headers, b"authorization")
    scheme, _, key = (given or b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" and key.strip() else None


def _crossing(headers: RawHeaders, stopped: frozenset[bytes]) -> list[RawHeader]:
    pairs = [(name.lower(), value) for name, value in headers]
    named_by_connection = {
        token.strip().lower()
        for name, value in pairs
        if name == b"connection"
        for token in value.split(b",")
    }
    ends_here = stopped | named_by_connection if named_by_connection else stopped
    return [pair for pair in pairs if pair[0] not in ends_here]
