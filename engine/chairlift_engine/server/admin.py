"""The admin port: live policy, drain and state, for whoever holds the admin token.

Without a token file nobody has that token, and every call is refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from chairlift_engine.clock import Clock
from chairlift_engine.engine import StepSums
from chairlift_engine.live_policy import PolicyOutOfRange, StalePolicy
from chairlift_engine.server import errors
from chairlift_engine.server.body_reader import parse_object
from chairlift_engine.server.errors import ApiError
from chairlift_engine.server.origin import same_secret
from chairlift_engine.server.replica import Replica, Serving
from chairlift_engine.server.state import page, state_of
from chairlift_protocol import wire
from chairlift_protocol.policy import Policy, PolicyError

Json = dict[str, Any]


def admin_app(replica: Replica, admin_token: str | None, clock: Clock) -> ASGIApp:
    app = FastAPI(openapi_url=None)
    errors.install(app)
    _add_policy(app, replica)

    @app.post(wire.ADMIN_DRAIN_PATH)
    async def drain() -> Response:
        replica.draining = True
        return JSONResponse({"draining": True, "num_left": replica.num_in_flight})

    @app.get(wire.ADMIN_STATE_PATH)
    async def state(request: Request) -> Response:
        serving = replica.serving
        read = partial(state_of, now_s=clock.now_s())
        body = await serving.answered(serving.engine.request_snapshot(read))
        heartbeat_age_s = clock.now_s() - serving.engine.heartbeat_s
        known = {"draining": replica.draining, "num_in_flight": replica.num_in_flight}
        body = {**known, "heartbeat_age_s": round(heartbeat_age_s, 3), **body}
        if "text/plain" in request.headers.get("accept", ""):
            return PlainTextResponse(page(body))
        return JSONResponse(body)

    return _Guard(app, admin_token)


def _add_policy(app: FastAPI, replica: Replica) -> None:
    @app.get(wire.ADMIN_POLICY_PATH)
    async def read_policy() -> Response:
        return JSONResponse(_policy_answer(replica.serving))

    @app.patch(wire.ADMIN_POLICY_PATH)
    async def write_policy(request: Request) -> Response:
        serving = replica.serving
        try:
            with replica.bodies.body() as held:
                await held.receive(request)
                policy = Policy.from_json(parse_object(held.raw))
            await serving.answered(serving.engine.request_policy(policy))
        except (PolicyError, PolicyOutOfRange) as error:
            raise ApiError(400, str(error), code="invalid_policy") from None
        except StalePolicy as error:
            raise ApiError(409, str(error), code="stale_policy") from None
        return JSONResponse(_policy_answer(serving))


def _policy_answer(serving: Serving) -> Json:
    """What is effective may fall short of what is desired: a step ran out of memory.

    `observed` may exceed both for a while: a lowered batch size drains.
    """
    gauges, scheduler = serving.bridge.gauges, serving.engine.scheduler
    return {
        "desired": scheduler.desired.to_json(),
        "effective": scheduler.policy.to_json(),
        "observed": {
            "num_running": gauges.num_running,
            "num_waiting": gauges.num_waiting,
            "free_kv_tokens": gauges.num_free_blocks * serving.capacity.block_tokens,
            "last_step": _step(serving.bridge.last_step),
        },
        "capacity": {
            "batch_size": serving.capacity.batch_size,
            "step_tokens": serving.capacity.step_tokens,
            "kv_tokens": serving.capacity.kv_tokens,
            "block_tokens": serving.capacity.block_tokens,
            "model_length_tokens": serving.capacity.model_length_tokens,
        },
    }


def _step(sums: StepSums | None) -> Json | None:
    """What the last step really used; its generation says under which policy."""
    if sums is None:
        return None
    return {
        "generation": sums.generation.to_json(),
        "batch_size": sums.num_seqs,
        "step_tokens": sums.num_decode_seqs + sums.num_prefill_tokens,
        "num_decode_seqs": sums.num_decode_seqs,
        "num_prefill_tokens": sums.num_prefill_tokens,
        "step_s": sums.step_s,
    }


class _Guard:
    """Refuses every call without the token, before anything of it is read."""

    def __init__(self, app: ASGIApp, admin_token: str | None) -> None:
        self._app = app
        self._admin_token = admin_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._admits(Request(scope)):
            refusal = ApiError(401, "admin calls need Authorization: Bearer <admin token>")
            await refusal.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _admits(self, request: Request) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if self._admin_token is None or scheme.lower() != "bearer":
            return False
        return same_secret(token.strip(), self._admin_token)
