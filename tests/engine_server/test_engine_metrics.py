from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from chairlift_engine.request import FinishReason
from chairlift_engine.residency import Gauges, TenantGauge
from chairlift_engine.server.tenant_metrics import MAX_TENANTS, TenantMetrics
from chairlift_protocol import metrics as names


def samples(engine) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(engine.client.get("/metrics").text):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_the_exposition_parses_and_holds_every_engine_metric_from_the_start(engine) -> None:
    found = samples(engine)
    for name in vars(names):
        value = getattr(names, name)
        if name.isupper() and not name.startswith(("GATEWAY", "REQUESTS_RECEIVED")):
            assert value in found or f"{value}_count" in found, name
    for name, series in found.items():
        if name.startswith("vllm:"):
            assert all(("engine", "0") in labels for labels in series)
            assert all(("model_name", "echo") in labels for labels in series)
    assert not any(name.endswith("_created") for name in found)
    reasons = {dict(labels)["finished_reason"] for labels in found[names.REQUEST_SUCCESS]}
    assert reasons == set(FinishReason)


def test_the_exposition_passes_what_promtool_checks(engine) -> None:
    """Its rules but one: vLLM's names have colons, which promtool keeps for recording rules."""
    engine.complete("abc")
    text = engine.client.get("/metrics").text
    helps = Counter(re.findall(r"^# HELP (\S+) \S", text, re.MULTILINE))
    types = Counter(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    assert helps == types and set(helps.values()) == {1}
    for family in text_string_to_metric_families(text):
        seen = [(s.name, tuple(sorted(s.labels.items()))) for s in family.samples]
        assert len(seen) == len(set(seen)), family.name
        for name, labels in seen:
            assert re.fullmatch(r"[a-z]+[:_][a-z][a-z0-9_]*[a-z]", name)
            # No camel case, no unit but the base one, no label that a type reserves.
            assert not re.search(r"(milliseconds|minutes|hours|kilobytes|percent)", name)
            reserved = {"le"} if family.type == "histogram" else set()
            assert {"le", "quantile"} & dict(labels).keys() <= reserved
            if family.type == "counter":
                assert name.endswith("_total")
            else:
                assert not name.endswith(("_total", "_info")) and family.type in name_rules(name)


def name_rules(name: str) -> set[str]:
    ends = ("_bucket", "_count", "_sum")
    return {"histogram"} if name.endswith(ends) else {"gauge"}


def test_histograms_are_cumulative_and_end_with_infinity(engine) -> None:
    engine.complete("abc", max_tokens=4)
    for family in text_string_to_metric_families(engine.client.get("/metrics").text):
        if family.type == "histogram":
            buckets = [(s.labels["le"], s.value) for s in family.samples if "le" in s.labels]
            bounds = [float(le) for le, _ in buckets]
            assert bounds == sorted(set(bounds)) and buckets[-1][0] == "+Inf", family.name
            counts = [value for _, value in buckets]
            assert counts == sorted(counts)
            assert counts[-1] == next(s.value for s in family.samples if s.name.endswith("_count"))


def test_tenants_have_a_bounded_number_of_series(engine, eventually) -> None:
    for number in range(MAX_TENANTS + 20):
        headers = {
            "x-chairlift-internal-token": "internal secret",
            "x-chairlift-tenant": f"tenant-{number}",
        }
        assert engine.complete("ab", max_tokens=3, headers=headers).status_code == 200
    eventually(lambda: engine.metric("vllm:num_requests_running") == 0)
    found = samples(engine)
    for name in (names.TENANT_PROMPT_TOKENS, names.TENANT_GENERATION_TOKENS):
        series = {dict(labels)["tenant"]: value for labels, value in found[name].items()}
        assert len(series) == MAX_TENANTS + 1
        assert series["tenant-0"] == 3 and series["other"] == 3 * 20
        assert sum(series.values()) == 3 * (MAX_TENANTS + 20)
    for name in (names.TENANT_RUNNING, names.TENANT_WAITING):
        assert len(found[name]) == MAX_TENANTS + 1 and sum(found[name].values()) == 0


def test_ten_thousand_tenants_at_once_have_a_bounded_number_of_series() -> None:
    metrics = TenantMetrics()
    running = {f"tenant-{number}": TenantGauge(1, 2) for number in range(10_000)}
    metrics.observe_gauges(Gauges({}, {}, {}, 0, 0, tenants=running))
    found = {
        family.name: {sample.labels["tenant"]: sample.value for sample in family.samples}
        for family in metrics.collect()
    }
    assert {len(series) for series in found.values()} == {MAX_TENANTS + 1} and len(found) == 4
    assert found[names.TENANT_RUNNING]["other"] == 10_000 - MAX_TENANTS
    assert sum(found[names.TENANT_WAITING].values()) == 2 * 10_000


def test_running_and_waiting_requests_are_counted_by_tenant(start_engine, eventually) -> None:
    engine = start_engine(batch_size=2)
    engine.runner.hold()
    body = {"model": "echo", "prompt": ["abc"] * 3, "max_tokens": 50, "ignore_eos": True}
    gateway = "x-chairlift-internal-token: internal secret\r\nx-chairlift-tenant: acme\r\n"
    with engine.open_raw("/v1/completions", body, gateway):
        assert engine.runner.in_step.wait(5)
        assert engine.metric('chairlift_tenant_requests_waiting{tenant="acme"}') == 3
        engine.runner.allow(1)
        eventually(lambda: engine.metric('chairlift_tenant_requests_running{tenant="acme"}') > 0)
        total = engine.metric('chairlift_tenant_requests_running{tenant="acme"}')
        total += engine.metric('chairlift_tenant_requests_waiting{tenant="acme"}')
        assert total == 3
        engine.runner.release()


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_aborted_requests_and_their_tokens_are_counted(engine, eventually, num_tokens) -> None:
    engine.runner.hold()
    body = {"model": "echo", "prompt": [97] * 10, "max_tokens": 50, "ignore_eos": True}
    connection = engine.open_raw("/v1/completions", body)
    engine.runner.allow(num_tokens)
    eventually(lambda: engine.metric("chairlift_steps_total") == num_tokens)
    connection.close()
    eventually(lambda: engine.server.replica.num_in_flight == 0)
    engine.runner.allow(1)  # the step that was under way
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="echo"}'
    eventually(lambda: engine.metric(aborted) == 1)
    assert engine.metric("vllm:prompt_tokens_total") == 10
    assert engine.metric("vllm:generation_tokens_total") == num_tokens + 1
    assert engine.metric('chairlift_tenant_generation_tokens_total{tenant="anonymous"}') == (
        num_tokens + 1
    )


