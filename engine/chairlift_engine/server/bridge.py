"""Between the engine's thread and the event loop: requests go over one by one, reports as wholes.

A step's report crosses with a single wake-up of the loop, whatever it carries. Owns the map from
request id to its stream. All methods but `on_report` belong to the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from chairlift_engine.clock import Clock
from chairlift_engine.engine import Engine, StepReport, StepSums
from chairlift_engine.request import FinishReason, Request
from chairlift_engine.residency import Gauges, TenantGauge
from chairlift_engine.scheduler import TokenEvent
from chairlift_engine.server import timeline
from chairlift_engine.server.errors import RETRY_AFTER_S
from chairlift_engine.server.metrics import Metrics
from chairlift_engine.server.recent_rate import RecentRate
from chairlift_engine.server.text_stream import TextStream
from chairlift_protocol.policy import Policy

logger = logging.getLogger(__name__)

MOST_RETRY_AFTER_S: Final = 60


class Bridge:
    """Make one, hand `on_report` to the Engine, then `connect` that engine."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._metrics = metrics
        self._streams: dict[str, TextStream] = {}
        self._unseen: deque[Request] = deque()
        self._gauges: Gauges | None = None
        self._starts = RecentRate(clock.now_s())
        self.last_step: StepSums | None = None

    def connect(self, engine: Engine) -> None:
        self._engine = engine
        self._gauges = engine.scheduler.residency.gauges()
        self.render_metrics()

    @property
    def policy(self) -> Policy:
        """What is in force."""
        return self._engine.scheduler.policy

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
        tenants = dict(seen.tenants or {})
        for request in self._unseen:
            before = tenants.get(request.tenant, TenantGauge(0, 0))
            tenants[request.tenant] = before._replace(num_waiting=before.num_waiting + 1)
        unseen_tokens = sum(r.num_prompt_tokens for r in self._unseen)
        return seen._replace(
            num_waiting=num_waiting,
            oldest_arrival_s=oldest_s,
            waiting_prefill_tokens=seen.waiting_prefill_tokens + unseen_tokens,
            tenants=tenants,
        )

    @property
    def retry_after_s(self) -> int:
        """When what waits now will have been started, at the pace of the last half minute."""
        rate_per_s = self._starts.per_s(self._clock.now_s())
        if rate_per_s == 0:
            return RETRY_AFTER_S
        num_waiting = sum(self.gauges.num_waiting.values())
        return math.ceil(min(max(num_waiting / rate_per_s, 1), MOST_RETRY_AFTER_S))

    def render_metrics(self) -> bytes:
        """Gauges as of now, also when the engine is in a long step and has reported nothing."""
        scheduler = self._engine.scheduler
        self._metrics.observe_gauges(self.gauges, scheduler.desired, scheduler.policy)
        return self._metrics.render()

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

    def expire(self, requests: Sequence[Request], also_started: bool) -> None:
        for request in requests:
            self._engine.request_expire(request, also_started=also_started)

    def abort_all(self) -> None:
        for stream in tuple(self._streams.values()):
            self.abort(stream)

    def fail(self) -> None:
        """The engine died: nobody will end these streams but us."""
        now_s = self._clock.now_s()
        for stream in self._streams.values():
            stream.end(FinishReason.ERROR)
            stream.close()
            self._metrics.observe_end(stream.request, FinishReason.ERROR, now_s)
            timeline.log(stream.request, FinishReason.ERROR, now_s)
        self._streams.clear()

    def on_report(self, report: StepReport) -> None:
        """Called on the engine's thread."""
        with suppress(RuntimeError):  # the loop has closed: nobody is left to hear
            self._loop.call_soon_threadsafe(self._deliver, report)

    def _deliver(self, report: StepReport) -> None:
        for event in report.tokens:
            self._feed(event)
            if event.finish_reason is not None:
                timeline.log(event.request, event.finish_reason, report.now_s)
        for request, reason in report.ended:
            if (stream := self._streams.pop(request.id, None)) is not None:
                stream.end(reason)
                stream.close()
            timeline.log(request, reason, report.now_s)
        if report.sums is not None:
            self.last_step = report.sums
        self._starts.add(sum(event.gap_s is None for event in report.tokens), report.now_s)
        self._gauges = report.gauges
        self._forget_seen(report.gauges)
        self._metrics.observe_report(report)

    def _feed(self, event: TokenEvent) -> None:
        request, reason = event.request, event.finish_reason
        stream = self._streams.get(request.id)
        if stream is None:
            return
        was_open = stream.finish_reason is None
        try:
            stream.feed(event.token_id, reason, event.logprobs)
        except Exception:
            # One undecodable answer must not stop the others' delivery.
            logger.exception("request %s: its text could not be made", request.id)
            stream.end(FinishReason.ERROR)
        if reason is not None:
            del self._streams[request.id]
            stream.close()
        elif was_open and stream.finish_reason is not None:
            self._engine.request_abort(request.id, stream.finish_reason)

    def _forget_seen(self, gauges: Gauges) -> None:
        """Commands are taken in order, so what the engine has not counted are the newest ones."""
        num_seen = sum(gauges.num_running.values()) + sum(gauges.num_waiting.values())
        num_unseen = max(0, len(self._streams) - num_seen)
        while len(self._unseen) > num_unseen:
            self._unseen.popleft()
