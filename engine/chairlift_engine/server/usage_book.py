"""What requests have used, by the id that a gateway gave each: all that run, and the last to end.

A gateway reads a stream's tokens as they come; of an answer that comes as a whole it can only ask,
and it asks once its client has left. A request runs until the engine has made its last token, which
is one step longer than somebody reads it. Lives on the event loop; knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from chairlift_protocol.wire import LAST_STEP_WAIT_S

# A gateway asks within seconds of an end; so many end in minutes. About a megabyte.
MAX_ENDED: Final = 4096


class Generating(Protocol):
    @property
    def num_output_tokens(self) -> int:
        """Of all choices together."""
        ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Used:
    num_prompt_tokens: int
    num_output_tokens: int
    is_final: bool


@dataclass(frozen=True, slots=True)
class _Running:
    num_prompt_tokens: int
    generation: Generating
    closed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @property
    def used(self) -> Used:
        return Used(self.num_prompt_tokens, self.generation.num_output_tokens, self.closed.is_set())


class UsageBook:
    def __init__(self, max_ended: int = MAX_ENDED) -> None:
        self._max_ended = max_ended
        self._running: dict[str, _Running] = {}
        self._ended: OrderedDict[str, Used] = OrderedDict()

    def enter(
        self, request_id: str | None, num_prompt_tokens: int, generation: Generating
    ) -> Callable[[], None]:
        """It runs until what this returns is called. None: nobody will ask. Sent again, it takes
        the first one's place."""
        if request_id is None:
            return lambda: None
        running = self._running[request_id] = _Running(num_prompt_tokens, generation)

        def close() -> None:
            running.closed.set()
            if self._running.get(request_id) is running:
                del self._running[request_id]
                self._note(request_id, running.used)

        return close

    def used(self, request_id: str) -> Used | None:
        """None of one that was never begun here, or ended long ago."""
        running = self._running.get(request_id)
        return self._ended.get(request_id) if running is None else running.used

    async def stop(self, request_ids: Iterable[str]) -> None:
        """End those that run. What they have used is final then, unless the step under way takes
        longer than whoever asks can wait."""
        stopped = [self._running[each] for each in request_ids if each in self._running]
        for running in stopped:
            running.generation.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_STEP_WAIT_S):
                for running in stopped:
                    await running.closed.wait()

    def _note(self, request_id: str, used: Used) -> None:
        self._ended[request_id] = used
        self._ended.move_to_end(request_id)
        if len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)