def test_metrics_are_whole_whatever_number_of_workers_is_asked_for(
    start_engine, monkeypatch, eventually
) -> None:
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    engine = start_engine()
    for _ in range(8):
        with engine.open_raw("/v1/completions", {"model": "echo", "prompt": "a"}) as connection:
            with connection.makefile("r") as received:
                assert "200 OK" in received.readline()
    assert engine.metric("vllm:prompt_tokens_total") == 8 * 2


def test_the_prefill_share_of_steps_is_a_histogram(engine, eventually) -> None:
    engine.complete([97] * 10, max_tokens=4, ignore_eos=True)
    eventually(lambda: engine.metric("chairlift_steps_total") == 4)
    assert engine.metric('chairlift_step_prefill_share_bucket{le="0.0"}') == 3
    assert engine.metric('chairlift_step_prefill_share_bucket{le="0.95"}') == 3
    assert engine.metric("chairlift_step_prefill_share_count") == 4


def test_slo_series_are_zero_rather_than_absent_also_after_a_policy_change(engine) -> None:
    assert len(samples(engine)[names.SLO_EVENTS]) == 8
    policy = engine.admin.get("/admin/policy").json()["effective"]
    policy |= {"generation": [3, 7], "slo": {"ttft_ms": 0.25, "itl_ms": 1e-3}}
    assert engine.admin.patch("/admin/policy", content=json.dumps(policy)).status_code == 200
    found = samples(engine)
    thresholds = {dict(labels)["threshold_ms"] for labels in found[names.SLO_EVENTS]}
    assert thresholds == {"1000", "100", "0.25", "0.001"}
    assert found[names.POLICY_GENERATION] == {(("part", "term"),): 3, (("part", "counter"),): 7}


