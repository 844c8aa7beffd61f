"""Whether there is anything to operate here: asked of the API server until it answers.

A server that is away for a while is waited for. What no waiting heals ends the operator, with what
to do about it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

from chairlift_operator.kube import names
from chairlift_operator.kube.api import Api, ApiError
from chairlift_operator.kube.paths import POOL

logger = logging.getLogger(__name__)

PAUSE_S: Final = 5.0


class CannotOperate(RuntimeError):
    """The message says what to change in the cluster."""


async def until_served(
    api: Api,
    namespace: str | None,
    on_try: Callable[[], None],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Return once InferencePools can be listed; CannotOperate when they never will be.

    namespace: where to ask, None for all. on_try: called before each try.
    """
    while True:
        on_try()
        try:
            await api.list(POOL.path(namespace))
        except ApiError as error:
            if not _may_heal(error):
                raise CannotOperate(_what_to_do(error)) from error
            logger.warning("%s; tried again in %.0f s", error, PAUSE_S)
        else:
            return
        await pause(PAUSE_S)


def _may_heal(error: ApiError) -> bool:
    """No answer came, or one that says to come back later."""
    status = error.status
    return status in (0, HTTPStatus.TOO_MANY_REQUESTS) or status >= HTTPStatus.INTERNAL_SERVER_ERROR


def _what_to_do(error: ApiError) -> str:
    if error.is_missing:
        return (
            f"the API server knows no {names.PLURAL}.{names.GROUP}: apply crds/, or have the "
            "chart do it by crds.install=true"
        )
    if error.status == HTTPStatus.FORBIDDEN:
        return f"{error}: give the operator's service account the rights in docs/rbac.md"
    return str(error)
