from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chairlift_operator.decisions import Condition, Health, SetReplicas, Truth
from chairlift_operator.exposition import EngineSample
from chairlift_operator.memory import Knobs, Memory
from chairlift_operator.plan import Plan, plan
from chairlift_operator.policy_plan import first_policy
from chairlift_operator.pool_windows import (
    LONG_S,
    SHORT_S,
    PoolWindows,
    Trouble,
    WindowedQuantity,
    WindowedShare,
)
from chairlift_operator.signals import Idle, Signal, Unknown, Value
from chairlift_operator.snapshot import ReplicaSnapshot, Snapshot
from chairlift_operator.step_time import StepCosts
from chairlift_protocol.policy import Generation, SloThresholds
from chairlift_protocol.wire import RequestClass

Make = Callable[..., Any]

INTERACTIVE = RequestClass.INTERACTIVE
REFERENCE = StepCosts(8e-3, 0.06e-3, 0.045e-3, 5e-8)


def _snapshot(*replicas: ReplicaSnapshot, at_s: float) -> Snapshot:
    return Snapshot("default/chat", at_s, replicas)


def _condition(made: Plan, type: str) -> Condition:
    return next(c for c in made.conditions if c.type == type)


def _obeying(made: Plan, engine: Any) -> None:
    for action in made.actions:
        engine.policy = action.policy


def test_a_new_engine_gets_a_cautious_policy_newer_than_its_own(
    make_pool: Make, make_engine: Make
) -> None:
    engine = make_engine(REFERENCE)
    made = plan(make_pool(), _snapshot(engine.snapshot(), at_s=1.0), Memory.start(term=3), 1.0)
    (action,) = made.actions
    policy = action.policy
    assert (policy.batch_size, policy.step_tokens, policy.chunk_tokens) == (16, 256, 256)
    assert policy.generation == Generation(3, 1) > engine.policy.generation
    assert policy.slo == SloThresholds(3000.0, 50.0)
    assert [d.sentence for d in made.decisions] == [
        "batch size 256→16: cautious first policy",
        "step tokens 2048→256: cautious first policy",
    ]


def test_the_first_policy_stays_inside_spec_and_capacity(
    make_pool: Make, make_engine: Make
) -> None:
    engine = make_engine(REFERENCE)
    engine.capacity = replace(engine.capacity, batch_size=8, step_tokens=128)
    made = plan(make_pool(batch=(10, 20)), _snapshot(engine.snapshot(), at_s=1), Memory.start(), 1)
    assert (made.actions[0].policy.batch_size, made.actions[0].policy.step_tokens) == (8, 128)


def test_an_earlier_controllers_policy_is_adopted_not_reset(
    make_pool: Make, make_engine: Make
) -> None:
    engine = make_engine(REFERENCE)
    engine.policy = replace(
        engine.policy,
        generation=Generation(1, 40),
        batch_size=77,
        step_tokens=500,
        chunk_tokens=500,
    )
    made = plan(make_pool(), _snapshot(engine.snapshot(), at_s=1), Memory.start(term=1), 1)
    assert made.actions == ()
    wanted = made.memory.replicas["chat-0"].wanted
    assert wanted is not None and wanted.batch_size == 77
    made = plan(make_pool(), _snapshot(engine.snapshot(), at_s=1), Memory.start(term=2), 1)
    assert made.actions[0].policy.batch_size == 77
    assert made.actions[0].policy.generation == Generation(2, 1)


def test_a_replica_of_a_newer_controller_is_left_alone(make_pool: Make, make_engine: Make) -> None:
    engine = make_engine(REFERENCE)
    engine.policy = replace(engine.policy, generation=Generation(9, 1))
    made = plan(make_pool(), _snapshot(engine.snapshot(), at_s=1), Memory.start(term=2), 1)
    assert made.actions == ()
    assert "newer controller (term 9" in (made.replicas[0].held or "")


