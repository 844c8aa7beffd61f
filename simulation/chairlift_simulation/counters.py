"""What an engine's /metrics would say, counted from the same step reports, as a read sample.

Counts as `chairlift_engine.server.metrics` does, and skips the text between: a test holds the two
against each other. Fed by `fleet` for every step of every replica, so it is written to be quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chairlift_engine.engine import StepReport
from chairlift_engine.residency import Gauges
from chairlift_operator.exposition import ClassSample, EngineSample, SloCount, SlotHolder
from chairlift_protocol.policy import Policy
from chairlift_protocol.wire import RequestClass

_SloKey = tuple[str, float, RequestClass]


@dataclass(slots=True)
class _ClassCounts:
    first_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


@dataclass(slots=True)
class EngineCounters:
    """slo: [good, bad] by objective, threshold in ms, and class."""

    step_s: float = 0.0
    num_steps: int = 0
    decodes: int = 0
    prefill_tokens: int = 0
    kv_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    classes: dict[RequestClass, _ClassCounts] = field(
        default_factory=lambda: {c: _ClassCounts() for c in RequestClass}
    )
    slo: dict[_SloKey, list[int]] = field(default_factory=dict)
    _gap_ms: float | None = None  # the threshold that ...
    _gap_slots: dict[RequestClass, list[int]] = field(default_factory=dict)  # ... these are of

    def take(self, report: StepReport) -> None:
        if (sums := report.sums) is not None:
            self.num_steps += 1
            self.step_s += sums.step_s
            self.decodes += sums.num_decode_seqs
            self.prefill_tokens += sums.num_prefill_tokens
            self.kv_tokens += sums.kv_tokens
        self.num_preemptions += report.num_preemptions
        slo = report.policy.slo
        if slo.itl_ms != self._gap_ms:
            self._gap_ms = slo.itl_ms
            self._gap_slots = {c: self._slots("itl", slo.itl_ms, c) for c in RequestClass}
        now_s, itl_ms = report.now_s, slo.itl_ms
        classes, gap_slots = self.classes, self._gap_slots
        for request, _, gap_s, reason, _ in report.tokens:
            request_class = request.request_class
            counts = classes[request_class]
            counts.generation_tokens += 1
            if gap_s is not None:
                gap_slots[request_class][gap_s * 1e3 > itl_ms] += 1
            else:
                counts.first_tokens += 1
                counts.prompt_tokens += request.num_prompt_tokens
                is_late = (now_s - request.arrival_s) * 1e3 > slo.ttft_ms
                self._slots("ttft", slo.ttft_ms, request_class)[is_late] += 1
            if reason is not None:
                self.num_finished += 1
        for request, _ in report.ended:
            self.num_finished += 1
            waited_ms = (now_s - request.arrival_s) * 1e3
            if request.first_token_s is None and waited_ms > slo.ttft_ms:
                self._slots("ttft", slo.ttft_ms, request.request_class)[True] += 1

    def sample(self, gauges: Gauges, policy: Policy, num_blocks: int, now_s: float) -> EngineSample:
        """gauges: of the last report."""
        for request_class in RequestClass:  # series start at 0
            self._slots("ttft", policy.slo.ttft_ms, request_class)
            self._slots("itl", policy.slo.itl_ms, request_class)
        counted = self.classes.values()
        return EngineSample(
            step_seconds=self.step_s,
            num_steps=float(self.num_steps),
            step_decode_seqs=float(self.decodes),
            step_prefill_tokens=float(self.prefill_tokens),
            step_kv_tokens=float(self.kv_tokens),
            num_running=float(sum(gauges.num_running.values())),
            num_waiting=float(sum(gauges.num_waiting.values())),
            kv_usage=1 - gauges.num_free_blocks / num_blocks,
            prompt_tokens=float(sum(c.prompt_tokens for c in counted)),
            generation_tokens=float(sum(c.generation_tokens for c in counted)),
            num_preemptions=float(self.num_preemptions),
            num_finished=float(self.num_finished),
            classes=tuple(self._class(c, gauges, now_s) for c in RequestClass),
            slo_counts=tuple(
                SloCount(objective, threshold_ms, request_class.value, float(good), float(bad))
                for (objective, threshold_ms, request_class), (good, bad) in sorted(
                    self.slo.items()
                )
            ),
            policy_generation=policy.generation,
            slot_holder=SlotHolder.among(
                {name: float(t.num_running) for name, t in (gauges.tenants or {}).items()},
                {name: float(t.num_waiting) for name, t in (gauges.tenants or {}).items()},
            ),
        )

    def _class(self, request_class: RequestClass, gauges: Gauges, now_s: float) -> ClassSample:
        counts, arrival_s = self.classes[request_class], gauges.oldest_arrival_s[request_class]
        return ClassSample(
            request_class,
            num_running=float(gauges.num_running[request_class]),
            num_waiting=float(gauges.num_waiting[request_class]),
            oldest_waiting_s=0.0 if arrival_s is None else max(0.0, now_s - arrival_s),
            first_tokens=float(counts.first_tokens),
            prompt_tokens=float(counts.prompt_tokens),
            generation_tokens=float(counts.generation_tokens),
        )

    def _slots(self, objective: str, threshold_ms: float, request_class: RequestClass) -> list[int]:
        return self.slo.setdefault((objective, threshold_ms, request_class), [0, 0])
