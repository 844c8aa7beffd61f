"""A run in virtual time: the engine's own scheduler at modelled step times, and the planner on it.

No model, no sockets, no waiting: two minutes pass in a second or two. Finds the static batch size
that serves best, and says beforehand whether a load is above static's capacity and below tuned's.
`rush_formula`'s constants were chosen with it. Knows no text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from chairlift_bench.arrivals import Arrival
from chairlift_bench.outcomes import Outcome
from chairlift_bench.virtual import Served, VirtualReplica, VirtualRequest
from chairlift_engine.config import Capacity
from chairlift_engine.engine import StepReport
from chairlift_engine.scheduler import TokenEvent
from chairlift_engine.simulator_profile import Profile
from chairlift_operator.control_loop import TICK_S
from chairlift_operator.decisions import Decision, SetPolicy
from chairlift_operator.exposition import ClassSample, EngineSample, SloCount
from chairlift_operator.memory import Memory
from chairlift_operator.plan import plan
from chairlift_operator.policy_plan import first_policy
from chairlift_operator.snapshot import EngineCapacity, PolicyReadback, ReplicaSnapshot, Snapshot
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_values import BLOCK_TOKENS
from chairlift_operator.step_time import StepCosts
from chairlift_protocol.policy import Policy
from chairlift_protocol.wire import RequestClass

REPLICA: Final = "interactive-0"
NUM_KV_BLOCKS: Final = 8192
NOISE: Final = 0.04


@dataclass(frozen=True, slots=True)
class Backlog:
    """Batch-class work in a closed loop: each client sends its next request when one has ended."""

    requests: Sequence[Arrival]
    num_clients: int
    until_s: float


NO_BACKLOG: Final = Backlog((), 0, 0.0)


@dataclass(frozen=True, slots=True)
class Rehearsed:
    interactive: tuple[Outcome, ...]
    batch: tuple[Outcome, ...]
    decisions: tuple[Decision, ...]
    elapsed_s: float


@dataclass(slots=True)
class _Counts:
    """What the engine's /metrics would say."""

    steps: float = 0.0
    step_s: float = 0.0
    decodes: float = 0.0
    prefill: float = 0.0
    kv: float = 0.0
    prompts: float = 0.0
    tokens: float = 0.0
    finished: float = 0.0
    slo: dict[tuple[str, RequestClass, bool], float] = field(default_factory=dict)

    def count(self, objective: str, request_class: RequestClass, good: bool) -> None:
        key = objective, request_class, good
        self.slo[key] = self.slo.get(key, 0.0) + 1