@pytest.mark.parametrize(
    ("generation", "why"),
    [(Generation(0, 0), "the engine restarted"), (Generation(1, 50), "another writer changed it")],
)
def test_drift_is_set_right_with_a_newer_generation_and_its_cause(
    make_pool: Make, make_engine: Make, generation: Generation, why: str
) -> None:
    engine, pool = make_engine(REFERENCE), make_pool()
    made = plan(pool, _snapshot(engine.snapshot(), at_s=1), Memory.start(), 1)
    engine.policy = replace(engine.policy, generation=generation, batch_size=200)
    made = plan(pool, _snapshot(engine.snapshot(), at_s=6), made.memory, 6)
    (action,) = made.actions
    assert action.policy.batch_size == 16
    assert action.policy.generation > max(generation, Generation(1, 1))
    assert why in made.decisions[0].reason


def test_a_policy_never_read_back_freezes_tuning_and_says_so(
    make_pool: Make, make_engine: Make
) -> None:
    engine, pool, memory = make_engine(REFERENCE), make_pool(), Memory.start()
    told = 0
    for tick in range(8):
        engine.run_until(5.0 * tick)
        made = plan(pool, _snapshot(engine.snapshot(), at_s=engine.now_s), memory, engine.now_s)
        memory, told = made.memory, told + len(made.decisions)
        assert {a.policy.step_tokens for a in made.actions} == {256}  # tried again, never tuned
    assert _condition(made, "Tuned").reason == "PolicyUnverified"
    assert told <= 6  # and not told again and again


def test_new_objectives_reach_the_engine_at_once(make_pool: Make, make_engine: Make) -> None:
    engine = make_engine(REFERENCE)
    made = plan(make_pool(), _snapshot(engine.snapshot(), at_s=1), Memory.start(), 1)
    _obeying(made, engine)
    made = plan(make_pool(itl_s=0.08), _snapshot(engine.snapshot(), at_s=6), made.memory, 6)
    assert made.actions[0].policy.slo.itl_ms == 80
    assert "objectives are now TTFT 3000 ms, ITL 80 ms" in made.decisions[0].reason


def test_bounds_hold_on_every_tick_even_without_any_metric(
    make_pool: Make, make_engine: Make
) -> None:
    engine = make_engine(REFERENCE)
    made = plan(make_pool(), _snapshot(engine.snapshot(), at_s=1), Memory.start(), 1)
    _obeying(made, engine)
    blind = replace(engine.snapshot(), sample=None, sampled_at_s=None, scrape_failure="refused")
    made = plan(
        make_pool(batch=(20, 30), step=(300, 400)), _snapshot(blind, at_s=6), made.memory, 6
    )
    assert (made.actions[0].policy.batch_size, made.actions[0].policy.step_tokens) == (20, 300)


def test_recommend_mode_says_what_it_would_do_once_and_does_nothing(
    make_pool: Make, make_engine: Make
) -> None:
    engine, memory = make_engine(REFERENCE), Memory.start()
    pool = make_pool(mode="Recommend")
    sentences = []
    for tick in range(1, 12):
        engine.run_until(5.0 * tick)
        made = plan(pool, _snapshot(engine.snapshot(), at_s=engine.now_s), memory, engine.now_s)
        memory = made.memory
        assert made.actions == ()
        assert all(not decision.enforced for decision in made.decisions)
        sentences += [d.sentence for d in made.decisions if d.field == "stepTokens"]
    assert sentences and sentences[0].startswith("step tokens 2048→")
    assert len(sentences) < 8


def test_an_idle_pool_is_frozen_and_its_signals_are_idle_not_unknown(
    make_pool: Make, make_engine: Make
) -> None:
    engine = make_engine(REFERENCE, arrivals_per_s=0.0)
    pool, memory = make_pool(), Memory.start()
    for tick in range(1, 8):
        engine.run_until(5.0 * tick)
        made = plan(pool, _snapshot(engine.snapshot(), at_s=engine.now_s), memory, engine.now_s)
        memory = made.memory
        _obeying(made, engine)
    assert made.health is Health.IDLE and made.actions == ()
    signals = {s.name: s.signal for s in made.signals}
    assert isinstance(signals["chat-0/interTokenLatency.goodPercent"], Idle)
    assert isinstance(signals["chat-0/running"], Value)
    assert _condition(made, "WithinSLO").status is Truth.UNKNOWN


