"""A request's life in one line of the log, written when it has ended, at level debug."""

from __future__ import annotations

import logging
from urllib.parse import quote

from chairlift_engine.request import FinishReason, Request

logger = logging.getLogger(__name__)


def log(request: Request, reason: FinishReason, now_s: float) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s", line(request, reason, now_s))


def line(request: Request, reason: FinishReason, now_s: float) -> str:
    """Names and values for people and grep; times in seconds since arrival, `-` for never."""

    def since_arrival(time_s: float | None) -> str:
        return "-" if time_s is None else f"{time_s - request.arrival_s:.3f}"

    values = {
        "request": request.id,
        "class": request.request_class,
        "tenant": quote(request.tenant, safe="-_.:@", errors="replace"),
        "end": reason,
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": request.num_cached_tokens,
        "output_tokens": request.num_output_tokens,
        "prefill_chunks": request.num_prefill_chunks,
        "preemptions": request.num_preemptions,
        "started_s": since_arrival(request.first_scheduled_s),
        "first_token_s": since_arrival(request.first_token_s),
        "last_token_s": since_arrival(request.last_token_s),
        "ended_s": since_arrival(now_s),
    }
    return " ".join(f"{name}={value}" for name, value in values.items())
