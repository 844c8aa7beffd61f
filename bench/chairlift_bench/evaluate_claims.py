"""From the figures of all runs to what the evaluation claims. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from chairlift_bench.evaluate_figures import Figures, settle_s
from chairlift_bench.evaluate_runs import OURS, SCALING, Run

ATTAINMENT: Final = 0.95
HPA_QUEUE: Final = "hpa queue"  # how laws' names begin
STATIC_COUNT: Final = "replicas"
NEVER_S: Final = 999.0  # what did not settle while it was watched
NUM_DRAWS: Final = 400
# Of all runs and no mean of seeds, so that drawing seeds anew says nothing of them.
OF_ALL_RUNS: Final = ("unsafe_actions", "batch_share_min_kept")
Runs = Mapping[Run, Figures]
Measure = Callable[[Figures], float]


@dataclass(frozen=True, slots=True)
class Mean:
    """Over seeds, with a bootstrapped interval of 95 %."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], num_draws: int = 1000) -> Mean:
        if not values:
            return cls(math.nan, math.nan, math.nan)
        chance = random.Random(0)
        means = [fmean(chance.choices(values, k=len(values))) for _ in range(num_draws)]
        return cls(fmean(values), *_middle(means))


def of_law(runs: Runs, scenario: str, profile: str, law: str) -> list[Figures]:
    """By seed."""
    return [f for r, f in sorted(runs.items()) if (r.scenario, r.profile, r.law) == (
        scenario, profile, law)]  # fmt: skip


def laws_in(runs: Runs, scenario: str, profile: str) -> list[str]:
    """In the order of their names, ours first."""
    own = {r.law for r in runs if r.scenario == scenario and r.profile == profile}
    return sorted(own, key=lambda law: (law != OURS, not law.startswith("ours"), law))


def scaling_in(runs: Runs) -> list[str]:
    return [scenario for scenario in SCALING if any(r.scenario == scenario for r in runs)]


def oracle_tokens_per_s(runs: Runs, profile: str, seed: int) -> float:
    """The most that any fixed setting computes while gaps meet their objective (S1)."""
    return max(
        (
            f.tokens_per_s
            for r, f in runs.items()
            if (r.scenario, r.profile, r.seed) == ("S1", profile, seed)
            and r.law.startswith("static")
            and f.late_gap_share <= 1 - ATTAINMENT
        ),
        default=math.inf,
    )


def settled_s(runs: Runs, profile: str, law: str) -> float:
    """Median over seeds."""
    found = [
        min(NEVER_S, settle_s(f.settle, oracle_tokens_per_s(runs, profile, r.seed)))
        for r, f in runs.items()
        if (r.scenario, r.profile, r.law) == ("S1", profile, law)
    ]
    return median(found) if found else math.nan


def normalised(runs: Runs) -> dict[tuple[str, str], dict[str, float]]:
    """Goodput by (scenario, profile) and law, over that of the best fixed setting; mean of seeds.

    Where no fixed setting serves anybody well, there is nothing to compare with.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    for scenario, profile in sorted({(r.scenario, r.profile) for r in runs}):
        if not scenario.startswith(("S2", "S3", "S6")):
            continue
        laws = laws_in(runs, scenario, profile)
        fixed = [law for law in laws if law.startswith("static")]
        seeds = sorted({r.seed for r in runs if r.scenario == scenario})
        ratios: dict[str, list[float]] = {}
        for seed in seeds:
            best = max(runs[Run(scenario, profile, law, seed)].goodput_per_s for law in fixed)
            if best > 0:
                for law in laws:
                    goodput = runs[Run(scenario, profile, law, seed)].goodput_per_s
                    ratios.setdefault(law, []).append(goodput / best)
        if ratios:
            found[scenario, profile] = {law: fmean(values) for law, values in ratios.items()}
    return found


def hours_at(points: Iterable[tuple[float, float]], share: float) -> float:
    """Least replica-hours for that attainment, between the settings of a law that were tried.

    points: (attainment, replica-hours). Infinite where none reaches it.
    """
    known = sorted(points)
    best = min((hours for reached, hours in known if reached >= share), default=math.inf)
    for (low, low_hours), (high, high_hours) in zip(known, known[1:], strict=False):
        if low < share <= high:
            between = low_hours + (share - low) / (high - low) * (high_hours - low_hours)
            best = min(best, between)
    return best


def frontier(
    runs: Runs, scenarios: Sequence[str], is_own: Callable[[str], bool]
) -> list[tuple[float, float, str]]:
    """(attainment, replica-hours, law), means over seeds, of the laws of one family.

    Of several scenarios, all requests and all hours together, by laws that were played in each.
    """
    found = []
    played = [laws_in(runs, scenario, "reference") for scenario in scenarios]
    for law in (played or [[]])[0]:
        if is_own(law) and all(law in own for own in played):
            seen = [of_law(runs, scenario, "reference", law) for scenario in scenarios]
            num_good = sum(fmean(f.good_share * f.num_requests for f in own) for own in seen)
            num_requests = sum(fmean(f.num_requests for f in own) for own in seen)
            hours = sum(fmean(f.replica_hours for f in own) for own in seen)
            found.append((num_good / num_requests, hours, law))
    return found


def hours_ratio(runs: Runs, scenarios: Sequence[str], family: str) -> tuple[float, float]:
    """Ours over that family's, at 95 % or the most that both reach; and that attainment."""
    ours = [(s, h) for s, h, _ in frontier(runs, scenarios, lambda law: law.startswith("ours"))]
    theirs = [(s, h) for s, h, _ in frontier(runs, scenarios, lambda law: law.startswith(family))]
    if not ours or not theirs:
        return math.nan, math.nan
    share = min(ATTAINMENT, max(s for s, _ in ours), max(s for s, _ in theirs))
    return hours_at(ours, share) / hours_at(theirs, share), share