def test_a_partly_seen_pool_only_shrinks(make_pool: Make, make_engine: Make) -> None:
    pool = make_pool(replicas=(1, 3))
    engine = make_engine(REFERENCE)
    memory = Memory.start()
    blind = ReplicaSnapshot("chat-1", ready=True, scrape_failure="timed out", policy_failure="same")
    for tick in range(1, 30):
        engine.run_until(5.0 * tick)
        seen = _snapshot(engine.snapshot(), blind, at_s=engine.now_s)
        made = plan(pool, seen, memory, engine.now_s)
        memory = made.memory
        _obeying(made, engine)
        assert all(d.after <= d.before for d in made.decisions)
    assert made.health is Health.PARTIAL
    assert "chat-1: policy not readable: same" in _condition(made, "MetricsAvailable").message


def test_a_replica_that_is_gone_decides_nothing_and_is_forgotten(
    make_pool: Make, make_engine: Make
) -> None:
    engine, pool = make_engine(REFERENCE), make_pool()
    made = plan(pool, _snapshot(engine.snapshot(), at_s=1), Memory.start(), 1)
    made = plan(pool, _snapshot(at_s=6), made.memory, 6)
    assert made.replicas == () and made.health is Health.MISSING
    (action,) = made.actions
    assert isinstance(action, SetReplicas) and action.count == 1
    assert plan(pool, _snapshot(at_s=700), made.memory, 700).memory.replicas == {}


def test_a_newcomer_starts_from_what_served_well_beside_it(
    make_pool: Make, make_engine: Make
) -> None:
    engine, pool = make_engine(REFERENCE), make_pool(replicas=(1, 3))
    made = plan(pool, _snapshot(engine.snapshot(), at_s=1), Memory.start(), 1)
    _obeying(made, engine)
    known = replace(made.memory.replicas["chat-0"], last_good=Knobs(40, 600))
    memory = replace(made.memory, replicas={"chat-0": known})
    newcomer = make_engine(REFERENCE)
    seen = _snapshot(engine.snapshot(), newcomer.snapshot("chat-1"), at_s=6)
    (action,) = plan(pool, seen, memory, 6).actions
    assert (action.replica, action.policy.batch_size, action.policy.step_tokens) == (
        "chat-1",
        40,
        600,
    )


SPOILT = [math.nan, math.inf, -math.inf, -1.0, 0.0, None]
GAUGES_TRULY_ZERO = {"num_running", "num_waiting"}
NUMBERS = [
    f.name
    for f in fields(EngineSample)
    if f.name not in ("slo_counts", "classes", "policy_generation", "rejected")
]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    spoilt=st.dictionaries(st.sampled_from(NUMBERS), st.sampled_from(SPOILT), min_size=1),
    drop_events=st.booleans(),
)
def test_no_broken_number_ever_raises_a_limit(
    make_pool: Make,
    warmed: tuple[Any, Memory, float],
    spoilt: dict[str, float | None],
    drop_events: bool,
) -> None:
    seen, memory, now_s = warmed
    rejected = tuple(n for n, v in spoilt.items() if v is not None and _as_parsed(v) is None)
    numbers = {
        name: _as_parsed(value)
        for name, value in spoilt.items()
        if value != 0 or name not in GAUGES_TRULY_ZERO
    }
    sample = replace(seen.sample, **numbers, rejected=rejected)
    if drop_events:
        sample = replace(sample, slo_counts=())
    made = plan(make_pool(), _snapshot(replace(seen, sample=sample), at_s=now_s), memory, now_s)
    told = seen.policy.desired
    (fair,) = plan(make_pool(), _snapshot(seen, at_s=now_s), memory, now_s).actions
    most = told if rejected else fair.policy
    for action in made.actions:
        assert action.policy.batch_size <= max(most.batch_size, told.batch_size)
        assert action.policy.step_tokens <= max(most.step_tokens, told.step_tokens)


