from __future__ import annotations

import json

from prometheus_client.parser import text_string_to_metric_families

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
    assert reasons == {"stop", "length", "abort", "error"}


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
    connection = engine.open_raw("/v1/completions", body, gateway)
    assert engine.runner.in_step.wait(5)
    waiting = engine.open_raw("/v1/completions", body, gateway)
    eventually(lambda: engine.server.replica.num_in_flight == 2)
    waiting.close()
    eventually(lambda: engine.server.replica.num_in_flight == 1)
    engine.runner.release()
    bad = 'chairlift_slo_events_total{class="interactive",objective="ttft",result="bad"'
    eventually(lambda: engine.metric(bad) == 2)
    connection.close()
