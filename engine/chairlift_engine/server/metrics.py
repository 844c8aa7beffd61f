"""What the engine exports: vLLM's metrics where vLLM has them, `chairlift_` ones beside them.

Fed from step reports, on the event loop's thread. Prompt tokens count when their request's first
token comes, as vLLM counts them. What is counted by tenant is in `tenant_metrics`.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from prometheus_client import Counter, generate_latest

from chairlift_engine.clock import Clock
from chairlift_engine.config import Capacity
from chairlift_engine.engine import StepReport, StepSums
from chairlift_engine.request import FinishReason, Request
from chairlift_engine.residency import Gauges
from chairlift_engine.scheduler import TokenEvent
from chairlift_engine.server.errors import REFUSALS
from chairlift_engine.server.series import Series
from chairlift_engine.server.tenant_metrics import TenantMetrics
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
PREFILL_SHARE_BUCKETS: Final = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
GENERATION_PARTS: Final = ("term", "counter")
STATES: Final = ("desired", "effective")
# What a deadline is called that a request missed, by how it ended.
DEADLINES: Final = {FinishReason.QUEUE_TIMEOUT: "queue", FinishReason.DEADLINE: "total"}


class Metrics:
    def __init__(self, model_name: str, engine_id: str, capacity: Capacity, clock: Clock) -> None:
        self._series = Series(model_name, engine_id)
        self._clock = clock
        self._capacity = capacity
        self._gauges: Gauges | None = None
        self._tenants = TenantMetrics()
        self._series.registry.register(self._tenants)
        self._threshold_ms: dict[str, float] = {}
        self._slo_series: dict[tuple[str, bool, RequestClass], Counter] = {}
        self._make_gauges()
        self._make_histograms()
        self._make_counters()

    def render(self) -> bytes:
        return generate_latest(self._series.registry)

    def observe_refusal(self, reason: str) -> None:
        """`reason` is one of `errors.REFUSALS`."""
        self._refused[reason].inc()

    def observe_missed_deadline(self, reason: FinishReason, num_requests: int = 1) -> None:
        self._deadlines_missed[DEADLINES[reason]].inc(num_requests)

    def observe_gauges(self, gauges: Gauges, desired: Policy, policy: Policy) -> None:
        self._running.set(sum(gauges.num_running.values()))
        self._waiting.set(sum(gauges.num_waiting.values()))
        for request_class in RequestClass:
            self._running_of[request_class].set(gauges.num_running[request_class])
            self._waiting_of[request_class].set(gauges.num_waiting[request_class])
        self._kv_usage.set(1 - gauges.num_free_blocks / self._capacity.num_blocks)
        self._cached_tokens.set(gauges.num_cached_blocks * self._capacity.block_tokens)
        self._observe_prefix_cache(gauges)
        self._gauges = gauges
        self._tenants.observe_gauges(gauges)
        for state, stated in (("desired", desired), ("effective", policy)):
            self._batch_size[state].set(stated.batch_size)
            self._step_tokens[state].set(stated.step_tokens)
        self._generation["term"].set(policy.generation.term)
        self._generation["counter"].set(policy.generation.counter)
        self._use_slo(policy.slo)

    def observe_report(self, report: StepReport) -> None:
        if report.sums is not None:
            self._observe_sums(report.sums)
        self._preemptions.inc(report.num_preemptions)
        self._out_of_memory.inc(report.ran_out_of_memory)
        self._use_slo(report.policy.slo)
        self._generation_tokens.inc(len(report.tokens))
        for event in report.tokens:
            self._observe_token(event, report.now_s)
        for request, reason in report.ended:
            self.observe_end(request, reason, report.now_s)
            waited_ms = (report.now_s - request.arrival_s) * 1e3
            if request.first_token_s is None and waited_ms > report.policy.slo.ttft_ms:
                # Its first token was already too late when it ended.
                self._count_slo("ttft", waited_ms, request)

    def observe_end(self, request: Request, reason: FinishReason, now_s: float) -> None:
        self._finished[reason].inc()
        if reason in DEADLINES:
            self.observe_missed_deadline(reason)
        if reason.is_complete:
            self._e2e.observe(now_s - request.arrival_s)

    def _observe_prefix_cache(self, gauges: Gauges) -> None:
        """The engine counts these from its start; a counter takes what has been added."""
        before = self._gauges
        known = (0, 0) if before is None else (before.prefix_query_tokens, before.prefix_hit_tokens)
        self._prefix_queries.inc(gauges.prefix_query_tokens - known[0])
        self._prefix_hits.inc(gauges.prefix_hit_tokens - known[1])

    def _observe_sums(self, sums: StepSums) -> None:
        self._steps.inc()
        self._step_s.inc(sums.step_s)
        self._decode_seqs.inc(sums.num_decode_seqs)
        self._prefill_tokens.inc(sums.num_prefill_tokens)
        self._kv_tokens.inc(sums.kv_tokens)
        num_tokens = sums.num_prefill_tokens + sums.num_decode_seqs
        self._prefill_share.observe(sums.num_prefill_tokens / num_tokens)

    def _observe_token(self, event: TokenEvent, now_s: float) -> None:
        request = event.request
        self._tenants.observe_token(event)
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
        arrival_s = None if self._gauges is None else self._gauges.oldest_arrival_s[request_class]
        return 0.0 if arrival_s is None else max(0.0, self._clock.now_s() - arrival_s)

    def _make_gauges(self) -> None:
        series = self._series
        self._running = series.gauge(names.NUM_REQUESTS_RUNNING, "Requests that hold a slot.")
        self._waiting = series.gauge(names.NUM_REQUESTS_WAITING, "Requests without a slot.")
        self._kv_usage = series.gauge(names.KV_CACHE_USAGE, "Used share of the KV blocks, 0 to 1.")
        self._running_of = series.class_gauges(
            names.REQUESTS_RUNNING, "Requests that hold a slot, by class."
        )
        self._waiting_of = series.class_gauges(
            names.REQUESTS_WAITING, "Requests without a slot, by class."
        )
        self._cached_tokens = series.plain_gauge(
            names.CACHED_KV_TOKENS, "Tokens of free KV blocks that a known prefix can still take."
        )
        oldest = series.class_gauges(
            names.OLDEST_WAITING_SECONDS, "Age of the oldest waiting request; 0 when none waits."
        )
        for request_class in RequestClass:
            oldest[request_class].set_function(partial(self._oldest_waiting_s, request_class))
        self._generation = series.labelled_gauges(
            names.POLICY_GENERATION, "Generation of the policy in force.", "part", GENERATION_PARTS
        )
        self._batch_size = series.labelled_gauges(
            names.BATCH_SIZE, "Most requests that may run, as set and in force.", "state", STATES
        )
        self._step_tokens = series.labelled_gauges(
            names.STEP_TOKENS, "Most tokens of a step, as set and in force.", "state", STATES
        )

    def _make_histograms(self) -> None:
        series = self._series
        self._ttft = series.histogram(
            names.TTFT_SECONDS, "From arrival to the first token.", TTFT_BUCKETS_S
        )
        self._itl = series.histogram(
            names.INTER_TOKEN_LATENCY_SECONDS, "Between two tokens of a request.", ITL_BUCKETS_S
        )
        self._e2e = series.histogram(
            names.E2E_LATENCY_SECONDS, "From arrival to the last token.", REQUEST_BUCKETS_S
        )
        self._queue_time = series.histogram(
            names.QUEUE_TIME_SECONDS, "From arrival to the first scheduled step.", REQUEST_BUCKETS_S
        )
        self._prefill_share = series.plain_histogram(
            names.STEP_PREFILL_SHARE, "Prefill's share of a step's tokens.", PREFILL_SHARE_BUCKETS
        )

    def _make_counters(self) -> None:
        series = self._series
        self._prompt_tokens = series.counter(names.PROMPT_TOKENS, "Prompt tokens, at first token.")
        self._generation_tokens = series.counter(names.GENERATION_TOKENS, "Sampled tokens.")
        self._preemptions = series.counter(names.NUM_PREEMPTIONS, "Requests sent back to waiting.")
        self._prefix_queries = series.counter(
            names.PREFIX_CACHE_QUERIES, "Prompt tokens looked up in the prefix cache."
        )
        self._prefix_hits = series.counter(
            names.PREFIX_CACHE_HITS, "Prompt tokens found in the prefix cache."
        )
        self._finished = dict(
            zip(
                FinishReason,
                series.counters(
                    names.REQUEST_SUCCESS,
                    "Requests that ended, also by abort or error.",
                    "finished_reason",
                    list(FinishReason),
                ),
                strict=True,
            )
        )
        self._make_class_counters()
        self._make_step_counters()

    def _make_class_counters(self) -> None:
        series = self._series
        self._first_tokens = series.class_counters(
            names.FIRST_TOKENS, "Requests that got their first token."
        )
        self._class_prompt_tokens = series.class_counters(
            names.CLASS_PROMPT_TOKENS, "Prompt tokens by class, at first token."
        )
        self._class_generation_tokens = series.class_counters(
            names.CLASS_GENERATION_TOKENS, "Sampled tokens by class."
        )
        self._refused = series.labelled_counters(
            names.REQUESTS_REFUSED, "Requests refused before they were begun.", "reason", REFUSALS
        )
        self._deadlines_missed = series.labelled_counters(
            names.DEADLINES_MISSED,
            "Requests not started (queue) or not finished (total) in their time.",
            "deadline",
            list(DEADLINES.values()),
        )
        self._slo_events = Counter(
            names.SLO_EVENTS,
            "First tokens and gaps by whether they kept the policy's threshold.",
            ["objective", "threshold_ms", "result", "class"],
            registry=series.registry,
        )

    def _make_step_counters(self) -> None:
        counter = self._series.plain_counter
        self._steps = counter(names.STEPS, "Steps computed.")
        self._step_s = counter(names.STEP_SECONDS, "Time inside steps.")
        self._decode_seqs = counter(names.STEP_DECODE_SEQS, "Decodes, over steps.")
        self._prefill_tokens = counter(names.STEP_PREFILL_TOKENS, "Prefill tokens, over steps.")
        self._kv_tokens = counter(names.STEP_KV_TOKENS, "Context tokens attended to, over steps.")
        self._out_of_memory = counter(names.OUT_OF_MEMORY, "Steps that ran out of memory.")
