"""What a request costs its tenant: reserved before it is routed, settled when it has ended.

It joins the guess (`estimate`), the count (`usage`), what engines say of it (`engine_usage`), the
quota and the tenants' metrics, so that `proxy` holds one `Meter` for a request and ends it,
whatever happened.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Final, Protocol

from chairlift_gateway import estimate
from chairlift_gateway.engine_usage import NoAnswer
from chairlift_gateway.identity import Caller
from chairlift_gateway.metrics import GatewayMetrics
from chairlift_gateway.openai_errors import Refusal, class_not_allowed, quota_unavailable
from chairlift_gateway.quota.keeper import (
    Grant,
    Keeper,
    NobodyAdmitted,
    QuotaExceeded,
    QuotaUnavailable,
)
from chairlift_gateway.quota.told import label, ratelimit_headers, reason, retry_after_s
from chairlift_gateway.sse import num_token_events
from chairlift_gateway.usage import Usage, Used
from chairlift_protocol.quota import holder_of

# Twice between two renewals of a lease, which say how far the request is.
ASK_EVERY_S: Final = 2.5
# After an answer that is not final yet; our engine waits by itself before it gives one.
ASK_AGAIN_S: Final = 0.1


class Engines(Protocol):
    """What engines say that requests have used; see `EngineUsage`."""

    async def ask(
        self, url: str, request_ids: Sequence[str], *, end: bool = False
    ) -> Mapping[str, Used] | None: ...


class Meter:
    """headers: what the client is told of its limits. body: the request's, for a bound of its use.

    engine_url: where it was sent last, once it was.
    """

    def __init__(
        self, metering: Metering, caller: Caller, request_id: str, body: bytes, usage: Usage,
        grant: Grant | None,
    ) -> None:  # fmt: skip
        self._metering = metering
        self._caller = caller
        self._body = body
        self._usage = usage
        self._grant = grant
        self._sent_s = 0.0
        self._is_seen = False
        self._has_answer = False
        self.request_id = request_id
        self.engine_url: str | None = None
        self.headers = ratelimit_headers(grant.limits, grant.outcome) if grant else []

    @property
    def num_tokens(self) -> int:
        return self._usage.num_tokens

    @property
    def asks(self) -> bool:
        """Whether only its engine can tell how far it is: nothing of it has come yet."""
        return self.engine_url is not None and not self._is_seen

    def sent(self, engine_url: str) -> None:
        """Also a second time: what counts is where it is now."""
        self._usage.sent()
        self._has_answer = False
        self.engine_url, self._sent_s = engine_url, time.monotonic()

    def answered(self, *, is_stream: bool) -> None:
        """An answer's head has come. Of a stream nothing is guessed: the body is let go."""
        self._has_answer = True
        if is_stream:
            self._body = b""

    def pass_events(self, events: bytes) -> tuple[bytes, int]:
        """The events for the client, and how many of them carry a token."""
        self._is_seen = True
        for_client, uncovered = self._usage.take_comments(events)
        num_tokens = num_token_events(for_client)
        is_plain = uncovered is for_client
        self._usage.see(num_tokens if is_plain else num_token_events(uncovered))
        self._show_progress()
        return for_client, num_tokens

    def read_whole(self, status: int, body: bytes | bytearray) -> None:
        self._is_seen = True
        if status >= HTTPStatus.BAD_REQUEST:
            self._usage.is_void = True
        else:
            self._usage.read_whole(body)

    def told(self, used: Used) -> None:
        self._usage.state(used)
        self._show_progress()

    def failed(self) -> None:
        """What failed before its answer, or before its first token, costs nothing, also where its
        engine had said before that it was at it."""
        if not self._has_answer or self._usage.num_answer_tokens == 0:
            self._usage.is_void = True

    async def learn(self, *, until_final: bool) -> None:
        """Of an answer that was not read to its end: what its engine made of it, which ends it.

        until_final: wait for the engine's step under way, however long it takes.
        """
        if self.engine_url is None or self._usage.is_void:
            return
        with suppress(NoAnswer):
            while not await self._end_at(self.engine_url) and until_final:
                await asyncio.sleep(ASK_AGAIN_S)

    async def _end_at(self, engine_url: str) -> bool:
        """Whether what it has used by now will stay so."""
        told = await self._metering.engines.ask(engine_url, [self.request_id], end=True)
        if told is None:
            elapsed_s = time.monotonic() - self._sent_s
            self._usage.guessed_answer_tokens = estimate.most_answer_tokens(self._body, elapsed_s)
        elif (used := told.get(self.request_id)) is not None:
            self.told(used)
            return used.is_final
        else:
            # It was never begun there, or the engine has begun anew since.
            self._usage.guessed_answer_tokens = 0
        return True

    def end(self) -> None:
        self._metering.settle(self, self._caller, self._usage, self._grant)

    def _show_progress(self) -> None:
        if self._grant is not None:
            self._grant.lease.num_used = self._usage.num_tokens


