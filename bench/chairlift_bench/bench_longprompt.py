"""What one 6,000-token prompt does to 100 short ones behind it, and to the streams beside it.

`python -m chairlift_bench.bench_longprompt` runs the engine's own loop in virtual time, twice each:
with the long prompt and without. The short prompts come all at once, or one by one; all requests
belong to one tenant and one class, so nothing but the scheduler's order helps them. `make
bench-longprompt` calls it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Final

from chairlift_bench.claims import publish
from chairlift_bench.outcomes import percentile
from chairlift_bench.virtual import BenchReplica
from chairlift_engine.config import Capacity
from chairlift_engine.engine import StepReport
from chairlift_engine.simulator_profile import Profile
from chairlift_protocol.policy import Generation, Policy, SloThresholds
from chairlift_simulation.replica import VirtualRequest

LONG_TOKENS: Final = 6000
NUM_SHORT: Final = 100
SHORT_TOKENS: Final = 64
NUM_STREAMS: Final = 16
STARTS_S: Final = 5.0  # by then all streams decode
# Between two short prompts; the second leaves the engine half idle.
SPACINGS_S: Final = {"at once": 0.0, "one by one": 0.025}
PROFILE: Final = Profile(noise=0.0)
# Step tokens as the controller sets them here for gaps of 18 ms: a full step takes nine tenths.
POLICY: Final = Policy(Generation(0, 0), 128, 176, 176, 1.0, SloThresholds(500.0, 18.0))


@dataclass(frozen=True, slots=True)
class Seen:
    """short_ttft_p95_s: of the short prompts. itl_p95_s: of the streams while the long prompt is
    prefilled, or in the same time without it."""

    short_ttft_p95_s: float
    itl_p95_s: float
    long_ttft_s: float


@dataclass(frozen=True, slots=True)
class Effect:
    """The same short prompts and streams, behind a long prompt and without it."""

    behind: Seen
    without: Seen

    @property
    def ttft_ratio(self) -> float:
        return self.behind.short_ttft_p95_s / self.without.short_ttft_p95_s

    @property
    def itl_ratio(self) -> float:
        return self.behind.itl_p95_s / self.without.itl_p95_s


def effect_of(
    long_tokens: int, spacing_s: float, policy: Policy = POLICY, profile: Profile = PROFILE
) -> Effect:
    behind = _run(long_tokens, spacing_s, policy, profile, None)
    return Effect(behind, _run(0, spacing_s, policy, profile, behind.long_ttft_s))


def _run(
    long_tokens: int, spacing_s: float, policy: Policy, profile: Profile, window_s: float | None
) -> Seen:
    """window_s: how long gaps count; None for as long as the long prompt is prefilled."""
    gaps: list[tuple[float, float]] = []
    stream_ids: set[str] = set()

    def take(report: StepReport) -> None:
        gaps.extend(
            (report.now_s, event.gap_s)
            for event in report.tokens
            if event.gap_s is not None and event.request.id in stream_ids
        )

    length_tokens = max(long_tokens, LONG_TOKENS) + 64
    capacity = Capacity(
        policy.batch_size, policy.step_tokens, 4 * length_tokens // 16, 16, length_tokens
    )
    replica = BenchReplica(capacity, policy, profile, on_report=take)
    for _ in range(NUM_STREAMS):
        stream_ids.add(replica.submit(VirtualRequest(0.0, 32, 1000)))
    if long_tokens:
        replica.submit(VirtualRequest(STARTS_S, long_tokens, 8))
    for number in range(NUM_SHORT):
        replica.submit(VirtualRequest(STARTS_S + number * spacing_s, SHORT_TOKENS, 8))
    served = replica.run()
    ttfts_s: defaultdict[int, list[float]] = defaultdict(list)
    for each in served:
        assert each.outcome.ttft_s is not None
        ttfts_s[each.request.prompt_tokens].append(each.outcome.ttft_s)
    if window_s is None:
        (window_s,) = ttfts_s[long_tokens]
    return Seen(
        short_ttft_p95_s=percentile(ttfts_s[SHORT_TOKENS], 95),
        itl_p95_s=percentile(
            (gap_s for at_s, gap_s in gaps if 0 < at_s - STARTS_S <= window_s), 95
        ),
        long_ttft_s=window_s,
    )


def main() -> None:
    effects = {name: effect_of(LONG_TOKENS, spacing_s) for name, spacing_s in SPACINGS_S.items()}
    for name, effect in effects.items():
        behind, without = effect.behind, effect.without
        print(
            f"{NUM_SHORT} short prompts {name}: TTFT p95 {behind.short_ttft_p95_s * 1e3:.0f} ms "
            f"behind {LONG_TOKENS} tokens, {without.short_ttft_p95_s * 1e3:.0f} ms without "
            f"(x {effect.ttft_ratio:.2f}); gaps of {NUM_STREAMS} streams p95 "
            f"{behind.itl_p95_s * 1e3:.1f} and {without.itl_p95_s * 1e3:.1f} ms "
            f"(x {effect.itl_ratio:.2f}); the long prompt takes {behind.long_ttft_s:.2f} s"
        )
    claims = {
        "longprompt_ttft_ratio": max(e.ttft_ratio for e in effects.values()),
        "longprompt_itl_ratio": max(e.itl_ratio for e in effects.values()),
    }
    publish("longprompt", claims, {name: asdict(effect) for name, effect in effects.items()})


if __name__ == "__main__":
    main()