def test_one_request_is_counted_once_everywhere(engine, eventually) -> None:
    engine.complete([97] * 10, max_tokens=4, ignore_eos=True)
    eventually(lambda: engine.metric("chairlift_steps_total") == 4)
    found = {name: sum(series.values()) for name, series in samples(engine).items()}
    assert found[names.PROMPT_TOKENS] == 10
    assert found[names.GENERATION_TOKENS] == 4
    assert found[names.REQUEST_SUCCESS] == 1
    assert found[names.STEP_PREFILL_TOKENS] == 10
    assert found[names.STEP_DECODE_SEQS] == 3
    assert found[names.STEP_KV_TOKENS] == 10 + 11 + 12 + 13
    assert found[names.STEP_SECONDS] > 0
    for name, count in (
        (names.TTFT_SECONDS, 1),
        (names.INTER_TOKEN_LATENCY_SECONDS, 3),
        (names.E2E_LATENCY_SECONDS, 1),
        (names.QUEUE_TIME_SECONDS, 1),
    ):
        assert found[f"{name}_count"] == count
    assert found[names.SLO_EVENTS] == 4


def test_refused_requests_are_not_counted_as_finished(engine) -> None:
    assert engine.complete("").status_code == 400
    found = {name: sum(series.values()) for name, series in samples(engine).items()}
    assert found[names.REQUEST_SUCCESS] == 0


def test_a_request_that_ends_after_its_time_without_a_token_is_a_bad_event(
    engine, eventually
) -> None:
    engine.runner.hold()
    gateway = "x-chairlift-internal-token: internal secret\r\nx-chairlift-waited-ms: 5000\r\n"
    body = {"model": "echo", "prompt": "abc", "max_tokens": 2}
    with engine.open_raw("/v1/completions", body, gateway):
        assert engine.runner.in_step.wait(5)
        with engine.open_raw("/v1/completions", body, gateway):
            eventually(lambda: engine.serving.bridge.num_open == 2)
        eventually(lambda: engine.server.replica.num_in_flight == 1)
        engine.runner.release()
        bad = 'chairlift_slo_events_total{class="interactive",objective="ttft",result="bad"'
        eventually(lambda: engine.metric(bad) == 2)


def test_time_in_a_full_queue_is_in_the_first_tokens_time(start_engine, eventually) -> None:
    """O12: the one whose slot was taken for longer than the objective is late, however short its
    own prefill."""
    engine = start_engine(batch_size=1)
    known = [dict(labels) for labels in samples(engine)[names.SLO_EVENTS]]
    (threshold_ms,) = {labels["threshold_ms"] for labels in known if labels["objective"] == "ttft"}
    threshold_s = 1e-3 * float(threshold_ms)
    engine.runner.hold()
    body = {"model": "echo", "prompt": "abc", "max_tokens": 50, "ignore_eos": True}
    first = engine.open_raw("/v1/completions", body)
    engine.runner.allow(1)
    events = 'chairlift_slo_events_total{class="interactive",objective="ttft",result='
    eventually(lambda: engine.metric(events + '"good"') == 1)
    with engine.open_raw("/v1/completions", {**body, "max_tokens": 1}):
        waited = 'chairlift_oldest_waiting_seconds{class="interactive"}'
        eventually(lambda: engine.metric(waited) > threshold_s)
        first.close()
        engine.runner.release()
        eventually(lambda: engine.metric(events + '"bad"') == 1)
        assert engine.metric("vllm:time_to_first_token_seconds_sum") > threshold_s
