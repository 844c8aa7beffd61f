"""Runs the script in Redis: what is asked while an answer is awaited goes together, in one write.

It keeps no state of tenants. A call's future holds the outcome, or RedisFailure; whether a call
that got no answer was carried out is not known, unless it was never sent. `keeper` and `upkeep`
call it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from chairlift_gateway.quota.connection import PatientConnection
from chairlift_gateway.quota.law import Outcome
from chairlift_gateway.quota.script import SCRIPT, outcome_of, script_keys
from chairlift_protocol.quota import QuotaKeys

# Some 30 µs of Redis each: a batch takes far less than a caller waits.
MAX_BATCH: Final = 64
# What a client can meet on its way to Redis; OSError also from an unreadable password file.
REDIS_ERRORS: Final = (RedisError, OSError, TimeoutError)

Answer = tuple[Outcome, str]


class RedisFailure(Exception):
    """Redis did not carry it out, or did not say so; the message is for the log."""


@dataclass(slots=True, eq=False)
class Call:
    """is_sent: it may have been carried out, also where its future failed."""

    operation: str
    holder: str
    fallback: str
    arguments: Sequence[Any]
    future: asyncio.Future[Answer]
    is_sent: bool = field(default=False)


class Store:
    """on_failure hears of a batch that failed, and why; on_success of one that was answered."""

    def __init__(
        self, client: Redis, keys: QuotaKeys,
        on_failure: Callable[[str], None], on_success: Callable[[], None], script: str = SCRIPT,
    ) -> None:  # fmt: skip
        self._client = client
        # One of its own: a pool's book-keeping costs as much again as a command.
        self._connection: PatientConnection = (
            client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        )
        self._keys = keys
        self._on_failure = on_failure
        self._on_success = on_success
        self._script = script
        self._sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        self._waiting: deque[Call] = deque()
        self._has_waiting = asyncio.Event()
        self._is_closed = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def submit(self, holder: str, fallback: str, operation: str, *arguments: Any) -> Call:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        call = Call(operation, holder, fallback, arguments, future)
        self._waiting.append(call)
        self._has_waiting.set()
        self._is_idle.clear()
        return call

    async def emptied(self) -> None:
        """Return once everything that was submitted has been answered, or has failed."""
        await self._is_idle.wait()

    def close(self) -> None:
        """What has not been sent never will be; `work` returns."""
        self._is_closed = True
        for call in self._waiting:
            self._resolve(call, RedisFailure("the gateway ends"))
        self._waiting.clear()
        self._has_waiting.set()

    async def work(self) -> None:
        """Send what is submitted, until closed."""
        try:
            while not self._is_closed:
                await self._has_waiting.wait()
                if batch := self._next_batch():
                    await self._carry_out(batch)
                if not self._waiting:
                    self._is_idle.set()
        finally:
            await self._connection.disconnect(nowait=True)

    def _next_batch(self) -> list[Call]:
        batch: list[Call] = []
        while self._waiting and len(batch) < MAX_BATCH:
            call = self._waiting.popleft()
            if not call.future.done():  # nobody waits for it any more
                batch.append(call)
        if not self._waiting:
            self._has_waiting.clear()
        return batch

    async def _carry_out(self, batch: list[Call]) -> None:
        try:
            replies = await self._send(batch)
            again = [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
            if again:
                await self._client.script_load(self._script)
                for number, reply in zip(
                    again, await self._send([batch[n] for n in again]), strict=True
                ):
                    replies[number] = reply
        except Exception as error:  # whatever it is, it costs no more than this batch
            self._fail(batch, error)
            return
        self._answer(batch, replies)

    async def _send(self, batch: list[Call]) -> list[Any]:
        await self._client.connection_pool.ensure_connection(self._connection)
        commands = []
        for call in batch:
            call.is_sent = True
            keys = script_keys(self._keys, call.holder, call.fallback)
            names = (call.operation, call.holder, call.fallback)
            commands.append(("EVALSHA", self._sha, len(keys), *keys, *names, *call.arguments))
        return await self._connection.exchange(commands)

    def _answer(self, batch: list[Call], replies: list[Any]) -> None:
        failure: Exception | None = None
        for call, reply in zip(batch, replies, strict=True):
            answer = _understood(reply)
            if isinstance(answer, Exception):
                failure = answer
                self._resolve(call, failure)
            elif not call.future.done():
                call.future.set_result(answer)
        if failure is None:
            self._on_success()
        else:
            self._on_failure(said(failure))

    def _fail(self, batch: list[Call], error: Exception) -> None:
        for call in batch:
            self._resolve(call, error)
        self._on_failure(said(error))

    def _resolve(self, call: Call, error: Exception) -> None:
        if not call.future.done():
            call.future.set_exception(RedisFailure(said(error)))
            call.future.exception()  # whoever asked may have gone; that is no news


def _understood(reply: Any) -> Answer | Exception:
    if isinstance(reply, Exception):
        return reply
    try:
        return outcome_of(reply)
    except (TypeError, ValueError) as error:
        return error


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