class Rehearsal:
    """One run; used once. policy: what the engine starts with. enforced: the planner moves it."""

    def __init__(
        self,
        costs: StepCosts,
        pool: InferencePool,
        policy: Policy | None = None,
        enforced: bool = True,
        noise: float = NOISE,
        seed: int = 0,
    ) -> None:
        bounds = pool.spec.interactive
        capacity = Capacity(
            bounds.batch_size.max, bounds.step_tokens.max, NUM_KV_BLOCKS, BLOCK_TOKENS,
            pool.spec.model.max_length,
        )  # fmt: skip
        self._replica = VirtualReplica(
            capacity, policy or first_policy(pool), _profile(costs, noise), seed,
            self._take_report, self._take_end,
        )  # fmt: skip
        self._pool = pool
        self._enforced = enforced
        self._memory = Memory.start()
        self._counts = _Counts()
        self._backlog = NO_BACKLOG
        self._num_batch = 0
        self.decisions: list[Decision] = []

    def run(self, arrivals: Sequence[Arrival], backlog: Backlog = NO_BACKLOG) -> Rehearsed:
        for arrival in arrivals:
            self._submit(arrival.arrival_s, arrival, RequestClass.INTERACTIVE)
        self._backlog = backlog
        for _ in range(backlog.num_clients):
            self._submit_batch(0.0)
        replica, next_tick_s = self._replica, TICK_S if self._enforced else math.inf
        while not replica.is_done:
            now_s = replica.clock.now_s()
            if now_s >= next_tick_s:
                self._tick(now_s)
                next_tick_s += TICK_S
            replica.step(next_tick_s)
        return Rehearsed(
            interactive=self._outcomes_of(RequestClass.INTERACTIVE),
            batch=self._outcomes_of(RequestClass.BATCH),
            decisions=tuple(self.decisions),
            elapsed_s=replica.clock.now_s(),
        )

    def _outcomes_of(self, request_class: RequestClass) -> tuple[Outcome, ...]:
        served = [s for s in self._replica.served if s.request.request_class is request_class]
        return tuple(sorted((s.outcome for s in served), key=lambda o: o.due_s))

    def _submit(self, at_s: float, arrival: Arrival, request_class: RequestClass) -> None:
        self._replica.submit(
            VirtualRequest(at_s, arrival.prompt_tokens, arrival.output_tokens, request_class)
        )

    def _submit_batch(self, at_s: float) -> None:
        if at_s < self._backlog.until_s:
            requests = self._backlog.requests
            self._submit(at_s, requests[self._num_batch % len(requests)], RequestClass.BATCH)
            self._num_batch += 1

    def _take_report(self, report: StepReport) -> None:
        if report.sums is None:
            return
        counts, sums = self._counts, report.sums
        counts.steps += 1
        counts.step_s += sums.step_s
        counts.decodes += sums.num_decode_seqs
        counts.prefill += sums.num_prefill_tokens
        counts.kv += sums.kv_tokens
        for event in report.tokens:
            self._take_token(event, report.now_s)

    def _take_token(self, event: TokenEvent, now_s: float) -> None:
        request, counts, slo = event.request, self._counts, self._replica.scheduler.policy.slo
        counts.tokens += 1
        if event.gap_s is None:
            counts.prompts += request.num_prompt_tokens
            is_good = (now_s - request.arrival_s) * 1e3 <= slo.ttft_ms
            counts.count("ttft", request.request_class, is_good)
        else:
            counts.count("itl", request.request_class, event.gap_s * 1e3 <= slo.itl_ms)
        counts.finished += event.finish_reason is not None

    def _take_end(self, served: Served) -> None:
        if served.request.request_class is RequestClass.BATCH:
            self._submit_batch(self._replica.clock.now_s())

    def _tick(self, now_s: float) -> None:
        scheduler = self._replica.scheduler
        capacity, policy = scheduler.capacity, scheduler.policy
        bounds = EngineCapacity(
            capacity.batch_size, capacity.step_tokens, capacity.kv_tokens,
            capacity.model_length_tokens, capacity.block_tokens,
        )  # fmt: skip
        seen = ReplicaSnapshot(
            name=REPLICA,
            ready=True,
            sample=self._sample(policy),
            sampled_at_s=now_s,
            policy=PolicyReadback(policy, policy, bounds),
        )
        made = plan(self._pool, Snapshot(self._pool.name, now_s, (seen,)), self._memory, now_s)
        self._memory = made.memory
        self.decisions += made.decisions
        for action in made.actions:
            if isinstance(action, SetPolicy):  # one replica is all there is
                self._replica.set_policy(action.policy)

    def _sample(self, policy: Policy) -> EngineSample:
        scheduler, now_s = self._replica.scheduler, self._replica.clock.now_s()
        counts, residency = self._counts, scheduler.residency
        gauges = residency.gauges()
        thresholds_ms = {"ttft": policy.slo.ttft_ms, "itl": policy.slo.itl_ms}
        slo_counts = [
            SloCount(
                objective,
                threshold_ms,
                request_class.value,
                counts.slo.get((objective, request_class, True), 0.0),
                counts.slo.get((objective, request_class, False), 0.0),
            )
            for objective, threshold_ms in thresholds_ms.items()
            for request_class in RequestClass
        ]
        return EngineSample(
            step_seconds=counts.step_s,
            num_steps=counts.steps,
            step_decode_seqs=counts.decodes,
            step_prefill_tokens=counts.prefill,
            step_kv_tokens=counts.kv,
            num_running=float(sum(gauges.num_running.values())),
            num_waiting=float(sum(gauges.num_waiting.values())),
            kv_usage=1 - gauges.num_free_blocks / scheduler.capacity.num_blocks,
            prompt_tokens=counts.prompts,
            generation_tokens=counts.tokens,
            num_preemptions=float(residency.num_preemptions),
            num_finished=counts.finished,
            classes=tuple(
                ClassSample(
                    request_class=request_class,
                    num_running=float(gauges.num_running[request_class]),
                    num_waiting=float(gauges.num_waiting[request_class]),
                    oldest_waiting_s=0.0 if oldest_s is None else now_s - oldest_s,
                )
                for request_class, oldest_s in gauges.oldest_arrival_s.items()
            ),
            slo_counts=tuple(slo_counts),
            policy_generation=policy.generation,
        )


def static_policy(pool: InferencePool, batch_size: int) -> Policy:
    return replace(first_policy(pool), batch_size=batch_size, scheduling="static")


def _profile(costs: StepCosts, noise: float) -> Profile:
    return Profile(
        costs.fixed_s * 1e3, costs.decode_s * 1e3, costs.prefill_s * 1e3, costs.kv_s * 1e3, noise
    )
