"""What one tenant's flood does to another's chat, and how two backlogged tenants share an engine.

`python -m chairlift_bench.bench_fairness` runs the engine's own loop in virtual time. First a chat
(one request at a time, with pauses) alone and beside a tenant that keeps 30 requests in flight;
then two tenants that both do, with weights 1 and 2. `make bench-fairness` calls it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from chairlift_bench.arrivals import read_arrivals, with_lengths_divided
from chairlift_bench.claims import publish
from chairlift_bench.outcomes import percentile
from chairlift_bench.virtual import BenchReplica, Served
from chairlift_engine.config import Capacity
from chairlift_engine.engine import StepReport
from chairlift_engine.simulator_profile import Profile
from chairlift_protocol.policy import Generation, Policy, SloThresholds, TenantPolicy
from chairlift_simulation.arrival_traces import Arrival
from chairlift_simulation.replica import VirtualRequest

NUM_IN_FLIGHT: Final = 30
NUM_TURNS: Final = 200
CHAT_TOKENS, ANSWER_TOKENS, PAUSE_S = 120, 60, 0.5
WARM_UP_S, SHARING_S = 30.0, 600.0
WEIGHTS: Final = {"one": 1.0, "two": 2.0}
# Half of what the flood keeps in flight finds a slot.
CAPACITY: Final = Capacity(
    batch_size=16, step_tokens=256, num_blocks=4096, block_tokens=16, model_length_tokens=4096
)
POLICY: Final = Policy(
    Generation(0, 0), 16, 256, 256, 1.0, SloThresholds(1000.0, 100.0),
    tenants={tenant: TenantPolicy(weight) for tenant, weight in WEIGHTS.items()},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chat:
    """step_s: mean time of the steps that ran."""

    ttft_p50_s: float
    ttft_p95_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Sharing:
    """Tokens computed for each tenant while all were backlogged, and the share each should have."""

    num_tokens: Mapping[str, int]
    wanted: Mapping[str, float]

    @property
    def error(self) -> float:
        """How far the share of the tenant that is furthest off is from its wanted one."""
        total = sum(self.num_tokens.values())
        return max(abs(self.num_tokens[t] / total - share) for t, share in self.wanted.items())


class Flood:
    """A tenant who sends the next request whenever one has ended."""

    def __init__(self, tenant: str, arrivals: Iterator[Arrival]) -> None:
        self.tenant = tenant
        self._arrivals = arrivals

    def next(self, now_s: float) -> VirtualRequest:
        arrival = next(self._arrivals)
        return VirtualRequest(
            now_s, arrival.prompt_tokens, arrival.output_tokens, tenant=self.tenant
        )


class Ride:
    """A replica on which floods go on and each of a chat's turns follows the one before."""

    def __init__(self, floods: list[Flood], num_turns: int) -> None:
        self.chat: list[Served] = []
        self._floods = {flood.tenant: flood for flood in floods}
        self._num_turns = num_turns
        self._step_s = self._num_steps = 0.0
        self.num_tokens: Counter[str] = Counter()
        self.replica = BenchReplica(
            CAPACITY, POLICY, Profile(), on_report=self._take, on_end=self._follow
        )
        for flood in floods:
            for _ in range(NUM_IN_FLIGHT):
                self.replica.submit(flood.next(0.0))
        if num_turns:
            self.replica.submit(self._turn(WARM_UP_S))

    def run_chat(self) -> Chat:
        while len(self.chat) < self._num_turns:
            self.replica.step()
        ttfts_s = [s.outcome.ttft_s or 0.0 for s in self.chat]
        return Chat(
            percentile(ttfts_s, 50), percentile(ttfts_s, 95), self._step_s / self._num_steps
        )

    def _turn(self, due_s: float) -> VirtualRequest:
        return VirtualRequest(due_s, CHAT_TOKENS, ANSWER_TOKENS, tenant="chat")

    def _take(self, report: StepReport) -> None:
        if report.sums is not None:
            self._step_s += report.sums.step_s
            self._num_steps += 1
        for event in report.tokens:  # a prompt counts when it has been computed
            is_first = event.gap_s is None
            request = event.request
            self.num_tokens[request.tenant] += request.num_prompt_tokens if is_first else 1

    def _follow(self, served: Served) -> None:
        now_s = self.replica.clock.now_s()
        flood = self._floods.get(served.request.tenant)
        if flood is not None:
            self.replica.submit(flood.next(now_s))
            return
        self.chat.append(served)
        if len(self.chat) < self._num_turns:
            self.replica.submit(self._turn(now_s + PAUSE_S))


def extra_ttft_steps(num_turns: int = NUM_TURNS) -> tuple[Chat, Chat, float]:
    """The chat alone, beside the flood, and by how many steps of the latter its p95 is later."""
    alone = Ride([], num_turns).run_chat()
    beside = Ride([Flood("flood", trace())], num_turns).run_chat()
    return alone, beside, (beside.ttft_p95_s - alone.ttft_p95_s) / beside.step_s


def sharing(duration_s: float = SHARING_S) -> Sharing:
    floods = [Flood(tenant, trace(1000 * number)) for number, tenant in enumerate(WEIGHTS)]
    ride = Ride(floods, 0)
    ride.replica.run(WARM_UP_S)
    before = ride.num_tokens.copy()
    ride.replica.run(WARM_UP_S + duration_s)
    total = sum(WEIGHTS.values())
    return Sharing(
        {t: ride.num_tokens[t] - before[t] for t in WEIGHTS},
        {t: weight / total for t, weight in WEIGHTS.items()},
    )


def trace(first: int = 0) -> Iterator[Arrival]:
    """Lengths of a production trace, an eighth of the prompts' and half of the answers'."""
    arrivals = with_lengths_divided(read_arrivals(), CAPACITY.model_length_tokens)
    return itertools.cycle(arrivals[first:] + arrivals[:first])


def main() -> None:
    alone, beside, extra_steps = extra_ttft_steps()
    print(
        f"chat alone: TTFT p50 {alone.ttft_p50_s * 1e3:.1f}, p95 {alone.ttft_p95_s * 1e3:.1f} ms; "
        f"beside {NUM_IN_FLIGHT} requests of another tenant: p50 {beside.ttft_p50_s * 1e3:.1f}, "
        f"p95 {beside.ttft_p95_s * 1e3:.1f} ms; a step takes {beside.step_s * 1e3:.1f} ms there"
    )
    shared = sharing()
    for tenant, share in shared.wanted.items():
        num_tokens = shared.num_tokens[tenant]
        got = num_tokens / sum(shared.num_tokens.values())
        print(
            f"tenant {tenant}, weight {WEIGHTS[tenant]:.0f}: {num_tokens} tokens, {got:.1%} of "
            f"all, {share:.1%} wanted"
        )
    claims = {"fairness_extra_ttft_steps": extra_steps, "fairness_share_error": shared.error}
    figures = {"alone": asdict(alone), "beside": asdict(beside), "sharing": asdict(shared)}
    publish("fairness", claims, figures)


if __name__ == "__main__":
    main()
