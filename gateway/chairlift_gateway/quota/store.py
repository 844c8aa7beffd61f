"""Runs the script in Redis: what is asked while an answer is awaited goes together, in one write.

It keeps no state of tenants. A call's future holds the outcome, or RedisFailure; whether a call
that got no answer was carried out is not known, unless it was never sent. `keeper` and `upkeep`
call it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from chairlift_gateway.quota.connection import PatientConnection
from chairlift_gateway.quota.law import Outcome
from chairlift_gateway.quota.script import SCRIPT, outcome_of, script_keys
from chairlift_gateway.quota.wire import Command, Replies, Wire
from chairlift_protocol.quota import QuotaKeys

# Some 30 µs of Redis each: a batch takes far less than a caller waits.
MAX_BATCH: Final = 64
# A write to Redis costs as much as the rest of a settlement; a busy gateway asks again sooner.
LATER_S: Final = 0.005
# What a client can meet on its way to Redis; OSError also from an unreadable password file.
REDIS_ERRORS: Final = (RedisError, OSError, TimeoutError)
# Another connection may fare better: it authenticates anew, or leads to the new primary.
ELSEWHERE: Final = ("NOAUTH ", "LOADING ", "READONLY ")
_ENDING: Final = "the gateway ends"

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

    def fail(self, why: str) -> None:
        if not self.future.done():
            self.future.set_exception(RedisFailure(why))
            self.future.exception()  # whoever asked may have gone; that is no news


class Store:
    """on_failure hears of a batch that failed, and why; on_success of one that was answered."""

    def __init__(
        self, client: Redis, keys: QuotaKeys,
        on_failure: Callable[[str], None], on_success: Callable[[], None], script: str = SCRIPT,
    ) -> None:  # fmt: skip
        self._client = client
        self._keys = keys
        self._on_failure = on_failure
        self._on_success = on_success
        self._script = script
        self._sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        # One of its own: a pool's book-keeping costs as much again as a command.
        self._wire: Wire | None = None
        self._waiting: deque[Call] = deque()
        self._is_in_flight = False
        self._is_closed = False
        self._needs_wire = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def submit(self, holder: str, fallback: str, operation: str, *arguments: Any) -> Call:
        """It is sent at once, or with all that waits as soon as what is in flight is answered."""
        call = self._enqueue(holder, fallback, operation, arguments)
        self._send_next()
        return call

    def submit_later(self, holder: str, fallback: str, operation: str, *arguments: Any) -> Call:
        """Nobody waits for it: it goes with what is submitted next, or LATER_S from now. What came
        before is carried out before."""
        call = self._enqueue(holder, fallback, operation, arguments)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_later(LATER_S, self._send_next)
        return call

    def _enqueue(
        self, holder: str, fallback: str, operation: str, arguments: Sequence[Any]
    ) -> Call:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        call = Call(operation, holder, fallback, arguments, future)
        if self._is_closed:
            call.fail(_ENDING)
        else:
            self._waiting.append(call)
            self._is_idle.clear()
        return call

    async def emptied(self) -> None:
        """Return once everything that was submitted has been answered, or has failed."""
        await self._is_idle.wait()

    def close(self) -> None:
        """What has not been sent never will be; `work` returns."""
        self._is_closed = True
        for call in self._waiting:
            call.fail(_ENDING)
        self._waiting.clear()
        self._send_next()
        self._needs_wire.set()

    async def work(self) -> None:
        """Connect whenever something waits for that, until closed."""
        try:
            while not self._is_closed:
                await self._needs_wire.wait()
                if self._waiting:
                    await self._connect()
                self._needs_wire.clear()
                self._send_next()
            await self.emptied()
        finally:
            if self._wire is not None:
                self._wire.close()

    async def _connect(self) -> None:
        pool = self._client.connection_pool
        connection: PatientConnection = pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await pool.ensure_connection(connection)
            self._wire = Wire(connection.hand_over(), self._lose_wire)
        except Exception as error:  # whatever it is, it costs no more than this batch
            await connection.disconnect(nowait=True)
            self._fail(self._next_batch(), error)

    def _lose_wire(self) -> None:
        self._wire = None

    def _next_batch(self) -> list[Call]:
        batch: list[Call] = []
        while self._waiting and len(batch) < MAX_BATCH:
            call = self._waiting.popleft()
            if not call.future.done():  # nobody waits for it any more
                batch.append(call)
        return batch

    def _send_next(self) -> None:
        while not self._is_in_flight and (batch := self._next_batch()):
            if self._wire is None:
                self._waiting.extendleft(reversed(batch))
                self._needs_wire.set()
                return
            self._send(self._wire, batch)
        if not self._is_in_flight:
            self._is_idle.set()

    def _send(self, wire: Wire, batch: list[Call]) -> None:
        try:
            wire.send(map(self._command, batch), partial(self._end, wire, batch))
        except Exception as error:  # what cannot be written costs no more than this batch
            self._fail(batch, error)
            return
        self._is_in_flight = True
        for call in batch:
            call.is_sent = True

    def _command(self, call: Call) -> Command:
        keys = script_keys(self._keys, call.holder, call.fallback)
        names = (call.operation, call.holder, call.fallback)
        return ("EVALSHA", self._sha, len(keys), *keys, *names, *call.arguments)

    def _end(self, wire: Wire, batch: list[Call], replies: Replies | Exception) -> None:
        if isinstance(replies, Exception) or not any(map(_lacks_script, replies)):
            self._finish(wire, batch, replies)
            return
        pairs = list(zip(batch, replies, strict=True))
        again = [call for call, reply in pairs if _lacks_script(reply)]
        commands = (("SCRIPT", "LOAD", self._script), *map(self._command, again))
        wire.send(commands, partial(self._end_again, wire, again))
        if answered := [pair for pair in pairs if not _lacks_script(pair[1])]:
            self._answer(answered)

    def _end_again(self, wire: Wire, batch: list[Call], replies: Replies | Exception) -> None:
        if not isinstance(replies, Exception):
            loaded, *answers = replies
            replies = loaded if isinstance(loaded, Exception) else answers
        self._finish(wire, batch, replies)

    def _finish(self, wire: Wire, batch: list[Call], replies: Replies | Exception) -> None:
        self._is_in_flight = False
        if isinstance(replies, Exception):
            self._fail(batch, replies)
            self._send_next()
            return
        if any(_says(reply, *ELSEWHERE) for reply in replies):
            wire.close()
        self._send_next()  # before its futures are set: meanwhile Redis works
        self._answer(zip(batch, replies, strict=True))

    def _answer(self, answered: Iterable[tuple[Call, Any]]) -> None:
        failure: Exception | None = None
        for call, reply in answered:
            answer = _understood(reply)
            if isinstance(answer, Exception):
                failure = answer
                call.fail(said(failure))
            elif not call.future.done():
                call.future.set_result(answer)
        if failure is None:
            self._on_success()
        else:
            self._on_failure(said(failure))

    def _fail(self, batch: list[Call], error: Exception) -> None:
        for call in batch:
            call.fail(said(error))
        self._on_failure(said(error))


def _says(reply: Any, *codes: str) -> bool:
    return isinstance(reply, Exception) and str(reply).startswith(codes)


def _lacks_script(reply: Any) -> bool:
    return _says(reply, "NOSCRIPT ")


def _understood(reply: Any) -> Answer | Exception:
    if isinstance(reply, Exception):
        return reply
    try:
        return outcome_of(reply)
    except (TypeError, ValueError) as error:
        return error


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
