"""How fast simulated time passes: an hour of the Azure trace, about 50 requests running.

`python -m chairlift_bench.bench_simulator` steps one replica in virtual time on one core, through
the engine's own loop and scheduler, and shows on five minutes that the same seed gives the same
hour. The claim is processor time, which is the wall's on an idle machine. `make bench-simulator`
calls it.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from chairlift_bench.arrivals import read_arrivals
from chairlift_bench.claims import publish
from chairlift_bench.outcomes import percentile
from chairlift_bench.virtual import BenchReplica, Served
from chairlift_engine.config import Capacity
from chairlift_engine.engine import StepReport
from chairlift_engine.simulator_profile import Profile
from chairlift_protocol.policy import Generation, Policy, SloThresholds
from chairlift_simulation.arrival_traces import at_mean_rate, repeated
from chairlift_simulation.replica import VirtualRequest

HOUR_S: Final = 3600.0
CHECK_S: Final = 300.0  # of the hour, for the comparison of seeds
# The whole recorded hour's pace; the excerpt that is repeated here is its busiest stretch.
REQUESTS_PER_S: Final = 5.53
PROFILE: Final = Profile().scaled(1.65)  # by trial: what keeps about 50 running
# KV blocks of a size that GPU kernels use; a CPU's are of 16 tokens.
CAPACITY: Final = Capacity(
    batch_size=256, step_tokens=1024, num_blocks=1024, block_tokens=256, model_length_tokens=8192
)
POLICY: Final = Policy(Generation(0, 0), 256, 1024, 512, 1.0, SloThresholds(1000.0, 100.0))


@dataclass(slots=True)
class Hour:
    """One run and what its steps added up to."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    simulated_s: float = 0.0
    step_s: float = 0.0
    running_s: float = 0.0  # sum over steps of running requests times the step's time
    num_steps: int = 0
    num_decodes: int = 0
    num_prefill_tokens: int = 0
    num_preemptions: int = 0
    num_served: int = 0
    ttft_p95_s: float = 0.0
    gap_p95_s: float = 0.0
    digest: str = ""

    @property
    def mean_running(self) -> float:
        return self.running_s / self.simulated_s

    def take(self, report: StepReport) -> None:
        self.num_preemptions += report.num_preemptions
        if (sums := report.sums) is not None:
            self.num_steps += 1
            self.step_s += sums.step_s
            self.running_s += sums.step_s * sum(report.gauges.num_running.values())
            self.num_decodes += sums.num_decode_seqs
            self.num_prefill_tokens += sums.num_prefill_tokens

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**values, "mean_running": self.mean_running}


def simulate(duration_s: float, seed: int) -> Hour:
    hour = Hour()
    replica = BenchReplica(CAPACITY, POLICY, PROFILE, seed, hour.take)
    excerpt = read_arrivals()
    num_laps = 1 + int(REQUESTS_PER_S * duration_s / len(excerpt))
    for arrival in at_mean_rate(repeated(excerpt, num_laps), REQUESTS_PER_S, duration_s):
        replica.submit(
            VirtualRequest(arrival.arrival_s, arrival.prompt_tokens, arrival.output_tokens)
        )
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    served = replica.run()
    hour.wall_s, hour.cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    hour.simulated_s = replica.clock.now_s()
    hour.num_served = len(served)
    hour.ttft_p95_s = percentile((s.outcome.ttft_s or 0.0 for s in served), 95)
    hour.gap_p95_s = percentile((gap for s in served for gap in s.outcome.gaps_s), 95)
    hour.digest = _digest(served)
    return hour


def main() -> None:
    first, again, other = (simulate(CHECK_S, seed) for seed in (1, 1, 2))
    print(f"{CHECK_S:.0f} s, seed 1: {first.digest}\n       again: {again.digest}")
    print(f"      seed 2: {other.digest}")
    if first.digest != again.digest or first.digest == other.digest:
        raise SystemExit("bench-simulator: a seed must give one hour, and another seed another")
    hour = simulate(HOUR_S, seed=1)
    print(
        f"{hour.simulated_s:.0f} s simulated in {hour.cpu_s:.1f} s of one core "
        f"({hour.wall_s:.1f} s on the wall): {hour.num_served} requests, "
        f"{hour.mean_running:.1f} running in the mean, {hour.num_steps} steps, "
        f"{hour.num_decodes} decodes, {hour.num_prefill_tokens} prompt tokens; "
        f"{hour.cpu_s / hour.num_steps * 1e6:.0f} µs a step"
    )
    print(f"TTFT p95 {hour.ttft_p95_s:.3f} s, gap p95 {hour.gap_p95_s * 1e3:.1f} ms")
    publish("simulator", {"simulated_hour_s": hour.cpu_s}, hour.to_json())


def _digest(served: Sequence[Served]) -> str:
    """Of everything that happened to every request."""
    seen = hashlib.sha256()
    for each in served:
        outcome = each.outcome
        seen.update(array("d", (outcome.due_s, outcome.elapsed_s, *outcome.gaps_s)).tobytes())
    return seen.hexdigest()[:16]


if __name__ == "__main__":
    main()
