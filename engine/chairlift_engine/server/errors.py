"""What a client is told when something is refused or fails, in OpenAI's error shape.

One exception type carries status, sentence and code; the apps turn it into a response, a stream
into an error frame. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from chairlift_engine.request import FinishReason

RETRY_AFTER_S: Final = 5  # where nothing better is known
_TYPES: Final = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """`param` names the field at fault; `code` is for programs, the message for people."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        if self.status in _TYPES:
            return _TYPES[self.status]
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        headers = {"retry-after": str(self.retry_after_s)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def invalid(param: str, sentence: str, code: str | None = None) -> ApiError:
    return ApiError(400, f"{param}: {sentence}", param=param, code=code)


def unsupported(param: str) -> ApiError:
    return ApiError(
        400,
        f"{param}: is not supported by this engine; leave it out",
        param=param,
        code="unsupported_parameter",
    )


def draining() -> ApiError:
    return ApiError(503, "this engine is draining and takes no new work", code="draining")


def loading() -> ApiError:
    return ApiError(503, "the model is still loading", code="loading")


def engine_failed() -> ApiError:
    return ApiError(500, "the engine failed before the answer was complete", code="engine_failed")


def engine_gone() -> ApiError:
    return ApiError(503, "the engine failed and this process is ending", code="engine_failed")


def busy() -> ApiError:
    return ApiError(
        503, "this engine is receiving as much as it may hold; try again", code="busy",
        retry_after_s=1,
    )  # fmt: skip


def queue_full(num_waiting: int, retry_after_s: int) -> ApiError:
    return ApiError(
        503,
        f"this engine's queue is full: {num_waiting} requests wait",
        code="queue_full",
        retry_after_s=retry_after_s,
    )


def tenant_queue_full(tenant: str, max_waiting: int, retry_after_s: int) -> ApiError:
    return ApiError(
        429,
        f"tenant {tenant!r} may have at most {max_waiting} requests waiting",
        code="tenant_queue_full",
        retry_after_s=retry_after_s,
    )


def queue_timeout(retry_after_s: int) -> ApiError:
    return ApiError(
        503,
        "this request could not be started in its time",
        code="queue_timeout",
        retry_after_s=retry_after_s,
    )


def interrupted(reason: FinishReason, retry_after_s: int) -> ApiError:
    """Why a request ended that neither its client nor its tokens ended."""
    match reason:
        case FinishReason.ERROR:
            return engine_failed()
        case FinishReason.MEMORY:
            return ApiError(
                503, "the engine ran out of memory; try again", code="out_of_memory",
                retry_after_s=retry_after_s,
            )  # fmt: skip
        case FinishReason.QUEUE_TIMEOUT:
            return queue_timeout(retry_after_s)
        case FinishReason.DEADLINE:
            return ApiError(
                504, "this request could not be finished in its time", code="deadline_exceeded"
            )
        case _:
            return ApiError(
                503, "the engine gave this request up to shut down", code="shutting_down"
            )


REFUSALS: Final = (
    "busy",
    "draining",
    "invalid",
    "queue_full",
    "queue_timeout",
    "request_too_large",
    "tenant_queue_full",
)


def refusal_of(error: ApiError) -> str | None:
    """Under which of REFUSALS it counts; None for what was begun and failed."""
    if error.code in REFUSALS:
        return error.code
    return "invalid" if 400 <= error.status < 500 else None


def install(app: FastAPI, on_error: Callable[[ApiError], None] = lambda _: None) -> None:
    """Every refusal of this app has OpenAI's shape, also an unknown path's."""

    async def on_api_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        on_error(error)
        return error.response()

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = ApiError(error.status_code, message).response()
        response.headers.update(error.headers or {})  # of 405, the methods that there are
        return response

    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, "the server failed to handle this request").response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)
