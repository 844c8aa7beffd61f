"""Paths, headers and request classes that every part spells the same way."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class RequestClass(StrEnum):
    """Which objective a request is served under; interactive strictly precedes batch."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


# Engine, public port.
MODELS_PATH: Final = "/v1/models"
COMPLETIONS_PATH: Final = "/v1/completions"
CHAT_COMPLETIONS_PATH: Final = "/v1/chat/completions"
TOKENIZE_PATH: Final = "/tokenize"
DETOKENIZE_PATH: Final = "/detokenize"
LIVE_PATH: Final = "/health/live"
READY_PATH: Final = "/health/ready"
METRICS_PATH: Final = "/metrics"
LOAD_PATH: Final = "/load"
# For gateways, with the internal token: what requests have used by now, by the ids they gave them.
USAGE_PATH: Final = "/usage"
# An engine that is told to end requests answers once the step under way has ended, or after this.
LAST_STEP_WAIT_S: Final = 1.0

# Gateway, beside /metrics: what arrived; may be asked to answer only once that changes.
ARRIVALS_PATH: Final = "/arrivals"

# Engine, admin port; every call carries `Authorization: Bearer <admin token>`.
ADMIN_POLICY_PATH: Final = "/admin/policy"
ADMIN_DRAIN_PATH: Final = "/admin/drain"
ADMIN_STATE_PATH: Final = "/admin/state"

# Gateway to engine. An engine believes these only beside the pool's internal token, and a gateway
# strips them from what clients send. Durations, never clock times: clocks differ.
INTERNAL_TOKEN_HEADER: Final = "x-chairlift-internal-token"
CLASS_HEADER: Final = "x-chairlift-class"
TENANT_HEADER: Final = "x-chairlift-tenant"
REQUEST_ID_HEADER: Final = "x-request-id"
WAITED_MS_HEADER: Final = "x-chairlift-waited-ms"
LEFT_MS_HEADER: Final = "x-chairlift-left-ms"
# Asks for the tokens used so far as comments in a stream, when it begins and when it ends.
USAGE_HEADER: Final = "x-chairlift-usage"
INTERNAL_HEADERS: Final = (
    INTERNAL_TOKEN_HEADER,
    CLASS_HEADER,
    TENANT_HEADER,
    WAITED_MS_HEADER,
    LEFT_MS_HEADER,
    USAGE_HEADER,
)
# Then the JSON of `prompt_tokens` and `completion_tokens`. A gateway takes these out of streams.
USAGE_COMMENT: Final = b": chairlift-usage "

# Engine to gateway, on every response: the JSON of `Load`, so that a gateway need not poll.
LOAD_HEADER: Final = "x-chairlift-load"
# Request fields that the engine does not know, comma-separated: accepted, not ignored silently.
IGNORED_FIELDS_HEADER: Final = "x-chairlift-ignored-fields"

# In metrics by tenant: those beyond the number that has names, together.
OTHER_TENANTS: Final = "other"
