"""What the engine exports: vLLM's metrics where vLLM has them, `chairlift_` ones beside them.

Fed from step reports, on the event loop's thread; a registry of its own, so that engines can share
a process in tests. Prompt tokens count when their request's first token comes, as vLLM counts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from chairlift_engine.clock import Clock
from chairlift_engine.config import Capacity
from chairlift_engine.engine import StepReport, StepSums
from chairlift_engine.request import FinishReason, Request
from chairlift_engine.residency import Gauges
from chairlift_engine.scheduler import TokenEvent
from chairlift_protocol import metrics as names
from chairlift_protocol.policy import Policy, SloThresholds
from chairlift_protocol.wire import RequestClass

# vLLM's bounds and finer ones between them, so that its dashboards' quantiles work unchanged.
TTFT_BUCKETS_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75),
    *(1.0, 1.25, 1.5, 2.0, 2.5, 3.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS_S: Final = (
    *(0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.09, 0.1, 0.125, 0.15),
    *(0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS_S: Final = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Metrics:
    def __init__(self, model_name: str, engine_id: str, capacity: Capacity, clock: Clock) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._clock = clock
        self._num_blocks = capacity.num_blocks
        self._labels = {"model_name": model_name, "engine": engine_id}
        self._oldest_arrival_s: Mapping[RequestClass, float | None] = {}
        self._threshold_ms: dict[str, float] = {}
        self._slo_series: dict[tuple[str, bool, RequestClass], Counter] = {}
        self._make_gauges()
        self._make_histograms()
        self._make_counters()

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def observe_gauges(self, gauges: Gauges, policy: Policy) -> None:
        self._running.set(sum(gauges.num_running.values()))
        self._waiting.set(sum(gauges.num_waiting.values()))
        for request_class in RequestClass:
            self._running_of[request_class].set(gauges.num_running[request_class])
            self._waiting_of[request_class].set(gauges.num_waiting[request_class])
        self._kv_usage.set(1 - gauges.num_free_blocks / self._num_blocks)
        self._oldest_arrival_s = gauges.oldest_arrival_s
        self._generation_term.set(policy.generation.term)
        self._generation_counter.set(policy.generation.counter)
        self._use_slo(policy.slo)

    def observe_report(self, report: StepReport, policy: Policy) -> None:
        if report.sums is not None:
            self._observe_sums(report.sums)
        self._preemptions.inc(report.num_preemptions)
        self._use_slo(policy.slo)
        self._generation_tokens.inc(len(report.tokens))
        for event in report.tokens:
            self._observe_token(event, report.now_s)
        for request, reason in report.ended:
            self.observe_end(request, reason, report.now_s)
            waited_ms = (report.now_s - request.arrival_s) * 1e3
            if request.first_token_s is None and waited_ms > policy.slo.ttft_ms:
                # Its first token was already too late when it ended.
                self._count_slo("ttft", waited_ms, request)

    def observe_end(self, request: Request, reason: FinishReason, now_s: float) -> None:
        self._finished[reason].inc()
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._e2e.observe(now_s - request.arrival_s)

    def _observe_sums(self, sums: StepSums) -> None:
        self._steps.inc()
        self._step_s.inc(sums.step_s)
        self._decode_seqs.inc(sums.num_decode_seqs)
        self._prefill_tokens.inc(sums.num_prefill_tokens)
        self._kv_tokens.inc(sums.kv_tokens)

    def _observe_token(self, event: TokenEvent, now_s: float) -> None:
        request = event.request
        self._class_generation_tokens[request.request_class].inc()
        if event.gap_s is not None:
            self._itl.observe(event.gap_s)
            self._count_slo("itl", event.gap_s * 1e3, request)
        else:
            assert request.first_scheduled_s is not None
            age_s = now_s - request.arrival_s
            self._prompt_tokens.inc(request.num_prompt_tokens)
            self._first_tokens[request.request_class].inc()
            self._class_prompt_tokens[request.request_class].inc(request.num_prompt_tokens)
            self._ttft.observe(age_s)
            self._queue_time.observe(request.first_scheduled_s - request.arrival_s)
            self._count_slo("ttft", age_s * 1e3, request)
        if event.finish_reason is not None:
            self.observe_end(request, event.finish_reason, now_s)

    def _count_slo(self, objective: str, value_ms: float, request: Request) -> None:
        is_good = value_ms <= self._threshold_ms[objective]
        self._slo_series[objective, is_good, request.request_class].inc()

    def _use_slo(self, slo: SloThresholds) -> None:
        """Series start at 0: a reader can tell no bad event from no counter."""
        thresholds_ms = {"ttft": slo.ttft_ms, "itl": slo.itl_ms}
        if thresholds_ms == self._threshold_ms:
            return
        self._threshold_ms = thresholds_ms
        self._slo_series = {
            (objective, is_good, request_class): self._slo_events.labels(
                objective, f"{threshold_ms:g}", "good" if is_good else "bad", request_class
            )
            for objective, threshold_ms in thresholds_ms.items()
            for is_good in (True, False)
            for request_class in RequestClass
        }

    def _oldest_waiting_s(self, request_class: RequestClass) -> float:
        arrival_s = self._oldest_arrival_s.get(request_class)
        return 0.0 if arrival_s is None else max(0.0, self._clock.now_s() - arrival_s)

    def _make_gauges(self) -> None:
        self._running = self._gauge(names.NUM_REQUESTS_RUNNING, "Requests that hold a slot.")
        self._waiting = self._gauge(names.NUM_REQUESTS_WAITING, "Requests without a slot.")
        self._kv_usage = self._gauge(names.KV_CACHE_USAGE, "Used share of the KV blocks, 0 to 1.")
        generation = Gauge(
            names.POLICY_GENERATION,
            "Generation of the policy in force.",
            ["part"],
            registry=self.registry,
        )
        self._generation_term = generation.labels("term")
        self._generation_counter = generation.labels("counter")
        self._running_of = self._class_gauge(
            names.REQUESTS_RUNNING, "Requests that hold a slot, by class."
        )
        self._waiting_of = self._class_gauge(
            names.REQUESTS_WAITING, "Requests without a slot, by class."
        )
        oldest = self._class_gauge(
            names.OLDEST_WAITING_SECONDS, "Age of the oldest waiting request; 0 when none waits."
        )
        for request_class, gauge in oldest.items():
            gauge.set_function(partial(self._oldest_waiting_s, request_class))

    def _make_histograms(self) -> None:
        self._ttft = self._histogram(
            names.TTFT_SECONDS, "From arrival to the first token.", TTFT_BUCKETS_S
        )
        self._itl = self._histogram(
            names.INTER_TOKEN_LATENCY_SECONDS, "Between two tokens of a request.", ITL_BUCKETS_S
        )
        self._e2e = self._histogram(
            names.E2E_LATENCY_SECONDS, "From arrival to the last token.", REQUEST_BUCKETS_S
        )
        self._queue_time = self._histogram(
            names.QUEUE_TIME_SECONDS, "From arrival to the first scheduled step.", REQUEST_BUCKETS_S
        )

    def _make_counters(self) -> None:
        self._prompt_tokens = self._counter(names.PROMPT_TOKENS, "Prompt tokens, at first token.")
        self._generation_tokens = self._counter(names.GENERATION_TOKENS, "Sampled tokens.")
        self._preemptions = self._counter(names.NUM_PREEMPTIONS, "Requests sent back to waiting.")
        self._first_tokens = self._class_counter(
            names.FIRST_TOKENS, "Requests that got their first token."
        )
        self._class_prompt_tokens = self._class_counter(
            names.CLASS_PROMPT_TOKENS, "Prompt tokens by class, at first token."
        )
        self._class_generation_tokens = self._class_counter(
            names.CLASS_GENERATION_TOKENS, "Sampled tokens by class."
        )
        success = Counter(
            names.REQUEST_SUCCESS,
            "Requests that ended, also by abort or error.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self._finished = {
            reason: success.labels(**self._labels, finished_reason=reason)
            for reason in FinishReason
        }
        self._steps = self._plain_counter(names.STEPS, "Steps computed.")
        self._step_s = self._plain_counter(names.STEP_SECONDS, "Time inside steps.")
        self._decode_seqs = self._plain_counter(names.STEP_DECODE_SEQS, "Decodes, over steps.")
        self._prefill_tokens = self._plain_counter(
            names.STEP_PREFILL_TOKENS, "Prefill tokens, over steps."
        )
        self._kv_tokens = self._plain_counter(
            names.STEP_KV_TOKENS, "Context tokens attended to, over steps."
        )
        self._slo_events = Counter(
            names.SLO_EVENTS,
            "First tokens and gaps by whether they kept the policy's threshold.",
            ["objective", "threshold_ms", "result", "class"],
            registry=self.registry,
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _class_gauge(self, name: str, text: str) -> dict[RequestClass, Gauge]:
        gauge = Gauge(name, text, ["class"], registry=self.registry)
        return {request_class: gauge.labels(request_class) for request_class in RequestClass}

    def _class_counter(self, name: str, text: str) -> dict[RequestClass, Counter]:
        counter = Counter(name, text, ["class"], registry=self.registry)
        return {request_class: counter.labels(request_class) for request_class in RequestClass}

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._labels), registry=self.registry).labels(
            **self._labels
        )

    def _plain_counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets_s: tuple[float, ...]) -> Histogram:
        return Histogram(
            name, text, list(self._labels), registry=self.registry, buckets=buckets_s
        ).labels(**self._labels)
