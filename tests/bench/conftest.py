"""A chat server that does as it is told, for the load generator to talk to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

Handler = Callable[[web.Request], Any]


def _event(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


class Script:
    """Writes a chat stream piece by piece."""

    role = _event({"role": "assistant", "content": ""})
    done = b"data: [DONE]\n\n"
    error = b'data: {"error": {"message": "The engine failed.", "type": "server_error"}}\n\n'

    @staticmethod
    def word(text: str) -> bytes:
        return _event({"content": text})

    @staticmethod
    def finish(reason: str = "stop") -> bytes:
        return _event({}, reason)

    @staticmethod
    def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"


@pytest.fixture
def script() -> type[Script]:
    return Script


@pytest.fixture
def chat_server() -> Callable[[Handler], AbstractAsyncContextManager[str]]:
    """`async with chat_server(handler) as url`: serves POST /v1/chat/completions on a free port."""

    @asynccontextmanager
    async def serve(handler: Handler) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    return serve