class Metering:
    """keeper: None where nothing is limited; then tokens are counted all the same."""

    def __init__(self, keeper: Keeper | None, metrics: GatewayMetrics, engines: Engines) -> None:
        self._keeper = keeper
        self._metrics = metrics
        self._usual = estimate.UsualAnswers()
        self._running: set[Meter] = set()
        self.engines = engines

    async def admit(self, caller: Caller, request_id: str, body: bytes) -> Meter:
        """Raise Refusal."""
        prompt_tokens = estimate.prompt_tokens(body)
        usual = self._usual.of(holder_of(caller.tenant, caller.request_class))
        answer_tokens = estimate.answer_tokens(body, usual)
        grant = await self._reserve(caller, request_id, prompt_tokens + answer_tokens)
        usage = Usage(prompt_tokens, 0 if estimate.is_stream(body) else answer_tokens)
        meter = Meter(self, caller, request_id, body, usage, grant)
        self._running.add(meter)
        return meter

    async def admit_tokenless(self, caller: Caller, request_id: str) -> Meter:
        """Limited as any request, and charged no tokens. Raise Refusal."""
        grant = await self._reserve(caller, request_id, 0)
        return Meter(self, caller, request_id, b"", Usage(0, is_void=True), grant)

    def unmetered(self, caller: Caller) -> Meter:
        """For what is not limited."""
        return Meter(self, caller, "", b"", Usage(0), None)

    def settle(self, meter: Meter, caller: Caller, usage: Usage, grant: Grant | None) -> None:
        self._running.discard(meter)
        num_tokens = usage.num_tokens
        # First: a lease that is not handed over would be renewed for ever.
        if self._keeper is not None and grant is not None:
            self._keeper.settle(grant.lease, num_tokens)
        self._metrics.count_tenant_tokens(caller.tenant, caller.request_class, num_tokens)
        if usage.num_answer_tokens and not usage.is_void:
            holder = holder_of(caller.tenant, caller.request_class)
            self._usual.note(holder, usage.num_answer_tokens)

    async def watch(self) -> None:
        """Until cancelled: how far whole answers are, so that renewals of their leases say it."""
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            by_engine: defaultdict[str, list[Meter]] = defaultdict(list)
            for meter in self._running:
                if meter.asks and meter.engine_url is not None:
                    by_engine[meter.engine_url].append(meter)
            await asyncio.gather(*(self._ask(url, own) for url, own in by_engine.items()))

    async def _ask(self, url: str, meters: Sequence[Meter]) -> None:
        try:
            told = await self.engines.ask(url, [meter.request_id for meter in meters])
        except NoAnswer:
            return
        for meter in meters:
            used = (told or {}).get(meter.request_id)
            if used is not None and meter.asks and meter.engine_url == url:
                meter.told(used)

    async def _reserve(self, caller: Caller, request_id: str, cost: int) -> Grant | None:
        """None where nothing is limited."""
        if self._keeper is None:
            return None
        try:
            return await self._keeper.reserve(caller.tenant, caller.request_class, request_id, cost)
        except NobodyAdmitted:
            self._count_refused(caller, "not_allowed")
            raise class_not_allowed(caller.tenant, caller.request_class) from None
        except QuotaExceeded as error:
            self._count_refused(caller, label(error.limits, error.outcome))
            raise Refusal(
                HTTPStatus.TOO_MANY_REQUESTS,
                "rate_limit_exceeded",
                reason(error.limits, error.outcome),
                retry_after_s=retry_after_s(error.outcome),
                more_headers=ratelimit_headers(error.limits, error.outcome),
            ) from None
        except QuotaUnavailable:
            self._count_refused(caller, "unavailable")
            raise quota_unavailable() from None

    def _count_refused(self, caller: Caller, why: str) -> None:
        self._metrics.count_tenant_refused(caller.tenant, caller.request_class, why)
