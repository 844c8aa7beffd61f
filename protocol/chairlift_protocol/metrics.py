"""Metric names: vLLM's where vLLM has the metric, `chairlift_` only for what it lacks.

Type, unit and meaning of each are in docs/protocol.md. Every `vllm:` series carries the labels
`model_name` and `engine`, as vLLM's do.
"""

from __future__ import annotations

from typing import Final

NUM_REQUESTS_RUNNING: Final = "vllm:num_requests_running"
NUM_REQUESTS_WAITING: Final = "vllm:num_requests_waiting"
KV_CACHE_USAGE: Final = "vllm:kv_cache_usage_perc"
TTFT_SECONDS: Final = "vllm:time_to_first_token_seconds"
INTER_TOKEN_LATENCY_SECONDS: Final = "vllm:inter_token_latency_seconds"
E2E_LATENCY_SECONDS: Final = "vllm:e2e_request_latency_seconds"
QUEUE_TIME_SECONDS: Final = "vllm:request_queue_time_seconds"
PROMPT_TOKENS: Final = "vllm:prompt_tokens_total"
GENERATION_TOKENS: Final = "vllm:generation_tokens_total"
NUM_PREEMPTIONS: Final = "vllm:num_preemptions_total"
REQUEST_SUCCESS: Final = "vllm:request_success_total"  # label finished_reason
PREFIX_CACHE_QUERIES: Final = "vllm:prefix_cache_queries_total"  # tokens
PREFIX_CACHE_HITS: Final = "vllm:prefix_cache_hits_total"  # tokens

# Sums over steps identify the step-time model exactly: a tick's differences are linear in it.
STEP_SECONDS: Final = "chairlift_step_seconds_total"
STEPS: Final = "chairlift_steps_total"
STEP_DECODE_SEQS: Final = "chairlift_step_decode_seqs_total"
STEP_PREFILL_TOKENS: Final = "chairlift_step_prefill_tokens_total"
STEP_KV_TOKENS: Final = "chairlift_step_kv_tokens_total"
STEP_PREFILL_SHARE: Final = "chairlift_step_prefill_share"  # of a step's tokens, 0 to 1

SLO_EVENTS: Final = "chairlift_slo_events_total"  # objective=ttft|itl threshold_ms result class
REQUESTS_RUNNING: Final = "chairlift_requests_running"  # class
REQUESTS_WAITING: Final = "chairlift_requests_waiting"  # class
# By class, what vLLM's counters sum: classes differ in their lengths.
FIRST_TOKENS: Final = "chairlift_first_tokens_total"  # class
CLASS_PROMPT_TOKENS: Final = "chairlift_prompt_tokens_total"  # class
CLASS_GENERATION_TOKENS: Final = "chairlift_generation_tokens_total"  # class
OLDEST_WAITING_SECONDS: Final = "chairlift_oldest_waiting_seconds"  # class
REQUESTS_RECEIVED: Final = "chairlift_requests_received_total"  # class; before any refusal
POLICY_GENERATION: Final = "chairlift_policy_generation"  # part=term|counter
BATCH_SIZE: Final = "chairlift_batch_size"  # state=desired|effective
STEP_TOKENS: Final = "chairlift_step_tokens"  # state=desired|effective
REQUESTS_REFUSED: Final = "chairlift_requests_refused_total"  # reason
DEADLINES_MISSED: Final = "chairlift_deadlines_missed_total"  # deadline=queue|total
OUT_OF_MEMORY: Final = "chairlift_out_of_memory_total"
CACHED_KV_TOKENS: Final = "chairlift_cached_kv_tokens"

# By tenant: a bounded number by name, all others together as `wire.OTHER_TENANTS`.
TENANT_RUNNING: Final = "chairlift_tenant_requests_running"  # tenant
TENANT_WAITING: Final = "chairlift_tenant_requests_waiting"  # tenant
TENANT_PROMPT_TOKENS: Final = "chairlift_tenant_prompt_tokens_total"  # tenant
TENANT_GENERATION_TOKENS: Final = "chairlift_tenant_generation_tokens_total"  # tenant

# Gateway, as the client sees it.
GATEWAY_TTFT_SECONDS: Final = "chairlift_gateway_time_to_first_token_seconds"  # class
GATEWAY_GAP_SECONDS: Final = "chairlift_gateway_inter_token_gap_seconds"  # class
GATEWAY_RESPONSES: Final = "chairlift_gateway_responses_total"  # class code; 499: client left
GATEWAY_IN_FLIGHT: Final = "chairlift_gateway_requests_in_flight"  # class
GATEWAY_HELD: Final = "chairlift_gateway_requests_held"  # class
GATEWAY_UPSTREAM_FAILURES: Final = "chairlift_gateway_upstream_failures_total"  # stage
GATEWAY_REPLICAS_OUT: Final = "chairlift_gateway_replicas_left_out"  # class
GATEWAY_TENANT_TOKENS: Final = "chairlift_gateway_tenant_tokens_total"  # tenant class
GATEWAY_TENANT_REFUSED: Final = "chairlift_gateway_tenant_requests_refused_total"  # and reason
GATEWAY_QUOTA_REDIS_UP: Final = "chairlift_gateway_quota_redis_up"
GATEWAY_QUOTA_OWED: Final = "chairlift_gateway_quota_settlements_owed"
GATEWAY_QUOTA_WITHOUT: Final = "chairlift_gateway_quota_decided_without_redis"
