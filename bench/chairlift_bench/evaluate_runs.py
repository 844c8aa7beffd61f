"""Which runs the evaluation consists of, and one of them carried out. Each is known by four names,
so that any process can carry it out alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from chairlift_bench.evaluate_figures import Figures, figures_of
from chairlift_bench.evaluate_laws import Aimd, Fixed, Gradient2, Pang, PerReplica
from chairlift_bench.evaluate_planners import BAND_BRAKES, Band, Dynamo
from chairlift_bench.evaluate_scalers import Always, HpaKv, HpaQueue, Scaled, WithHeadroom, Wva
from chairlift_bench.evaluate_scenarios import (
    KV_TOKENS,
    PROFILES,
    Setup,
    all_scenarios,
    build,
    costs_of,
)
from chairlift_engine.simulator_profile import Profile
from chairlift_operator.memory import Knobs
from chairlift_operator.windows import ObjectiveKey
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.laws import ChairliftLaw, Law
from chairlift_simulation.pool_run import PoolRun

OURS: Final = "ours"
DEFAULT: Final = "static 256/2048"
GRID_BATCH: Final = (32, 64, 128, 256)
GRID_STEP: Final = (128, 256, 384, 512, 768, 1024, 2048)


@dataclass(frozen=True, slots=True, order=True)
class Run:
    scenario: str
    profile: str
    law: str
    seed: int

    @property
    def cost_s(self) -> float:
        """About, in seconds of a core."""
        return COST_S[re.split("[@-]", self.scenario)[0]] * COST_ON[self.profile]


@dataclass(frozen=True, slots=True)
class Size:
    """What an evaluation covers. minutes: of the steady scenarios. profiles: for settling, and
    steady_profiles for steady load; the rest is on the first. tunes: baselines, beforehand.
    once: scenarios too long to be played with every seed and law."""

    name: str
    minutes: float
    seeds: tuple[int, ...]
    scenarios: tuple[str, ...]
    profiles: tuple[str, ...] = PROFILES
    steady_profiles: tuple[str, ...] = PROFILES
    grid_batch: tuple[int, ...] = GRID_BATCH
    grid_step: tuple[int, ...] = GRID_STEP
    headrooms: tuple[float, ...] = ()
    queue_targets: tuple[float, ...] = (5.0,)
    tunes: bool = True
    other_scalers: bool = True
    counts: tuple[int, ...] = (2, 3, 4)
    once: tuple[str, ...] = ()


QUICK: Final = Size(
    "quick", 4, (1,), ("S1", "S2@1", "S4", "S8-none", "S8-nan", "S8-down", "S10-alone", "S10"),
    ("reference", "slow"), ("reference",), (256,), (256, 512, 1024),
    other_scalers=False, counts=(3,), tunes=False,
)  # fmt: skip
FAULTS: Final = tuple(f"S8-{kind}" for kind in (
    "none", "nan", "stale", "half-missing", "counter-reset", "delay", "down"))  # fmt: skip
USUAL: Final = Size(
    "usual", 6, (1, 2, 3),
    ("S1", "S2@0.8", "S2@1", "S3", "S4", "S5", "S6", "S7", *FAULTS, "S9", "S10-alone", "S10",
     "S11", "S12"),
    grid_batch=(96, 256), grid_step=(256, 512, 768, 1024),
    headrooms=(0.85, 1.2, 1.4), queue_targets=(1.0, 5.0, 20.0), once=("S12",),
)  # fmt: skip
FULL: Final = Size(
    "full", 15, (1, 2, 3, 4, 5), tuple(all_scenarios(15)),
    headrooms=(0.7, 0.85, 1.2, 1.4, 1.7), queue_targets=(1.0, 2.0, 5.0, 10.0, 20.0),
)  # fmt: skip
SIZES: Final = {size.name: size for size in (QUICK, USUAL, FULL)}
# Where the count of replicas is what matters; the others have one or a given number.
SCALING: Final = ("S4", "S5", "S9", "S12")
# What is asked is whether one law copes, not which setting is best: a few to compare with.
FEW_SETTINGS: Final = ("S7", "S11")
FEW: Final = (DEFAULT, "static 256/512", "static 256/768")
ONCE_LAWS: Final = (
    OURS, "ours x1.2", "ours x1.4", "hpa queue 1", "hpa queue 5", "hpa queue 20",
    "replicas 3", "replicas 4",
)  # fmt: skip
# Settings of each baseline; the first serves where nothing is tuned. HPA on the queue is played
# with several, since hours are compared at equal attainment.
KNOB_LAWS: Final = {
    "aimd": ("aimd 4/32/0.9", "aimd 2/16/0.95", "aimd 8/64/0.8"),
    "pang": ("pang 512", "pang 256", "pang 768"),
    "gradient2": ("gradient2 512", "gradient2 256", "gradient2 1024"),
}
SCALERS: Final = {
    "hpa kv": ("hpa kv 0.8", "hpa kv 0.4", "hpa kv 0.2"),
    "wva": ("wva 5", "wva 10", "wva 2"),
    "dynamo": ("dynamo 180", "dynamo 60", "dynamo 30"),
    "s-band": ("s-band 0.55/0.4", "s-band 0.75/0.55", "s-band 0.9/0.7"),
}
# About what a run takes, in seconds of a core, by how its scenario's name begins, and how many
# times that on other hardware: for the order of runs and to say how long the rest takes.
COST_S: Final = {
    "S12": 55, "S11": 6, "S10": 7, "S1": 5, "S2": 6, "S3": 3, "S4": 22, "S5": 16, "S6": 6, "S7": 13,
    "S8": 10, "S9": 14,
}  # fmt: skip
COST_ON: Final = {"reference": 1.0, "fast": 1.8, "slow": 0.75}
HELD_OUT_SEED: Final = 0  # no other run has it
WANTED_SHARE: Final = 0.95


def tuning_runs() -> list[Run]:
    """What tells the best setting of each baseline."""
    return [
        Run(scenario, "reference", law, HELD_OUT_SEED)
        for scenario, families in (("S2@0.8", KNOB_LAWS), ("S4", SCALERS))
        for settings in families.values()
        for law in settings
    ]


def best_settings(figures: Mapping[Run, Figures]) -> tuple[str, ...]:
    """Of each baseline, by the tuning runs: knob laws by goodput, autoscalers by attainment up to
    what is wanted, then by hours. The first without such runs."""
    told = {run.law: found for run, found in figures.items() if run.seed == HELD_OUT_SEED}

    def goodput(law: str) -> float:
        return told[law].goodput_per_s if law in told else 0.0

    def thrift(law: str) -> tuple[float, float]:
        if law not in told:
            return 0.0, 0.0
        return min(WANTED_SHARE, told[law].good_share), -told[law].replica_hours

    return (
        *(max(settings, key=goodput) for settings in KNOB_LAWS.values()),
        *(max(settings, key=thrift) for settings in SCALERS.values()),
    )


def runs_of(size: Size, baselines: Sequence[str]) -> list[Run]:
    """baselines: laws to compare with, each with its setting."""
    found: set[Run] = set()
    for scenario in size.scenarios:
        for profile in _profiles(size, scenario):
            for seed in size.seeds[:1] if scenario in size.once else size.seeds:
                laws = _laws(size, scenario, baselines)
                found.update(Run(scenario, profile, law, seed) for law in laws)
    return sorted(found)


def _profiles(size: Size, scenario: str) -> tuple[str, ...]:
    """Knobs depend on hardware; the count of replicas and faults of metrics hardly do."""
    if scenario == "S1":
        return size.profiles
    return size.steady_profiles if scenario.startswith("S2") else size.profiles[:1]


def _laws(size: Size, scenario: str, baselines: Sequence[str]) -> Iterable[str]:
    grid = [f"static {n}/{c}" for n in size.grid_batch for c in size.grid_step]
    scalers = [law for law in baselines if law.startswith(tuple(SCALERS))]
    knob_laws = [law for law in baselines if law not in scalers]
    if scenario == "S1":
        return [OURS, "ours warm", "ours wrong prior", *knob_laws, *grid]
    if scenario in size.once:
        return ONCE_LAWS
    if scenario.startswith(("S8", "S10")):
        return [OURS]
    if scenario in FEW_SETTINGS:
        return [OURS, *knob_laws, *FEW]
    if scenario in SCALING:
        return [
            OURS,
            *(f"ours x{factor:g}" for factor in size.headrooms),
            *(f"hpa queue {target:g}" for target in size.queue_targets),
            *(scalers if size.other_scalers else ()),
            *(f"replicas {count}" for count in size.counts),
        ]
    return [OURS, DEFAULT, *knob_laws, *grid]


def carry_out(run: Run, minutes: float) -> Figures:
    setup = build(all_scenarios(minutes)[run.scenario], run.profile, run.seed)
    law = law_of(run.law, setup)
    result = PoolRun(setup.pool, law, setup.conditions).run(
        setup.requests, setup.until_s, setup.backlog
    )
    return figures_of(setup, result)


def law_of(name: str, setup: Setup) -> Law:
    pool, slo = setup.pool, setup.pool.spec.interactive.slo
    ours = ChairliftLaw(pool)
    key = ObjectiveKey("itl", slo.inter_token_latency.threshold_ms, RequestClass.INTERACTIVE.value)
    kind, _, rest = name.partition(" ")
    value = float(found.group()) if (found := re.search(r"[0-9.]+$", rest)) else 0.0
    if name == OURS:
        return ours
    if name == "ours warm":
        return ChairliftLaw(pool, prior=setup.costs)
    if name == "ours wrong prior":
        return ChairliftLaw(pool, prior=costs_of(Profile()))
    if kind == "ours":
        return WithHeadroom(pool, value)
    if kind == "static":
        batch_size, step_tokens = (int(part) for part in rest.split("/"))
        return PerReplica(pool, Fixed(Knobs(batch_size, step_tokens)))
    if kind == "aimd":
        batch, tokens, cut = rest.split("/")
        budget = slo.inter_token_latency.bad_budget
        return PerReplica(pool, Aimd(key, budget, int(batch), int(tokens), float(cut)))
    if kind == "pang":
        return PerReplica(
            pool, Pang(slo.inter_token_latency.threshold_s, int(value), float(KV_TOKENS))
        )
    if kind == "gradient2":
        return PerReplica(pool, Gradient2(int(value)))
    return _scaled(name, setup)


def _scaled(name: str, setup: Setup) -> Law:
    """Our knobs with somebody else's count."""
    pool, slo, ours = setup.pool, setup.pool.spec.interactive.slo, ChairliftLaw(setup.pool)
    *family, rest = name.split()
    values = [float(value) for value in rest.split("/")]
    match family:
        case ["replicas"]:
            return Scaled(pool, ours, Always(int(*values)), brakes=None)
        case ["wva"]:
            return Scaled(pool, ours, Wva(*values), brakes=None)
        case ["dynamo"]:
            return Scaled(pool, ours, Dynamo(setup.costs, slo, *values), brakes=None)
        case ["s-band"]:
            return Scaled(pool, ours, Band(slo, *values), BAND_BRAKES)
        case ["hpa", "queue"]:
            return Scaled(pool, ours, HpaQueue(*values))
        case ["hpa", "kv"]:
            return Scaled(pool, ours, HpaKv(*values))
    raise ValueError(f"no law is called {name!r}")
