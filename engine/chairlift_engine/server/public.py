"""The public port: OpenAI's completions and chat, and what a load balancer and Prometheus ask.

Routes only: what a body means is in `order`, how it is answered in `answer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift_engine.clock import Clock
from chairlift_engine.server import answers, errors
from chairlift_engine.server.answer import Answer
from chairlift_engine.server.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    UsageBody,
)
from chairlift_engine.server.body_reader import ignored_headers, parse
from chairlift_engine.server.openapi import DescribedApp, exposes, generates, tells, tells_of
from chairlift_engine.server.order import Order, OrderTaker
from chairlift_engine.server.origin import Origin, is_gateway, origin_of
from chairlift_engine.server.replica import Replica
from chairlift_engine.server.shapes import ChatShape, CompletionShape, Shape, tokens_used
from chairlift_protocol import wire

TakeOrder = Callable[[OrderTaker, bytes, Origin], Order]

STARTED: Final = int(time.time())


def public_app(replica: Replica, internal_token: str | None, clock: Clock) -> ASGIApp:
    app = DescribedApp(lambda: replica.model_name)
    errors.install(app, replica.observe_error)
    _add_generation(app, replica, internal_token, clock)
    _add_model(app, replica)
    _add_tokenizer(app, replica)
    _add_health(app, replica)
    _add_usage(app, replica, internal_token)
    return _Stamp(app, replica)


def _add_generation(
    app: FastAPI, replica: Replica, internal_token: str | None, clock: Clock
) -> None:
    async def answer(request: Request, take: TakeOrder, shape: Shape) -> Response:
        serving = replica.check_open()
        origin = origin_of(request.headers, internal_token, clock.now_s())
        serving.door.check(origin)
        body = replica.bodies.body()
        return Answer(replica, body, origin, partial(take, serving.orders), shape)

    @app.post(
        wire.COMPLETIONS_PATH,
        **generates(CompletionBody, answers.Completion, answers.CompletionChunk),
    )
    async def completions(request: Request) -> Response:
        return await answer(request, OrderTaker.completion, CompletionShape())

    @app.post(
        wire.CHAT_COMPLETIONS_PATH, **generates(ChatBody, answers.ChatCompletion, answers.ChatChunk)
    )
    async def chat_completions(request: Request) -> Response:
        return await answer(request, OrderTaker.chat, ChatShape())


def _add_model(app: FastAPI, replica: Replica) -> None:
    @app.get(wire.MODELS_PATH, **tells(answers.ModelList))
    async def models() -> Response:
        serving = replica.serving
        model = {
            "id": serving.model_name,
            "object": "model",
            "created": STARTED,
            "owned_by": "chairlift",
            "max_model_len": serving.capacity.model_length_tokens,
        }
        return JSONResponse({"object": "list", "data": [model]})


def _add_tokenizer(app: FastAPI, replica: Replica) -> None:
    @app.post(wire.TOKENIZE_PATH, **tells_of(TokenizeBody, answers.Tokens))
    async def tokenize(request: Request) -> Response:
        serving = replica.serving
        with replica.bodies.body() as held:
            await held.receive(request)
            tokens, ignored = await serving.in_turn(partial(serving.orders.tokens, held.raw))
        body = {
            "count": len(tokens),
            "max_model_len": serving.capacity.model_length_tokens,
            "tokens": tokens,
        }
        return JSONResponse(body, headers=ignored_headers(ignored))

    @app.post(wire.DETOKENIZE_PATH, **tells_of(DetokenizeBody, answers.Detokenized))
    async def detokenize(request: Request) -> Response:
        serving = replica.serving
        with replica.bodies.body() as held:
            await held.receive(request)
            text, ignored = await serving.in_turn(partial(serving.orders.text, held.raw))
        return JSONResponse({"prompt": text}, headers=ignored_headers(ignored))


def _add_health(app: FastAPI, replica: Replica) -> None:
    @app.get(wire.LIVE_PATH, **tells(answers.Alive, also_503=True))
    async def live() -> Response:
        return JSONResponse({"alive": replica.is_alive}, 200 if replica.is_alive else 503)

    @app.get(wire.READY_PATH, **tells(answers.Ready, also_503=True))
    async def ready() -> Response:
        reason = replica.not_ready_because
        return JSONResponse({"ready": reason is None, "reason": reason}, 503 if reason else 200)

    @app.get(wire.LOAD_PATH, **tells(answers.Load))
    async def load() -> Response:
        if (known := replica.load) is None:
            raise errors.loading()
        return JSONResponse(known.to_json())

    @app.get(wire.METRICS_PATH, **exposes())
    async def metrics() -> Response:
        return Response(replica.serving.bridge.render_metrics(), media_type=CONTENT_TYPE_LATEST)


def _add_usage(app: FastAPI, replica: Replica, internal_token: str | None) -> None:
    @app.post(wire.USAGE_PATH, include_in_schema=False)
    async def usage(request: Request) -> Response:
        if not is_gateway(request.headers, internal_token):
            raise errors.ApiError(403, f"{wire.USAGE_PATH} is for this pool's gateways")
        with replica.bodies.body() as held:
            await held.receive(request)
            asked = parse(held.raw, UsageBody)
        if asked.end:
            await replica.usage.stop(asked.requests)
        known = ((each, replica.usage.used(each)) for each in asked.requests)
        told = {
            each: {
                **tokens_used(used.num_prompt_tokens, used.num_output_tokens),
                "final": used.is_final,
            }
            for each, used in known
            if used is not None
        }
        return JSONResponse({"used": told})


class _Stamp:
    """Every response says the replica's load, and echoes the request id that the client gave."""

    def __init__(self, app: ASGIApp, replica: Replica) -> None:
        self._app = app
        self._replica = replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Request(scope).headers.get(wire.REQUEST_ID_HEADER)

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if (load := self._replica.load) is not None:
                    headers[wire.LOAD_HEADER] = load.to_header()
                if request_id is not None:
                    headers[wire.REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, stamped)
