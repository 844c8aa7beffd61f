"""Between the engine's thread and the event loop: requests go over one by one, reports as wholes.

A step's report crosses with a single wake-up of the loop, whatever it carries. Owns the map from
request id to its stream. All methods but `on_report` belong to the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from dataclasses import replace

from chairlift_engine.clock import Clock
from chairlift_engine.engine import Engine, StepReport
from chairlift_engine.request import FinishReason, Request
from chairlift_engine.residency import Gauges
from chairlift_engine.server.metrics import Metrics
from chairlift_engine.server.text_stream import TextStream
from chairlift_protocol.policy import Policy

logger = logging.getLogger(__name__)


class Bridge:
    """Make one, hand `on_report` to the Engine, then `connect` that engine."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._metrics = metrics
        self._streams: dict[str, TextStream] = {}
        self._unseen: deque[Request] = deque()
        self._gauges: Gauges | None = None

    def connect(self, engine: Engine) -> None:
        self._engine = engine
        self._gauges = engine.scheduler.residency.gauges()
        self._metrics.observe_gauges(self.gauges, engine.scheduler.policy)

    @property
    def num_open(self) -> int:
        return len(self._streams)

    @property
    def gauges(self) -> Gauges:
        """The last report's, and the requests handed over that the engine has not looked at yet."""
        assert self._gauges is not None
        seen = self._gauges
        num_waiting, oldest_s = dict(seen.num_waiting), dict(seen.oldest_arrival_s)
        for request in self._unseen:
            num_waiting[request.request_class] += 1
            before_s = oldest_s[request.request_class]
            oldest_s[request.request_class] = min(
                request.arrival_s, request.arrival_s if before_s is None else before_s
            )
        unseen_tokens = sum(r.num_prompt_tokens for r in self._unseen)
        return replace(
            seen,
            num_waiting=num_waiting,
            oldest_arrival_s=oldest_s,
            waiting_prefill_tokens=seen.waiting_prefill_tokens + unseen_tokens,
        )

    def open(self, stream: TextStream) -> None:
        """Queue a stream's request; the stream is fed until it ends."""
        self._streams[stream.request.id] = stream
        self._unseen.append(stream.request)
        self._engine.request_add(stream.request)

    def abort(self, stream: TextStream, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a stream now; the engine frees what it holds before its next step."""
        stream.end(reason)
        if stream.request.id in self._streams:
            self._engine.request_abort(stream.request.id, reason)

    def abort_all(self) -> None:
        for stream in tuple(self._streams.values()):
            self.abort(stream)

    def fail(self) -> None:
        """The engine died: nobody will end these streams but us."""
        now_s = self._clock.now_s()
        for stream in self._streams.values():
            stream.end(FinishReason.ERROR)
            self._metrics.observe_end(stream.request, FinishReason.ERROR, now_s)
        self._streams.clear()

    def on_report(self, report: StepReport) -> None:
        """Called on the engine's thread."""
        policy = self._engine.scheduler.policy
        with suppress(RuntimeError):  # the loop has closed: nobody is left to hear
            self._loop.call_soon_threadsafe(self._deliver, report, policy)

    def _deliver(self, report: StepReport, policy: Policy) -> None:
        for event in report.tokens:
            self._feed(event.request, event.token_id, event.finish_reason)
        for request, reason in report.ended:
            if (stream := self._streams.pop(request.id, None)) is not None:
                stream.end(reason)
        self._gauges = report.gauges
        self._forget_seen(report.gauges)
        self._metrics.observe_report(report, policy)
        self._metrics.observe_gauges(self.gauges, policy)

    def _feed(self, request: Request, token_id: int, reason: FinishReason | None) -> None:
        stream = self._streams.get(request.id)
        if stream is None:
            return
        if reason is not None:
            del self._streams[request.id]
        was_open = stream.finish_reason is None
        try:
            stream.feed(token_id, reason)
        except Exception:
            # One undecodable answer must not stop the others' delivery.
            logger.exception("request %s: its text could not be made", request.id)
            stream.end(FinishReason.ERROR)
        if was_open and stream.finish_reason is not None and reason is None:
            self._engine.request_abort(request.id, stream.finish_reason)

    def _forget_seen(self, gauges: Gauges) -> None:
        """Commands are taken in order, so what the engine has not counted are the newest ones."""
        num_seen = sum(gauges.num_running.values()) + sum(gauges.num_waiting.values())
        num_unseen = max(0, len(self._streams) - num_seen)
        while len(self._unseen) > num_unseen:
            self._unseen.popleft()
