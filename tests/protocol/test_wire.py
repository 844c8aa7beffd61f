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
    modules = (vars(metrics), vars(wire))
    names = {k: v for m in modules for k, v in m.items() if k.isupper() and isinstance(v, str)}
    assert names == PUBLISHED


PUBLISHED = {
    "NUM_REQUESTS_RUNNING": "vllm:num_requests_running",
    "NUM_REQUESTS_WAITING": "vllm:num_requests_waiting",
    "KV_CACHE_USAGE": "vllm:kv_cache_usage_perc",
    "TTFT_SECONDS": "vllm:time_to_first_token_seconds",
    "INTER_TOKEN_LATENCY_SECONDS": "vllm:inter_token_latency_seconds",
    "E2E_LATENCY_SECONDS": "vllm:e2e_request_latency_seconds",
    "QUEUE_TIME_SECONDS": "vllm:request_queue_time_seconds",
    "PROMPT_TOKENS": "vllm:prompt_tokens_total",
    "GENERATION_TOKENS": "vllm:generation_tokens_total",
    "NUM_PREEMPTIONS": "vllm:num_preemptions_total",
    "REQUEST_SUCCESS": "vllm:request_success_total",
    "STEP_SECONDS": "chairlift_step_seconds_total",
    "STEPS": "chairlift_steps_total",
    "STEP_DECODE_SEQS": "chairlift_step_decode_seqs_total",
    "STEP_PREFILL_TOKENS": "chairlift_step_prefill_tokens_total",
    "STEP_KV_TOKENS": "chairlift_step_kv_tokens_total",
    "SLO_EVENTS": "chairlift_slo_events_total",
    "REQUESTS_RUNNING": "chairlift_requests_running",
    "REQUESTS_WAITING": "chairlift_requests_waiting",
    "FIRST_TOKENS": "chairlift_first_tokens_total",
    "CLASS_PROMPT_TOKENS": "chairlift_prompt_tokens_total",
    "CLASS_GENERATION_TOKENS": "chairlift_generation_tokens_total",
    "OLDEST_WAITING_SECONDS": "chairlift_oldest_waiting_seconds",
    "REQUESTS_RECEIVED": "chairlift_requests_received_total",
    "PREFIX_CACHE_QUERIES": "vllm:prefix_cache_queries_total",
    "PREFIX_CACHE_HITS": "vllm:prefix_cache_hits_total",
    "STEP_PREFILL_SHARE": "chairlift_step_prefill_share",
    "BATCH_SIZE": "chairlift_batch_size",
    "STEP_TOKENS": "chairlift_step_tokens",
    "REQUESTS_REFUSED": "chairlift_requests_refused_total",
    "DEADLINES_MISSED": "chairlift_deadlines_missed_total",
    "OUT_OF_MEMORY": "chairlift_out_of_memory_total",
    "CACHED_KV_TOKENS": "chairlift_cached_kv_tokens",
    "TENANT_RUNNING": "chairlift_tenant_requests_running",
    "TENANT_WAITING": "chairlift_tenant_requests_waiting",
    "TENANT_PROMPT_TOKENS": "chairlift_tenant_prompt_tokens_total",
    "TENANT_GENERATION_TOKENS": "chairlift_tenant_generation_tokens_total",
    "POLICY_GENERATION": "chairlift_policy_generation",
    "GATEWAY_TTFT_SECONDS": "chairlift_gateway_time_to_first_token_seconds",
    "GATEWAY_GAP_SECONDS": "chairlift_gateway_inter_token_gap_seconds",
    "GATEWAY_RESPONSES": "chairlift_gateway_responses_total",
    "GATEWAY_IN_FLIGHT": "chairlift_gateway_requests_in_flight",
    "GATEWAY_HELD": "chairlift_gateway_requests_held",
    "GATEWAY_UPSTREAM_FAILURES": "chairlift_gateway_upstream_failures_total",
    "GATEWAY_REPLICAS_OUT": "chairlift_gateway_replicas_left_out",
    "GATEWAY_TENANT_TOKENS": "chairlift_gateway_tenant_tokens_total",
    "GATEWAY_TENANT_REFUSED": "chairlift_gateway_tenant_requests_refused_total",
    "GATEWAY_QUOTA_REDIS_UP": "chairlift_gateway_quota_redis_up",
    "GATEWAY_QUOTA_OWED": "chairlift_gateway_quota_settlements_owed",
    "GATEWAY_QUOTA_WITHOUT": "chairlift_gateway_quota_decided_without_redis",
    "MODELS_PATH": "/v1/models",
    "COMPLETIONS_PATH": "/v1/completions",
    "CHAT_COMPLETIONS_PATH": "/v1/chat/completions",
    "TOKENIZE_PATH": "/tokenize",
    "DETOKENIZE_PATH": "/detokenize",
    "LIVE_PATH": "/health/live",
    "READY_PATH": "/health/ready",
    "METRICS_PATH": "/metrics",
    "ARRIVALS_PATH": "/arrivals",
    "OTHER_TENANTS": "other",
    "LOAD_PATH": "/load",
    "USAGE_PATH": "/usage",
    "ADMIN_POLICY_PATH": "/admin/policy",
    "ADMIN_DRAIN_PATH": "/admin/drain",
    "ADMIN_STATE_PATH": "/admin/state",
    "INTERNAL_TOKEN_HEADER": "x-chairlift-internal-token",
    "CLASS_HEADER": "x-chairlift-class",
    "TENANT_HEADER": "x-chairlift-tenant",
    "REQUEST_ID_HEADER": "x-request-id",
    "WAITED_MS_HEADER": "x-chairlift-waited-ms",
    "LEFT_MS_HEADER": "x-chairlift-left-ms",
    "USAGE_HEADER": "x-chairlift-usage",
    "LOAD_HEADER": "x-chairlift-load",
    "IGNORED_FIELDS_HEADER": "x-chairlift-ignored-fields",
}
