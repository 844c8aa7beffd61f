"""Names are a contract: a change here must be seen in review, and only additions are allowed."""

from __future__ import annotations

import json

import pytest

from chairlift_protocol import metrics, wire
from chairlift_protocol.load import Load

LOAD = Load(3, 2, 700, 4096, 0.5, (1, 9), False)


def test_a_load_survives_body_and_header() -> None:
    assert Load.from_json(LOAD.to_json()) == LOAD
    assert Load.from_json(json.loads(LOAD.to_header())) == LOAD


@pytest.mark.parametrize("field", sorted(LOAD.to_json()))
def test_a_load_without_a_field_is_an_error_and_never_a_zero(field: str) -> None:
    body = LOAD.to_json()
    del body[field]
    with pytest.raises(KeyError):
        Load.from_json(body)


def test_published_names_do_not_change() -> None:
    names = {k: str(v) for m in (metrics, wire) for k, v in vars(m).items() if k.isupper()}
    assert {k: names.get(k) for k in PUBLISHED} == PUBLISHED


PUBLISHED = {
    "ADMIN_POLICY_PATH": "/admin/policy",
    "ADMIN_DRAIN_PATH": "/admin/drain",
    "ADMIN_STATE_PATH": "/admin/state",
    "LIVE_PATH": "/health/live",
    "READY_PATH": "/health/ready",
    "LOAD_PATH": "/load",
    "LOAD_HEADER": "x-chairlift-load",
    "CLASS_HEADER": "x-chairlift-class",
    "TENANT_HEADER": "x-chairlift-tenant",
    "INTERNAL_TOKEN_HEADER": "x-chairlift-internal-token",
    "WAITED_MS_HEADER": "x-chairlift-waited-ms",
    "LEFT_MS_HEADER": "x-chairlift-left-ms",
    "NUM_REQUESTS_RUNNING": "vllm:num_requests_running",
    "NUM_REQUESTS_WAITING": "vllm:num_requests_waiting",
    "KV_CACHE_USAGE": "vllm:kv_cache_usage_perc",
    "TTFT_SECONDS": "vllm:time_to_first_token_seconds",
    "INTER_TOKEN_LATENCY_SECONDS": "vllm:inter_token_latency_seconds",
    "REQUEST_SUCCESS": "vllm:request_success_total",
    "STEP_SECONDS": "chairlift_step_seconds_total",
    "STEPS": "chairlift_steps_total",
    "STEP_DECODE_SEQS": "chairlift_step_decode_seqs_total",
    "STEP_PREFILL_TOKENS": "chairlift_step_prefill_tokens_total",
    "STEP_KV_TOKENS": "chairlift_step_kv_tokens_total",
    "SLO_EVENTS": "chairlift_slo_events_total",
    "OLDEST_WAITING_SECONDS": "chairlift_oldest_waiting_seconds",
    "REQUESTS_RECEIVED": "chairlift_requests_received_total",
    "POLICY_GENERATION": "chairlift_policy_generation",
}
