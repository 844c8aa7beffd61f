from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from chairlift_gateway.metrics import GatewayMetrics
from chairlift_operator.exposition import (
    ExpositionError,
    SlotHolder,
    parse_engine_metrics,
    parse_gateway_metrics,
)
from chairlift_protocol import metrics
from chairlift_protocol.policy import Generation
from chairlift_protocol.wire import RequestClass

COMPLETE = """\
# TYPE chairlift_step_seconds_total counter
chairlift_step_seconds_total 12.5
chairlift_steps_total 100
chairlift_step_decode_seqs_total 800
chairlift_step_prefill_tokens_total 4000
chairlift_step_kv_tokens_total 90000
vllm:num_requests_running{model_name="m",engine="0"} 3
vllm:num_requests_waiting{model_name="m",engine="0"} 0
vllm:kv_cache_usage_perc{model_name="m",engine="0"} 0.25
vllm:request_success_total{model_name="m",engine="0",finished_reason="stop"} 5
vllm:request_success_total{model_name="m",engine="0",finished_reason="length"} 2
chairlift_slo_events_total{objective="itl",threshold_ms="50",result="good",class="interactive"} 90
chairlift_slo_events_total{objective="itl",threshold_ms="50",result="bad",class="interactive"} 10
chairlift_policy_generation{part="term"} 2
chairlift_policy_generation{part="counter"} 7
"""


def test_the_exact_names_are_read() -> None:
    sample = parse_engine_metrics(COMPLETE)
    assert (sample.step_seconds, sample.num_steps, sample.step_decode_seqs) == (12.5, 100, 800)
    assert (sample.num_running, sample.num_waiting, sample.kv_usage) == (3, 0, 0.25)
    assert sample.num_finished == 7
    assert sample.policy_generation == Generation(2, 7)
    assert sample.missing == () and sample.rejected == ()


def test_an_absent_series_is_none_and_never_zero() -> None:
    sample = parse_engine_metrics("chairlift_steps_total 4\n")
    assert sample.num_steps == 4
    assert sample.step_seconds is None and sample.num_waiting is None
    assert sample.prompt_tokens is None and sample.policy_generation is None
    assert metrics.STEP_SECONDS in sample.missing


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e200", "1.1e15"])
def test_a_number_that_no_counter_has_is_rejected_by_name(value: str) -> None:
    text = COMPLETE.replace("_seconds_total 12.5", f"_seconds_total {value}")
    sample = parse_engine_metrics(text)
    assert sample.step_seconds is None
    assert sample.rejected == (metrics.STEP_SECONDS,)
    assert sample.num_steps == 100


def test_events_against_another_threshold_do_not_count() -> None:
    sample = parse_engine_metrics(COMPLETE)
    count = sample.slo_count("itl", 50.0, "interactive")
    assert count is not None and (count.num_good, count.num_bad) == (90, 10)
    assert sample.slo_count("itl", 40.0, "interactive") is None
    assert sample.slo_count("ttft", 50.0, "interactive") is None
    assert sample.slo_count("itl", 50.0, "batch") is None


def test_good_events_without_their_bad_series_leave_the_bad_ones_unknown() -> None:
    text = "\n".join(line for line in COMPLETE.splitlines() if 'result="bad"' not in line) + "\n"
    count = parse_engine_metrics(text).slo_count("itl", 50.0, "interactive")
    assert count is not None and count.num_bad is None


def test_an_event_series_without_a_needed_label_is_rejected() -> None:
    sample = parse_engine_metrics('chairlift_slo_events_total{objective="itl",result="good"} 4\n')
    assert sample.slo_counts == () and sample.rejected == (metrics.SLO_EVENTS,)


RUNNING = 'chairlift_tenant_requests_running{tenant="%s"} %s'
WAITING = 'chairlift_tenant_requests_waiting{tenant="%s"} %s'


@pytest.mark.parametrize(
    ("lines", "holder"),
    [
        ([], None),
        ([RUNNING % ("a", 3)], None),  # who waits is not told
        (
            [RUNNING % ("a", 3), RUNNING % ("b", 5), WAITING % ("a", 2), WAITING % ("b", 9)],
            SlotHolder("b", 5, 2),
        ),
        (  # many tenants together are not one
            [RUNNING % ("a", 3), RUNNING % ("other", 5), WAITING % ("other", 4)],
            SlotHolder("a", 3, 4),
        ),
        ([RUNNING % ("other", 0), WAITING % ("other", 0)], SlotHolder("", 0, 0)),
    ],
)
def test_who_holds_most_slots_is_read(lines: list[str], holder: SlotHolder | None) -> None:
    sample = parse_engine_metrics("\n".join([COMPLETE, *lines]) + "\n")
    assert sample.slot_holder == holder and sample.rejected == ()


def test_one_tenant_without_a_number_leaves_the_holder_unknown() -> None:
    lines = [RUNNING % ("a", 3), RUNNING % ("b", "NaN"), WAITING % ("a", 0)]
    sample = parse_engine_metrics("\n".join([COMPLETE, *lines]) + "\n")
    assert sample.slot_holder is None and sample.rejected == (metrics.TENANT_RUNNING,)


def test_series_of_eight_engine_processes_are_reduced_within_the_replica() -> None:
    lines = [f'vllm:num_requests_running{{engine="{i}"}} {i}' for i in range(8)]
    lines += [f'vllm:kv_cache_usage_perc{{engine="{i}"}} 0.5' for i in range(8)]
    sample = parse_engine_metrics("\n".join(lines) + "\n")
    assert sample.num_running == 28 and sample.kv_usage == 0.5


def test_one_bad_process_makes_the_whole_sum_unknown() -> None:
    text = 'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} NaN\n'
    assert parse_engine_metrics(text).num_running is None


def test_text_that_is_no_exposition_is_refused() -> None:
    with pytest.raises(ExpositionError):
        parse_engine_metrics("<html>not here</html>")


def test_what_the_public_client_library_writes_is_read() -> None:
    registry = CollectorRegistry()
    Counter("chairlift_steps", "Steps.", registry=registry).inc(3)
    Gauge("vllm:num_requests_running", "Running.", ["engine"], registry=registry).labels("0").set(2)
    sample = parse_engine_metrics(generate_latest(registry).decode())
    assert (sample.num_steps, sample.num_running) == (3, 2)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=200))
def test_no_text_crashes_the_reader(text: str) -> None:
    try:
        parse_engine_metrics(text)
    except ExpositionError:
        pass


def test_what_nobody_asks_for_is_not_parsed() -> None:
    noise = 'vllm:time_to_first_token_seconds_bucket{le="0.1"} 1\nvllm:prompt_tokens_totally 7 x\n'
    assert parse_engine_metrics(noise + COMPLETE + noise) == parse_engine_metrics(COMPLETE)


def test_arrivals_are_found_among_everything_that_a_gateway_shows() -> None:
    gateway = GatewayMetrics()
    gateway.of(RequestClass.INTERACTIVE).received.inc(4)
    gateway.of(RequestClass.BATCH).held.set(2)
    interactive, batch = parse_gateway_metrics(gateway.exposition().decode())
    assert (interactive.num_received, interactive.num_held) == (4, 0)
    assert (batch.num_received, batch.num_held) == (0, 2)
