"""Refusals in the shape that OpenAI's clients understand: a response, or a stream's last event.

It knows no sockets. Whoever refuses raises one; `front_door`, `reply` and `app` render them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus


class Refusal(Exception):
    """Why a request gets no answer from an engine; `message` is written for the client."""

    def __init__(
        self, status: HTTPStatus, code: str, message: str, *, retry_after_s: int | None = None,
        more_headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self._more_headers = more_headers

    def body(self) -> bytes:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        return json.dumps({"error": error}, separators=(",", ":")).encode()

    def event(self) -> bytes:
        """One server-sent event; a stream that ends so never sends `[DONE]`."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        body_headers = [(b"content-type", b"application/json"), *self._more_headers]
        if self.retry_after_s is not None:
            body_headers.append((b"retry-after", str(self.retry_after_s).encode()))
        return body_headers


def not_http() -> Refusal:
    return Refusal(
        HTTPStatus.BAD_REQUEST, "invalid_http", "What was sent is no request of HTTP/1.1."
    )


def head_too_large(limit_bytes: int) -> Refusal:
    return Refusal(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        "headers_too_large",
        f"Request line and headers are longer than the {limit_bytes} bytes that this gateway "
        "takes.",
    )


def unauthorized(why: str) -> Refusal:
    challenge = [(b"www-authenticate", b"Bearer")]
    return Refusal(HTTPStatus.UNAUTHORIZED, "invalid_api_key", why, more_headers=challenge)


def not_yet_known() -> Refusal:
    return Refusal(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "tenants_unknown",
        "This gateway has not learnt yet which API keys there are; please try again.",
        retry_after_s=1,
    )


def class_not_allowed(tenant: str, request_class: str) -> Refusal:
    """No Retry-After: another try helps only after somebody has changed the limits."""
    return Refusal(
        HTTPStatus.FORBIDDEN,
        "class_not_allowed",
        f"Not allowed for tenant {tenant}'s {request_class} class: its limits admit no request.",
    )


def quota_unavailable() -> Refusal:
    return Refusal(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "quota_unavailable",
        "Quotas cannot be checked at the moment; please try again.",
        retry_after_s=1,
    )


def too_large(limit_bytes: int) -> Refusal:
    return Refusal(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "request_too_large",
        f"The request body is longer than the {limit_bytes} bytes that this gateway takes.",
    )


def too_slow(pause_s: float) -> Refusal:
    return Refusal(
        HTTPStatus.REQUEST_TIMEOUT,
        "request_timeout",
        f"Nothing more of the request body came for {pause_s:g} s.",
    )


def busy() -> Refusal:
    return Refusal(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "busy",
        "The request bodies that this gateway holds, of you or of all, take as much memory as they "
        "may; please try again.",
        retry_after_s=1,
    )


def not_ready(why: str) -> Refusal:
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "no_replica_ready", why, retry_after_s=5)


def unreachable() -> Refusal:
    return Refusal(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "upstream_unreachable",
        "No engine replica could be reached, nor on a second try; please try again.",
        retry_after_s=1,
    )


class BrokenOff(Refusal):
    """A replica's failure in the middle of its answer."""

    def __init__(self) -> None:
        super().__init__(
            HTTPStatus.BAD_GATEWAY,
            "upstream_failed",
            "The engine replica failed before its answer was complete.",
        )


class AnswerTooLarge(Refusal):
    """What was asked for, which is no replica's failure."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            HTTPStatus.BAD_GATEWAY,
            "upstream_answer_too_large",
            f"The answer is longer than {limit_bytes} bytes; ask for less, or stream it.",
        )


def shutting_down() -> Refusal:
    return Refusal(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "gateway_shutting_down",
        "The gateway is shutting down and could not wait for this answer any longer.",
        retry_after_s=1,
    )


def internal() -> Refusal:
    return Refusal(
        HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", "The gateway failed on this request."
    )
