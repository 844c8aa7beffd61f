"""A run of one engine in virtual time: its own scheduler at modelled step times, the planner on it.

No model, no sockets, no waiting: two minutes pass in a second or two. Finds the static batch size
that serves best, and says beforehand whether a load is above static's capacity and below tuned's.
`rush_formula`'s constants were chosen with it. Knows no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from chairlift_bench.outcomes import Outcome
from chairlift_engine.simulator_profile import Profile
from chairlift_operator.decisions import Decision
from chairlift_operator.policy_plan import first_policy
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_values import BLOCK_TOKENS
from chairlift_operator.step_time import StepCosts
from chairlift_protocol.policy import Policy
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.arrival_traces import Arrival
from chairlift_simulation.conditions import Backlog as PoolBacklog
from chairlift_simulation.conditions import Conditions
from chairlift_simulation.fleet import Hardware
from chairlift_simulation.laws import ChairliftLaw, NoLaw
from chairlift_simulation.pool_run import PoolRun
from chairlift_simulation.records import Journey, of_class
from chairlift_simulation.replica import VirtualRequest

NUM_KV_BLOCKS: Final = 8192
NOISE: Final = 0.04
LONGEST_S: Final = 3600.0  # after the last arrival; whatever takes longer has not ended


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
        started = policy or first_policy(pool)
        conditions = Conditions(
            Hardware(_profile(costs, noise), NUM_KV_BLOCKS * BLOCK_TOKENS, BLOCK_TOKENS),
            policy_delay_s=0.0,
            seed=seed,
            first_policy=lambda request_class: started,
            keeps_gaps=True,
            tail_s=LONGEST_S,
        )
        self._run = PoolRun(pool, ChairliftLaw(pool) if enforced else NoLaw(), conditions)

    def run(self, arrivals: Sequence[Arrival], backlog: Backlog = NO_BACKLOG) -> Rehearsed:
        requests = [VirtualRequest(a.arrival_s, a.prompt_tokens, a.output_tokens) for a in arrivals]
        clients = PoolBacklog(
            [VirtualRequest(0.0, a.prompt_tokens, a.output_tokens) for a in backlog.requests],
            backlog.num_clients,
            until_s=backlog.until_s,
        )
        until_s = max([backlog.until_s, *(a.arrival_s for a in arrivals)])
        result = self._run.run(requests, until_s, clients)
        return Rehearsed(
            interactive=_outcomes(of_class(result.journeys, RequestClass.INTERACTIVE)),
            batch=_outcomes(of_class(result.journeys, RequestClass.BATCH)),
            decisions=result.decisions,
            elapsed_s=result.elapsed_s,
        )


def _outcomes(journeys: Sequence[Journey]) -> tuple[Outcome, ...]:
    return tuple(
        Outcome(
            due_s=journey.request.due_s,
            ttft_s=journey.ttft_s,
            gaps_s=tuple(journey.gaps_s or ()),
            elapsed_s=(journey.ended_s or 0.0) - journey.request.due_s,
            text="",
            finish_reason="length" if journey.error is None else None,
            prompt_tokens=journey.request.prompt_tokens,
            output_tokens=journey.num_tokens,
            error=journey.error,
        )
        for journey in sorted(journeys, key=lambda j: j.request.due_s)
    )


def static_policy(pool: InferencePool, batch_size: int) -> Policy:
    return replace(first_policy(pool), batch_size=batch_size, scheduling="static")


def _profile(costs: StepCosts, noise: float) -> Profile:
    return Profile(
        costs.fixed_s * 1e3, costs.decode_s * 1e3, costs.prefill_s * 1e3, costs.kv_s * 1e3, noise
    )
