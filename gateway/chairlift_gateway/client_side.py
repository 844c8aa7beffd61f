"""The client's side of a connection: a request's body, and whether anybody still waits.

It knows no upstream. `proxy` uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from starlette.types import Message, Receive, Scope

from chairlift_gateway.body_memory import HeldBody
from chairlift_gateway.headers import find
from chairlift_gateway.openai_errors import too_large, too_slow
from chairlift_gateway.reply import Reply

# Between two parts of a body. A client that vanished without a word would hold what it has sent,
# and a drain, for as long as the process lives.
LONGEST_PAUSE_S: Final = 60.0


class ClientLeft(Exception):
    """Nobody is there any more to take the answer."""


async def read_body(scope: Scope, receive: Receive, body: HeldBody, limit_bytes: int) -> None:
    stated = find(scope["headers"], b"content-length")
    if stated is not None and int(stated) > limit_bytes:
        raise too_large(limit_bytes)
    while True:
        message = await _next_part(receive)
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body.add(message.get("body", b""))
        if body.num_bytes > limit_bytes:
            raise too_large(limit_bytes)
        if not message.get("more_body", False):
            body.seal()
            return


async def _next_part(receive: Receive) -> Message:
    try:
        async with asyncio.timeout(LONGEST_PAUSE_S):
            return await receive()
    except TimeoutError:
        raise too_slow(LONGEST_PAUSE_S) from None


async def while_client_stays(
    work: Coroutine[Any, Any, None], receive: Receive, reply: Reply
) -> None:
    """Run `work`; cancel it and raise ClientLeft once the client is gone.

    No server cancels an application whose client left: only `receive` tells.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_departure(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and not reply.is_finished:
            raise ClientLeft
        await working
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