def _as_parsed(value: float | None) -> float | None:
    """What the exposition's reader hands on: a broken number is no number; zero is one."""
    return None if value is None or not math.isfinite(value) or value < 0 else value


@pytest.fixture
def warmed(make_pool: Make, make_engine: Make, close_loop: Make) -> tuple[Any, Memory, float]:
    """A replica in the middle of its growth, so that a wrong reading could well raise it."""
    engine = make_engine(REFERENCE, seed=5)
    *_, last = close_loop(make_pool(), engine, Memory.start(), 25.0)
    engine.run_until(engine.now_s + 5)
    return engine.snapshot(), last.plan.memory, engine.now_s


def test_the_same_inputs_make_the_same_plan(
    make_pool: Make, warmed: tuple[Any, Memory, float]
) -> None:
    seen, memory, now_s = warmed
    snapshot = _snapshot(seen, at_s=now_s)
    assert plan(make_pool(), snapshot, memory, now_s) == plan(make_pool(), snapshot, memory, now_s)


@pytest.mark.parametrize("spoil", ["nan", "unreachable", "frozen"])
def test_two_minutes_of_darkness_hold_then_step_back_once_and_never_raise(
    make_pool: Make, make_engine: Make, close_loop: Make, spoil: str
) -> None:
    engine = make_engine(REFERENCE, seed=2)
    frozen: list[ReplicaSnapshot] = []

    def alter(seen: ReplicaSnapshot, now_s: float) -> ReplicaSnapshot:
        frozen[:] = frozen or ([seen] if now_s > 100 else [])
        if not 100 < now_s < 220:
            return seen
        if spoil == "nan":
            none = {name: None for name in NUMBERS}
            assert seen.sample is not None
            rejected = ("chairlift_steps_total",)
            return replace(seen, sample=replace(seen.sample, **none, rejected=rejected))
        if spoil == "frozen":
            return replace(seen, sample=frozen[0].sample, sampled_at_s=frozen[0].sampled_at_s)
        return replace(seen, sample=None, sampled_at_s=None, scrape_failure="timed out")

    ticks = list(close_loop(make_pool(), engine, Memory.start(), 330.0, alter=alter))
    dark = [t for t in ticks if 100 < t.at_s < 220]
    sizes = [(t.plan.replicas[0].batch_size, t.plan.replicas[0].step_tokens) for t in dark]
    blind = [t for t in dark if t.plan.health in (Health.STALE, Health.MISSING)]
    assert len(blind) >= 20
    assert all(d.after <= d.before for t in dark for d in t.plan.decisions)
    assert len([t for t in blind if t.plan.actions]) == 1  # one cautious step, then patience
    first_move_s = next(t.at_s for t in blind if t.plan.actions)
    assert first_move_s >= 100 + 55
    assert sizes[-1][1] <= 0.81 * sizes[0][1]
    assert sizes[-1][0] == sizes[0][0]  # fewer slots would only keep requests waiting
    assert any(isinstance(s.signal, Unknown) for s in dark[-1].plan.signals)
    assert ticks[-1].plan.replicas[0].step_tokens > sizes[-1][1]  # and back again in the light
    after = [t for t in ticks if t.at_s > 230]
    assert sum(t.bad for t in after) <= 0.05 * sum(t.good + t.bad for t in after)


def test_an_engine_starts_with_the_first_policy_that_would_be_pushed(
    make_pool: Make, make_engine: Make
) -> None:
    pool = make_pool(batch=(1, 12))
    first = first_policy(pool)
    made = plan(pool, _snapshot(make_engine(REFERENCE).snapshot(), at_s=1), Memory.start(), 1)
    assert replace(made.actions[0].policy, generation=first.generation) == first
    assert first.generation < made.actions[0].policy.generation


