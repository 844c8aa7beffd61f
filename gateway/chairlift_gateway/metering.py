"""What a request costs its tenant: reserved before it is routed, settled when it has ended.

It joins the guess (`estimate`), the count (`usage`), the quota and the tenants' metrics, so that
`proxy` holds one `Meter` for a request and ends it, whatever happened.
"""

from __future__ import annotations

from http import HTTPStatus

from chairlift_gateway import estimate
from chairlift_gateway.identity import Caller
from chairlift_gateway.metrics import GatewayMetrics
from chairlift_gateway.openai_errors import Refusal
from chairlift_gateway.quota.keeper import Grant, Keeper, QuotaExceeded, QuotaUnavailable
from chairlift_gateway.quota.told import label, ratelimit_headers, reason, retry_after_s
from chairlift_gateway.sse import num_token_events
from chairlift_gateway.usage import Usage
from chairlift_protocol.quota import holder_of


class Meter:
    """headers: what the client is told of its limits."""

    def __init__(self, metering: Metering, caller: Caller, usage: Usage, grant: Grant | None):
        self._metering = metering
        self._caller = caller
        self._usage = usage
        self._grant = grant
        self.headers = ratelimit_headers(grant.limits, grant.outcome) if grant else []

    @property
    def num_tokens(self) -> int:
        return self._usage.num_tokens

    def sent(self) -> None:
        self._usage.is_sent = True

    def pass_events(self, events: bytes) -> tuple[bytes, int]:
        """The events for the client, and how many of them carry a token."""
        for_client, uncovered = self._usage.take_comments(events)
        num_tokens = num_token_events(for_client)
        is_plain = uncovered is for_client
        self._usage.see(num_tokens if is_plain else num_token_events(uncovered))
        if self._grant is not None:
            self._grant.lease.num_used = self._usage.num_tokens
        return for_client, num_tokens

    def read_whole(self, status: int, body: bytes | bytearray) -> None:
        if status >= HTTPStatus.BAD_REQUEST:
            self._usage.is_void = True
        else:
            self._usage.read_whole(body)

    def failed(self) -> None:
        """What failed before its first token costs nothing."""
        if self._usage.num_answer_tokens == 0:
            self._usage.is_void = True

    def end(self) -> None:
        self._metering.settle(self._caller, self._usage, self._grant)


class Metering:
    """keeper: None where nothing is limited; then tokens are counted all the same."""

    def __init__(self, keeper: Keeper | None, metrics: GatewayMetrics) -> None:
        self._keeper = keeper
        self._metrics = metrics
        self._usual = estimate.UsualAnswers()

    async def admit(self, caller: Caller, request_id: str, body: bytes) -> Meter:
        """Raise Refusal."""
        prompt_tokens = estimate.prompt_tokens(body)
        usual = self._usual.of(holder_of(caller.tenant, caller.request_class))
        answer_tokens = estimate.answer_tokens(body, usual)
        grant = None
        if self._keeper is not None:
            cost = prompt_tokens + answer_tokens
            grant = await self._reserve(self._keeper, caller, request_id, cost)
        usage = Usage(prompt_tokens, 0 if estimate.is_stream(body) else answer_tokens)
        return Meter(self, caller, usage, grant)

    def unmetered(self, caller: Caller) -> Meter:
        """For what asks for no tokens."""
        return Meter(self, caller, Usage(0), None)

    def settle(self, caller: Caller, usage: Usage, grant: Grant | None) -> None:
        num_tokens = usage.num_tokens
        self._metrics.count_tenant_tokens(caller.tenant, caller.request_class, num_tokens)
        if usage.num_answer_tokens:
            holder = holder_of(caller.tenant, caller.request_class)
            self._usual.note(holder, usage.num_answer_tokens)
        if self._keeper is not None and grant is not None:
            self._keeper.settle(grant.lease, num_tokens)

    async def _reserve(self, keeper: Keeper, caller: Caller, request_id: str, cost: int) -> Grant:
        try:
            return await keeper.reserve(caller.tenant, caller.request_class, request_id, cost)
        except QuotaExceeded as error:
            why = label(error.limits, error.outcome)
            self._metrics.count_tenant_refused(caller.tenant, caller.request_class, why)
            raise Refusal(
                HTTPStatus.TOO_MANY_REQUESTS,
                "rate_limit_exceeded",
                reason(error.limits, error.outcome),
                retry_after_s=retry_after_s(error.outcome),
                more_headers=ratelimit_headers(error.limits, error.outcome),
            ) from None
        except QuotaUnavailable:
            self._metrics.count_tenant_refused(caller.tenant, caller.request_class, "unavailable")
            raise Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "quota_unavailable",
                "Quotas cannot be checked at the moment; please try again.",
                retry_after_s=1,
            ) from None