def claims_of(runs: Runs) -> dict[str, float]:
    """NaN for what these runs do not tell."""
    profiles = sorted({r.profile for r in runs if r.scenario == "S1"})
    warm = ("ours warm", "ours wrong prior")
    claims = {
        "settle_cold_s": settled_s(runs, "reference", OURS),
        "settle_warm_s": settled_s(runs, "reference", "ours warm"),
        "settle_cold_worst_s": _most(settled_s(runs, p, OURS) for p in profiles),
        "settle_warm_worst_s": _most(settled_s(runs, p, law) for p in profiles for law in warm),
    }
    table = normalised(runs)
    claims["goodput_vs_oracle"] = min((t[OURS] for t in table.values()), default=math.nan)
    singles = {law for t in table.values() for law in t if not law.startswith("ours")}
    everywhere = [law for law in singles if all(law in t for t in table.values())]
    best = max((fmean(t[law] for t in table.values()) for law in everywhere), default=math.nan)
    ours = fmean(t[OURS] for t in table.values()) if table else math.nan
    claims["goodput_vs_best_single_setting"] = ours / best
    claims["knob_reversals_per_h"] = _most(
        fmean(f.batch_size_reversals_per_h + f.step_tokens_reversals_per_h for f in own)
        for s, p in table
        if s.startswith("S2") and (own := of_law(runs, s, p, OURS))
    )
    claims["replica_reversals_over_turning_points"] = _most(
        fmean(f.replica_reversals - f.num_turns for f in own)
        for s in SCALING
        if (own := of_law(runs, s, "reference", OURS))
    )
    # One setting of a law for all scenarios: nobody knows beforehand which of them will come.
    claims["replica_hours_vs_hpa_queue"] = hours_ratio(runs, scaling_in(runs), HPA_QUEUE)[0]
    return {**claims, **_fault_claims(runs), **_batch_claims(runs)}


def intervals_of(runs: Runs) -> dict[str, tuple[float, float]]:
    """Of 95 %, by claim: what it would be with seeds drawn anew, the same ones for every law and
    scenario. Empty with one seed."""
    seeds = sorted({run.seed for run in runs})
    if len(seeds) < 2:
        return {}
    chance = random.Random(0)
    draws = [tuple(sorted(chance.choices(seeds, k=len(seeds)))) for _ in range(NUM_DRAWS)]
    claims = {drawn: claims_of(_with_seeds(runs, drawn)) for drawn in set(draws)}
    values = {name: [claims[drawn][name] for drawn in draws] for name in claims[draws[0]]}
    return {
        name: _middle(found)
        for name, found in values.items()
        if name not in OF_ALL_RUNS and not any(map(math.isnan, found))
    }


def _with_seeds(runs: Runs, drawn: Sequence[int]) -> Runs:
    """What was played with one seed alone stays as it is."""
    by_seed: dict[tuple[str, str, str], dict[int, Figures]] = {}
    for run, figures in runs.items():
        by_seed.setdefault((run.scenario, run.profile, run.law), {})[run.seed] = figures
    return {
        Run(*names, number): own[seed]
        for names, own in by_seed.items()
        for number, seed in enumerate(drawn if len(own) > 1 else own, start=1)
    }


def _middle(values: Iterable[float]) -> tuple[float, float]:
    """Where the middle 95 % of them lie."""
    known = sorted(values)
    return known[int(0.025 * len(known))], known[int(0.975 * len(known))]


def _fault_claims(runs: Runs) -> dict[str, float]:
    kinds = {r.scenario for r in runs if r.scenario.startswith("S8")}
    whole = of_law(runs, "S8-none", "reference", OURS)
    fractions = [
        fmean(
            f.goodput_per_s / max(1e-9, free.goodput_per_s)
            for f, free in zip(own, whole, strict=True)
        )
        for kind in sorted(kinds - {"S8-none"})
        if (own := of_law(runs, kind, "reference", OURS))
    ]  # fmt: skip
    unsafe = sum(f.num_unsafe for r, f in runs.items() if r.scenario in kinds and r.law == OURS)
    return {
        "unsafe_actions": float(unsafe) if kinds else math.nan,
        "fault_goodput_fraction": min(fractions, default=math.nan),
    }


def _batch_claims(runs: Runs) -> dict[str, float]:
    beside = of_law(runs, "S10", "reference", OURS)
    alone = of_law(runs, "S10-alone", "reference", OURS)
    if not beside or not alone:
        return {}
    return {
        "batch_share_min_kept": min(f.batch_share_kept for f in beside),
        "interactive_p95_ttft_with_batch": fmean(f.ttft_p95_s for f in beside)
        / fmean(f.ttft_p95_s for f in alone),
    }


def _most(values: Iterable[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return max(known, default=math.nan)