@pytest.mark.parametrize(("now_shift_s", "sample_shift_s"), [(5.0, 0.0), (0.0, -3.0), (-60, -60)])
def test_a_sample_that_is_not_newer_raises_nothing(
    make_pool: Make, make_engine: Make, close_loop: Make, now_shift_s: float, sample_shift_s: float
) -> None:
    pool, engine = make_pool(), make_engine(REFERENCE)
    num_raised = 0
    for tick in close_loop(pool, engine, Memory.start(), 90.0):
        num_raised += any(d.after > d.before for d in tick.plan.decisions)
        now_s, sampled_at_s = tick.at_s + now_shift_s, tick.at_s + sample_shift_s
        seen = replace(engine.snapshot(), sampled_at_s=sampled_at_s)
        again = plan(pool, _snapshot(seen, at_s=now_s), tick.plan.memory, now_s)
        assert again.actions == ()
        assert again.health is Health.STALE
        held = again.replicas[0].held
        assert held is not None and "the sample is not newer than the one before" in held
    assert num_raised > 3  # there was something to raise


def _absurd(sample: EngineSample, field: str, value: float) -> EngineSample:
    return replace(sample, **{field: value})


@pytest.mark.parametrize("value", [1e308, 1e200, 1e15, 5e-324, math.nan])
@pytest.mark.parametrize("field", ["step_seconds", "num_steps", "step_kv_tokens", "num_running"])
def test_one_engine_with_absurd_numbers_does_not_stop_the_others(
    make_pool: Make, make_engine: Make, field: str, value: float
) -> None:
    pool, memory = make_pool(replicas=(2, 2)), Memory.start()
    good, bad = make_engine(REFERENCE), make_engine(REFERENCE, seed=5)
    for tick in range(1, 31):
        good.run_until(5.0 * tick)
        bad.run_until(5.0 * tick)
        spoiled = bad.snapshot("chat-1")
        if tick % 3 == 0:
            spoiled = replace(spoiled, sample=_absurd(spoiled.sample, field, value))
        made = plan(pool, _snapshot(good.snapshot(), spoiled, at_s=5.0 * tick), memory, 5.0 * tick)
        memory = made.memory
        assert made.replicas[0].health is not Health.MISSING
        for action in made.actions:
            {"chat-0": good, "chat-1": bad}[action.replica].policy = action.policy
    assert good.policy.step_tokens != 256  # it was tuned all the while


def _windows(signal: Signal, **known: float) -> PoolWindows:
    shares = [WindowedShare(INTERACTIVE, "itl", w, signal, **known) for w in (SHORT_S, LONG_S)]
    arrivals = WindowedQuantity("interactive/arrivals", signal)
    trouble = Trouble("Stale", signal.reason) if isinstance(signal, Unknown) else None
    return PoolWindows(tuple(shares), (arrivals,), trouble)


@pytest.mark.parametrize(
    ("signal", "said"),
    [
        (Value(90.0, 7.0, "Prometheus: sloEvents[5m]"), ("used", 2.0)),
        (Idle(7.0, "Prometheus: sloEvents[5m]"), ("used", None)),
        (Unknown("so", 7.0, "Prometheus: sloEvents[5m]"), ("held: replicas do not shrink", None)),
    ],
)
def test_windows_are_signals_of_the_pool_that_name_their_query(
    make_pool: Make, make_engine: Make, signal: Signal, said: tuple[str, float | None]
) -> None:
    seen = make_engine(REFERENCE).snapshot()
    snapshot = replace(_snapshot(seen, at_s=1.0), windows=_windows(signal))
    named = {s.name: s for s in plan(make_pool(), snapshot, Memory.start(), 1.0).signals}
    share = named["interactive/interTokenLatency.goodPercent[5m]"]
    assert (share.signal, share.effect) == (signal, said[0])
    burn = named["interactive/interTokenLatency.burnRate[1h]"].signal
    assert type(burn) is type(signal)
    assert burn.source == "Prometheus: sloEvents[5m]"
    if isinstance(burn, Value):
        assert burn.value == pytest.approx(said[1])
    assert named["interactive/arrivals"].signal == signal
    assert named["chat-0/running"].signal.source == "engine /metrics"


def test_a_boundary_beside_the_threshold_is_said_with_its_uncertainty(
    make_pool: Make, make_engine: Make
) -> None:
    windows = _windows(Value(90.0, 1.0, "Prometheus"), bad_lower=0.02, bad_upper=0.3)
    shares = tuple(replace(share, boundary_ms=75.0) for share in windows.shares)
    snapshot = _snapshot(make_engine(REFERENCE).snapshot(), at_s=1.0)
    snapshot = replace(snapshot, windows=replace(windows, shares=shares))
    told = plan(make_pool(), snapshot, Memory.start(), 1.0).signals[0].effect
    assert told == "used: counted at the bucket boundary 75 ms, so between 70.0 and 98.0 %"


def test_what_prometheus_does_not_tell_makes_metrics_unavailable(
    make_pool: Make, make_engine: Make
) -> None:
    seen = make_engine(REFERENCE).snapshot()
    windows = _windows(Unknown("chat-b: its last sample is 65 s old", 1.0, "Prometheus: x"))
    snapshot = replace(_snapshot(seen, at_s=1.0), windows=windows)
    condition = _condition(plan(make_pool(), snapshot, Memory.start(), 1.0), "MetricsAvailable")
    assert (condition.status, condition.reason) == (Truth.FALSE, "Stale")
    assert condition.message == (
        "chat-b: its last sample is 65 s old; replicas do not shrink until it is known."
    )


@pytest.mark.parametrize("reason", ["NotYetAsked", "NotYetScraped"])
def test_what_is_on_its_way_is_no_trouble_yet(
    make_pool: Make, make_engine: Make, reason: str
) -> None:
    windows = PoolWindows(trouble=Trouble(reason, "wait"))
    snapshot = replace(_snapshot(make_engine(REFERENCE).snapshot(), at_s=1.0), windows=windows)
    made = plan(make_pool(), snapshot, Memory.start(), 1.0)
    assert _condition(made, "MetricsAvailable").status is Truth.TRUE
    assert not windows.is_known  # and so nothing shrinks


@pytest.mark.parametrize(
    ("bad_lower", "num_events", "reason"),
    [(0.08, 400.0, "ObjectiveMissed"), (0.02, 400.0, "ObjectiveMet"), (0.0, 20.0, "TooFewSamples")],
)
def test_where_minutes_tell_too_little_the_hour_tells(
    make_pool: Make, make_engine: Make, bad_lower: float, num_events: float, reason: str
) -> None:
    windows = _windows(Value(91.0, 1.0, "Prometheus"), bad_lower=bad_lower, num_events=num_events)
    snapshot = replace(_snapshot(make_engine(REFERENCE).snapshot(), at_s=1.0), windows=windows)
    condition = _condition(plan(make_pool(), snapshot, Memory.start(), 1.0), "WithinSLO")
    assert condition.reason == reason
    if reason != "TooFewSamples":
        assert condition.message == (
            "interactive: 91.0 % of gaps within 50 ms, 95 % wanted, over an hour."
        )


WINDOW_SIGNALS = st.one_of(
    st.builds(Value, st.floats(0, 100), st.just(1.0), st.just("Prometheus: x")),
    st.just(Idle(1.0, "Prometheus: x")),
    st.just(Unknown("timed out", 1.0, "Prometheus: x")),
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(signal=WINDOW_SIGNALS, bad_lower=st.floats(0, 1))
def test_nothing_that_windows_say_raises_a_limit_or_lowers_a_count(
    make_pool: Make, warmed: tuple[Any, Memory, float], signal: Signal, bad_lower: float
) -> None:
    seen, memory, now_s = warmed
    without = _snapshot(seen, at_s=now_s)
    told = replace(without, windows=_windows(signal, bad_lower=bad_lower))
    pool = make_pool(replicas=(1, 4))
    fair, made = plan(pool, without, memory, now_s), plan(pool, told, memory, now_s)
    assert made.actions == fair.actions


def test_a_sample_from_prometheus_is_said_to_be_one(make_pool: Make, make_engine: Make) -> None:
    seen = replace(make_engine(REFERENCE).snapshot(), source="Prometheus: sample")
    signals = plan(make_pool(), _snapshot(seen, at_s=1.0), Memory.start(), 1.0).signals
    assert {s.signal.source for s in signals} == {"Prometheus: sample"}
