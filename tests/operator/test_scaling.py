"""Numbers of replicas: the law's brakes as properties, then a fleet of virtual engines."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_operator.arrivals import RATE_WINDOW_S, Arrivals
from chairlift_operator.decisions import SetPolicy, SetReplicas
from chairlift_operator.exposition import ClassSample, EngineSample, GatewayClassSample, SloCount
from chairlift_operator.memory import Memory
from chairlift_operator.plan import Plan, plan
from chairlift_operator.pool_windows import (
    LONG_S,
    SHORT_S,
    PoolWindows,
    Trouble,
    WindowedQuantity,
    WindowedShare,
)
from chairlift_operator.replica_law import (
    SLOW_START_FILL,
    Lengths,
    ScaleInput,
    ScaleState,
    Supply,
    Want,
    allot,
    fill,
    num_backlogged,
    replicas_for_rate,
    scale,
    sustainable_rate,
)
from chairlift_operator.signals import Idle, Signal, Unknown, Value
from chairlift_operator.snapshot import (
    EngineCapacity,
    GatewaySnapshot,
    Phase,
    PolicyReadback,
    ReplicaSnapshot,
    Snapshot,
)
from chairlift_operator.spec import (
    Autoscaling,
    Batch,
    BatchReplicaBounds,
    BatchSlo,
    CapacityLimit,
    InferencePool,
)
from chairlift_operator.spec_values import Bounds
from chairlift_operator.step_time import StepCosts
from chairlift_protocol.policy import Generation, Policy, SloThresholds
from chairlift_protocol.wire import RequestClass

Make = Callable[..., Any]
INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
REFERENCE = StepCosts(8e-3, 0.06e-3, 0.045e-3, 5e-8)

COUNT = st.integers(0, 12)
SUPPLIES = st.builds(Supply, COUNT, COUNT, COUNT)
WANTS = st.none() | st.builds(Want, st.integers(0, 40), st.just("so"), st.booleans())
STATES = st.builds(
    ScaleState,
    st.lists(st.tuples(st.floats(0, 1000), st.integers(0, 20)), max_size=4).map(
        lambda wants: tuple(sorted(wants))
    ),
    st.floats(0, 1000),
    st.floats(0, 1000),
    st.integers(0, 3),
)


@st.composite
def scale_inputs(draw: st.DrawFn) -> ScaleInput:
    least = draw(COUNT)
    return ScaleInput(
        bounds=Bounds(least, draw(st.integers(least, 15))),
        supply=draw(SUPPLIES),
        want=draw(WANTS),
        complaint=draw(st.none() | st.just("late")),
        is_certain=draw(st.booleans()),
        is_managed=draw(st.booleans()),
        window_s=draw(st.sampled_from([15.0, 300.0])),
        warm_up_s=draw(st.sampled_from([5.0, 120.0])),
        state=draw(STATES),
        now_s=1000.0,
    )


# -- the law ---------------------------------------------------------------------------------------


@given(given_=scale_inputs())
def test_a_count_keeps_its_bounds_and_never_more_than_doubles(given_: ScaleInput) -> None:
    count, supply = scale(given_).count, given_.supply
    assert given_.bounds.min <= count <= given_.bounds.max
    assert count <= max(2 * supply.count + 1, given_.bounds.min)


@given(given_=scale_inputs())
def test_nothing_shrinks_on_what_is_unknown_pending_or_draining(given_: ScaleInput) -> None:
    count, supply, bounds = scale(given_).count, given_.supply, given_.bounds
    if not bounds.min <= supply.count <= bounds.max:
        return
    if given_.want is None or not given_.is_managed:
        assert count >= supply.count
    elif supply.num_pending:  # what starts may be called off, and nothing that serves
        assert count >= min(supply.count, max(supply.num_ready, given_.want.count))
    elif supply.num_draining or not given_.is_certain:
        assert count >= supply.count
    assert count >= supply.count - max(1, supply.num_pending)


@given(given_=scale_inputs())
def test_what_is_less_certain_never_makes_fewer(given_: ScaleInput) -> None:
    doubtful = scale(replace(given_, is_certain=False)).count
    assert doubtful >= scale(replace(given_, is_certain=True)).count


@given(given_=scale_inputs(), num_stuck=st.integers(1, 3))
def test_what_comes_up_nowhere_is_withdrawn_and_not_asked_for_again(
    given_: ScaleInput, num_stuck: int
) -> None:
    managed = replace(given_, is_managed=True, stuck=("b: no node takes it",) * num_stuck)
    count = managed.supply.count
    outcome = scale(managed)
    if not managed.bounds.min <= count <= managed.bounds.max:
        return
    assert outcome.count == max(managed.bounds.min, count - num_stuck)
    assert outcome.state.blocked_because == "b: no node takes it"
    supply = Supply(outcome.count, 0, 0)
    later = replace(managed, stuck=(), supply=supply, state=outcome.state, now_s=1100.0)
    assert scale(later).count <= max(outcome.count, managed.bounds.min)


@given(given_=scale_inputs())
def test_a_replica_that_starts_counts_as_one_that_runs(given_: ScaleInput) -> None:
    supply = given_.supply
    ready = replace(supply, num_ready=supply.count, num_pending=0)
    started = scale(replace(given_, supply=ready)).count
    if given_.want is None or given_.want.count >= supply.count:  # else it may be called off
        assert scale(given_).count >= started - 1 or started > supply.count
    if given_.want is not None and given_.want.count > supply.count and given_.is_managed:
        assert scale(given_).count == started


def _asked(**changes: Any) -> ScaleInput:
    """One replica serves, demand asks for one, a whole window was seen."""
    calm = ScaleInput(
        bounds=Bounds(1, 9),
        supply=Supply(1, 0, 0),
        want=Want(1, "so"),
        complaint=None,
        is_certain=True,
        is_managed=True,
        window_s=300.0,
        warm_up_s=30.0,
        state=ScaleState(wants=((0.0, 1),)),
        now_s=1000.0,
    )
    return replace(calm, **changes)


def test_a_replica_that_a_complaint_asked_for_is_not_called_off_by_demand() -> None:
    state = ScaleState(wants=((0.0, 1),), num_missed_in_row=1)
    asked = scale(_asked(complaint="late", state=state))
    assert asked.count == 2
    for complaint in ("late", None):  # it may cease before the replica is there
        starting = _asked(
            complaint=complaint, supply=Supply(1, 1, 0), state=asked.state, now_s=1005
        )
        assert scale(starting).count == 2


@pytest.mark.parametrize(
    ("wants", "count"),
    [
        (((995.0, 5), (1000.0, 1)), 1),  # demand was seen to fall
        (((600.0, 1), (1000.0, 1)), 1),  # a whole window needed less
        (((995.0, 1), (1000.0, 1)), 5),  # who led before may have known better
    ],
)
def test_what_starts_is_called_off_where_demand_was_seen_to_need_less(
    wants: tuple[tuple[float, int], ...], count: int
) -> None:
    state = ScaleState(wants=wants, fell_at_s=970.0)
    starting = _asked(supply=Supply(1, 4, 0), state=state)
    assert scale(starting).count == count
    assert scale(replace(starting, want=Want(1, "so", fell=False))).count == 5


def test_what_starts_is_called_off_only_after_half_a_minute_of_low_demand() -> None:
    state, counts = ScaleState(wants=((995.0, 5),)), {}
    for now_s in range(1000, 1060, 5):
        # A single busy reading in between begins the half minute anew.
        want = Want(5 if now_s == 1015 else 1, "so", fell=now_s != 1015)
        outcome = scale(_asked(supply=Supply(1, 4, 0), want=want, state=state, now_s=now_s))
        state, counts[now_s] = outcome.state, outcome.count
    assert [now_s for now_s, count in counts.items() if count == 1] == [1050, 1055]


@given(given_=scale_inputs())
def test_off_moves_nothing_inside_the_bounds(given_: ScaleInput) -> None:
    outcome = scale(replace(given_, is_managed=False))
    assert outcome.count == given_.bounds.clamp(given_.supply.count)


@given(
    capacity=st.integers(1, 20),
    wishes=st.tuples(COUNT, COUNT),
    supplies=st.tuples(SUPPLIES, SUPPLIES),
    batch_min=st.integers(0, 3),
)
def test_both_classes_together_never_grow_beyond_the_capacity(
    capacity: int, wishes: tuple[int, int], supplies: tuple[Supply, Supply], batch_min: int
) -> None:
    batch_min = min(batch_min, capacity)
    granted = allot(capacity, wishes, supplies, batch_min)
    counts = (granted.interactive, granted.batch)
    grown = sum(max(0, c - s.count) for c, s in zip(counts, supplies, strict=True))
    held = sum(s.num_held for s in supplies)
    assert grown == 0 or held + grown <= capacity  # what shrinks still holds its place
    assert granted.interactive <= max(supplies[0].count, capacity)
    assert sum(counts) <= max(capacity, sum(s.count for s in supplies))


def test_batch_work_shrinks_before_interactive_grows_and_interactive_comes_first() -> None:
    full = (Supply(2, 0, 0), Supply(2, 0, 0))
    granted = allot(4, (3, 2), full, 0)
    assert (granted.interactive, granted.batch) == (2, 1)
    leaving = (Supply(2, 0, 0), Supply(1, 0, 1))
    assert allot(4, (3, 2), leaving, 0).interactive == 2
    gone = (Supply(2, 0, 0), Supply(1, 0, 0))
    assert allot(4, (3, 2), gone, 0).interactive == 3


@given(
    costs=st.builds(
        StepCosts,
        st.floats(1e-4, 0.1),
        st.floats(0, 1e-3),
        st.floats(1e-6, 1e-2),
        st.floats(0, 1e-7),
    ),
    factor=st.floats(1, 10),
    lengths=st.builds(Lengths, st.floats(1, 4000), st.floats(1, 1000)),
)
def test_slower_hardware_and_longer_requests_never_raise_what_a_replica_carries(
    costs: StepCosts, factor: float, lengths: Lengths
) -> None:
    rate = sustainable_rate(costs, 0.1, lengths, 64, 1e5)
    slower = StepCosts(*(factor * c for c in (costs.fixed_s, costs.decode_s, costs.prefill_s, 0.0)))
    slower = replace(slower, kv_s=costs.kv_s * factor)
    assert 0 <= sustainable_rate(slower, 0.1, lengths, 64, 1e5) <= rate * (1 + 1e-9)
    for longer in (
        replace(lengths, prompt_tokens=factor * lengths.prompt_tokens),
        replace(lengths, output_tokens=factor * lengths.output_tokens),
    ):
        assert sustainable_rate(costs, 0.1, longer, 64, 1e5) <= rate * (1 + 1e-9)
    assert sustainable_rate(costs, 0.1 * factor, lengths, 64, 1e5) >= rate * (1 - 1e-9)
    if rate > 0:
        need = replicas_for_rate(3.0, rate, 1, 30.0)
        assert replicas_for_rate(3.0 * factor, rate, 1, 30.0) >= need - 1e-9


# -- arrivals --------------------------------------------------------------------------------------


def _gateway(
    at_s: float, received: float, held: float = 0.0, batch: float = 0.0
) -> GatewaySnapshot:
    classes = (
        GatewayClassSample(INTERACTIVE, received, held),
        GatewayClassSample(BATCH, batch, 0.0),
    )
    return GatewaySnapshot(classes, at_s)


def test_a_rate_needs_two_fresh_samples_and_survives_a_restart() -> None:
    arrivals = Arrivals().with_snapshot(_gateway(0.0, 100.0))
    assert arrivals.rate_per_s(INTERACTIVE, 1.0) is None
    arrivals = arrivals.with_snapshot(_gateway(10.0, 120.0))
    assert arrivals.rate_per_s(INTERACTIVE, 10.0) == 2.0
    assert arrivals.rate_per_s(INTERACTIVE, 26.0) is None
    assert arrivals.with_snapshot(GatewaySnapshot(failure="refused")) == arrivals
    restarted = arrivals.with_snapshot(_gateway(15.0, 3.0))
    assert restarted.rate_per_s(INTERACTIVE, 15.0) is None
    assert restarted.with_snapshot(_gateway(20.0, 13.0)).rate_per_s(INTERACTIVE, 20.0) == 2.0


def _arrived(per_tick: list[float]) -> Arrivals:
    """So many interactive requests in each five seconds, one after the other."""
    arrivals, received = Arrivals().with_snapshot(_gateway(0.0, 0.0)), 0.0
    for tick, count in enumerate(per_tick, start=1):
        received += count
        arrivals = arrivals.with_snapshot(_gateway(5.0 * tick, received))
    return arrivals


@pytest.mark.parametrize(
    ("per_tick", "rate", "rises"),
    [
        ([20.0] * 18, 4.0, False),
        ([20.0] * 16 + [30.0, 26.0], 4.0 + 16.0 / 30.0, True),  # less than three sigma of 10 s
        ([20.0] * 16 + [80.0, 80.0], 16.0, False),  # a step counts at once, and is no trend
        ([20.0] * 12 + [80.0] * 6, 16.0, False),  # nor while it is in the means
        ([20.0] * 6 + [80.0] * 16, 16.0, False),
        ([10.0 + 2 * tick for tick in range(24)], 10.2, True),  # growth from window to window
        ([0.0] * 16 + [1.0, 1.0], 2.0 / 30.0, True),  # two are no step
    ],
)
def test_a_step_of_arrivals_counts_at_once_and_is_not_taken_for_a_trend(
    per_tick: list[float], rate: float, rises: bool
) -> None:
    arrivals, now_s = _arrived(per_tick), 5.0 * len(per_tick)
    assert arrivals.rate_per_s(INTERACTIVE, now_s) == pytest.approx(rate)
    assert (arrivals.slope_per_s(INTERACTIVE, now_s) > 0) is rises


def test_chance_alone_makes_a_step_of_steady_arrivals_once_in_hundreds_of_windows() -> None:
    draw = random.Random(11)
    for rate in (0.5, 5.0, 50.0):
        per_tick = [float(_poisson(5.0 * rate, draw)) for _ in range(2000)]
        seen = [
            _arrived(per_tick[end - 18 : end]).rate_per_s(INTERACTIVE, 90.0) or 0.0
            for end in range(18, 2000)
        ]
        mean_30s = [sum(per_tick[end - 6 : end]) / 30.0 for end in range(18, 2000)]
        stepped = sum(now > mean + 1e-9 for now, mean in zip(seen, mean_30s, strict=True))
        assert stepped <= 0.01 * len(seen)


def _poisson(mean: float, draw: random.Random) -> int:
    count, at = 0, draw.expovariate(1.0)
    while at < mean:
        count, at = count + 1, at + draw.expovariate(1.0)
    return count


# -- queues ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queues", "num_held", "num_supply", "backlogged"),
    [
        ([], 0.0, 2, 0),
        ([100.0, 0.0], 0.0, 2, 0),  # done before a new replica came
        ([121.0, 119.0], 0.0, 2, 1),
        ([500.0, 500.0], 0.0, 2, 2),
        ([], 250.0, 3, 2),  # held by the gateway, for whoever starts
        ([], 9000.0, 3, 3),  # no more than there are
        ([500.0], 9000.0, 1, 1),
    ],
)
def test_a_replica_whose_queue_outlasts_a_warm_up_carries_none_of_what_arrives(
    queues: list[float], num_held: float, num_supply: int, backlogged: int
) -> None:
    found = num_backlogged(queues, num_held, 2.0, num_supply, warm_up_s=60.0)
    assert found == backlogged
    assert replicas_for_rate(3.0, 2.0, found, 60.0) == found + 3.0 / (SLOW_START_FILL * 2.0)


@pytest.mark.parametrize(
    ("warm_up_s", "filled"), [(5.0, 0.75), (30.0, 0.75), (45.0, 0.675), (60.0, 0.6), (900.0, 0.6)]
)
def test_the_longer_a_replica_takes_to_start_the_less_each_is_filled(
    warm_up_s: float, filled: float
) -> None:
    assert fill(warm_up_s) == pytest.approx(filled)


def test_a_start_that_was_never_seen_is_taken_for_a_slow_one() -> None:
    assert fill(Memory.start().scaling.warm_up_s) == SLOW_START_FILL


# -- a fleet ---------------------------------------------------------------------------------------


@dataclass
class FleetEngine:
    """An engine as scaling sees it: it starts, serves at its step costs, queues, drains.

    Requests are fluid: each has `LENGTHS`, and a second of work ends as many as fit.
    """

    name: str
    request_class: RequestClass
    ready_at_s: float
    waiting: float = 0.0
    running: float = 0.0
    started: float = 0.0
    draining: bool = False
    steps: float = 0.0
    busy_s: float = 0.0
    late: float = 0.0


LENGTHS = Lengths(800.0, 150.0)
WARM_UP_S = 20.0


class Fleet:
    """Engines that obey SetReplicas, and a gateway that spreads arrivals evenly."""

    def __init__(self, pool: InferencePool) -> None:
        self.pool, self.now_s = pool, 0.0
        self.engines: list[FleetEngine] = []
        self.received = {INTERACTIVE: 0.0, BATCH: 0.0}
        self.held = {INTERACTIVE: 0.0, BATCH: 0.0}
        self.memory = Memory.start(prior=REFERENCE)
        self.policy = Policy(Generation(0, 0), 256, 2048, 2048, 1.0, SloThresholds(500.0, 50.0))
        self.policies: dict[str, Policy] = {}
        self.rate = sustainable_rate(REFERENCE, 0.045, LENGTHS, 256, 400_000)
        self.most = 0
        self.rng = random.Random(5)
        self.blind = False
        self.is_late = False  # each first token, and a few requests always wait
        self.windows: PoolWindows | None = None
        self.warm_up_s = WARM_UP_S

    def count(self, request_class: RequestClass) -> int:
        return sum(e.request_class is request_class and not e.draining for e in self.engines)

    def run(self, until_s: float, **per_s: float) -> Iterator[Plan]:
        """Ticks of 5 s with so many arrivals a second."""
        while self.now_s < until_s:
            self.now_s += 5.0
            for request_class in RequestClass:
                self._serve(request_class, 5.0 * per_s.get(request_class.value, 0.0))
            made = plan(self.pool, self.snapshot(), self.memory, self.now_s)
            self.memory = made.memory
            for action in made.actions:
                self._obey(action)
            yield made

    def _serve(self, request_class: RequestClass, arrived: float) -> None:
        self.received[request_class] += arrived
        own = [e for e in self.engines if e.request_class is request_class]
        ready = [e for e in own if e.ready_at_s <= self.now_s]
        open_ones = [e for e in ready if not e.draining]
        arrived += self.held[request_class]
        self.held[request_class] = 0.0 if open_ones else arrived
        for engine in ready:
            if engine in open_ones:
                engine.waiting += arrived / len(open_ones)
            done = min(engine.waiting, 5.0 * self.rate)
            engine.waiting -= done
            engine.started += done
            engine.late += done if self.is_late else 0.0
            engine.running = done / 5.0 * LENGTHS.output_tokens * 0.03
            engine.steps += 5.0 / 0.03 if done else 0.0
            engine.busy_s += 5.0 if done else 0.0
        self.engines = [e for e in self.engines if not e.draining or e.waiting > 0]
        self.most = max(self.most, len(self.engines))

    def _obey(self, action: SetPolicy | SetReplicas) -> None:
        if isinstance(action, SetPolicy):
            self.policies[action.replica] = action.policy
            return
        for engine in self.engines:
            engine.draining |= engine.name in action.victims
        free = (f"{action.request_class}-{i}" for i in range(99))
        names = {e.name for e in self.engines}
        while self.count(action.request_class) < action.count:
            name = next(n for n in free if n not in names)
            ready_at_s = self.now_s + self.warm_up_s
            self.engines.append(FleetEngine(name, action.request_class, ready_at_s))
        self.most = max(self.most, len(self.engines))

    def snapshot(self) -> Snapshot:
        replicas = tuple(self._seen(engine) for engine in self.engines)
        classes = tuple(GatewayClassSample(c, self.received[c], self.held[c]) for c in RequestClass)
        gateway = GatewaySnapshot(classes, self.now_s)
        if self.blind:
            gateway = GatewaySnapshot(failure="timed out")
        return Snapshot("default/chat", self.now_s, replicas, gateway, windows=self.windows)

    def _seen(self, engine: FleetEngine) -> ReplicaSnapshot:
        if engine.ready_at_s > self.now_s:
            return ReplicaSnapshot(engine.name, False, engine.request_class, phase=Phase.STARTING)
        policy = self.policies.get(engine.name, self.policy)
        decodes = engine.steps * engine.running
        prefill = engine.started * LENGTHS.prompt_tokens
        kv = decodes * LENGTHS.context_tokens
        num_waiting = engine.waiting + (3.0 if self.is_late else 0.0)
        sample = EngineSample(
            step_seconds=REFERENCE.step_s(decodes, prefill, kv) + 7e-3 * engine.steps,
            num_steps=engine.steps,
            step_decode_seqs=decodes,
            step_prefill_tokens=prefill,
            step_kv_tokens=kv,
            num_running=engine.running,
            num_waiting=num_waiting,
            kv_usage=min(1.0, engine.running * LENGTHS.context_tokens / 400_000),
            generation_tokens=engine.started * LENGTHS.output_tokens,
            slo_counts=(
                SloCount("itl", policy.slo.itl_ms, engine.request_class.value, decodes, 0),
                SloCount(
                    "ttft",
                    policy.slo.ttft_ms,
                    engine.request_class.value,
                    engine.started - engine.late,
                    engine.late,
                ),
            ),
            classes=(
                ClassSample(
                    engine.request_class,
                    engine.running,
                    num_waiting,
                    0.0,
                    engine.started,
                    prefill,
                    engine.started * LENGTHS.output_tokens,
                ),
            ),
        )
        return ReplicaSnapshot(
            engine.name,
            True,
            engine.request_class,
            sample,
            self.now_s,
            policy=PolicyReadback(policy, policy, EngineCapacity(256, 8192, 400_000, 4096, 16)),
            phase=Phase.DRAINING if engine.draining else Phase.SERVING,
        )


def _fleet_pool(
    make_pool: Make, batch: Batch | None = None, most: int = 4, **spec: Any
) -> InferencePool:
    scaling = Autoscaling(scale_down_window_s=60.0)
    pool = make_pool(replicas=(1, most), batch_work=batch, autoscaling=scaling, **spec)
    assert isinstance(pool, InferencePool)
    return pool


def _says(plans: list[Plan]) -> list[str]:
    return [
        f"{d.replica}: {d.sentence}" for p in plans for d in p.decisions if d.field == "replicas"
    ]


def test_load_that_comes_and_goes_is_followed_out_at_once_and_in_by_one(make_pool: Make) -> None:
    fleet = Fleet(_fleet_pool(make_pool, capacity=CapacityLimit(4)))
    list(fleet.run(60.0, interactive=0.3 * fleet.rate))
    assert fleet.count(INTERACTIVE) == 1
    grown = list(fleet.run(240.0, interactive=2.0 * fleet.rate))
    assert fleet.count(INTERACTIVE) == 3
    assert "requests/s arrive" in _says(grown)[0]
    shrunk = list(fleet.run(600.0, interactive=0.3 * fleet.rate))
    assert fleet.count(INTERACTIVE) == 1
    steps = [s for s in _says(shrunk) if "→" in s]
    assert len(steps) == 2 and "60 s of it fit" in steps[0]
    assert fleet.most <= 4


def test_an_idle_pool_goes_to_its_minimum_and_a_blind_one_stays(make_pool: Make) -> None:
    fleet = Fleet(_fleet_pool(make_pool))
    list(fleet.run(120.0, interactive=2.0 * fleet.rate))
    assert fleet.count(INTERACTIVE) >= 3
    fleet.blind = True
    assert not _says(list(fleet.run(400.0)))
    fleet.blind = False
    list(fleet.run(800.0))
    assert fleet.count(INTERACTIVE) == 1


def _windows(good_percent: float | None, bad_lower: float = 0.0) -> PoolWindows:
    """Both windows of the gaps; None: nobody could tell."""
    told = Value(good_percent, 0.0, "Prometheus") if good_percent is not None else None
    signal = told or Unknown("timed out", 0.0, "Prometheus: sloEvents[5m]")
    shares = [WindowedShare(INTERACTIVE, "itl", w, signal, bad_lower) for w in (SHORT_S, LONG_S)]
    trouble = None if told else Trouble("QueryFailed", "Prometheus, query sloEvents[5m]: timed out")
    return PoolWindows(tuple(shares), trouble=trouble)


@pytest.mark.parametrize(
    "windows", [_windows(None), _windows(80.0, bad_lower=0.15)], ids=["unknown", "burning"]
)
def test_a_pool_keeps_its_replicas_while_minutes_and_hours_are_unknown_or_bad(
    make_pool: Make, windows: PoolWindows
) -> None:
    """O1, O3: though all that is read directly asks for fewer."""
    fleet = Fleet(_fleet_pool(make_pool))
    list(fleet.run(120.0, interactive=2.0 * fleet.rate))
    assert fleet.count(INTERACTIVE) >= 3
    before = fleet.count(INTERACTIVE)
    fleet.windows = windows
    assert not _says(list(fleet.run(400.0, interactive=0.3 * fleet.rate)))
    assert fleet.count(INTERACTIVE) == before
    fleet.windows = _windows(99.0)
    list(fleet.run(800.0, interactive=0.3 * fleet.rate))
    assert fleet.count(INTERACTIVE) == 1


def test_an_outage_of_prometheus_neither_stops_growth_nor_lifts_a_bound(make_pool: Make) -> None:
    """O5."""
    fleet = Fleet(_fleet_pool(make_pool, most=3))
    fleet.windows = _windows(None)
    list(fleet.run(60.0, interactive=0.3 * fleet.rate))
    assert fleet.count(INTERACTIVE) == 1
    list(fleet.run(240.0, interactive=4.0 * fleet.rate))
    assert fleet.count(INTERACTIVE) == 3
    fleet.pool = _fleet_pool(make_pool, most=2)
    list(fleet.run(300.0, interactive=4.0 * fleet.rate))
    assert fleet.count(INTERACTIVE) == 2


def _scraped(arrivals_per_s: float | None) -> PoolWindows:
    """All is known but, perhaps, arrivals."""
    signal: Signal = Unknown("timed out", 0.0, "Prometheus: received")
    if arrivals_per_s is not None:
        signal = Value(arrivals_per_s, 0.0, "Prometheus: received")
    if arrivals_per_s == 0:
        signal = Idle(0.0, "Prometheus: received")
    trouble = None if arrivals_per_s is not None else Trouble("QueryFailed", "timed out")
    return replace(
        _windows(99.0),
        quantities=(WindowedQuantity("interactive/arrivals", signal),),
        trouble=trouble,
    )


def test_where_gateways_are_out_of_reach_arrivals_are_those_that_prometheus_scraped(
    make_pool: Make,
) -> None:
    fleet = Fleet(_fleet_pool(make_pool))
    list(fleet.run(60.0, interactive=0.3 * fleet.rate))
    fleet.blind = True
    fleet.windows = _scraped(2.0 * fleet.rate)
    grown = list(fleet.run(120.0, interactive=2.0 * fleet.rate))
    count = fleet.count(INTERACTIVE)
    assert count >= 3 and "requests/s arrive" in _says(grown)[0]
    fleet.windows = _scraped(None)  # O1, O3: what nobody tells lowers nothing
    assert not _says(list(fleet.run(400.0, interactive=0.3 * fleet.rate)))
    assert fleet.count(INTERACTIVE) == count
    fleet.windows = _scraped(0.0)  # O2: no arrivals among counters that are there is rest
    list(fleet.run(800.0))
    assert fleet.count(INTERACTIVE) == 1


def test_what_the_gateways_say_themselves_comes_before_what_was_scraped(make_pool: Make) -> None:
    fleet = Fleet(_fleet_pool(make_pool))
    fleet.windows = _scraped(3.0 * fleet.rate)
    list(fleet.run(120.0, interactive=0.3 * fleet.rate))
    assert fleet.count(INTERACTIVE) == 1


def test_late_first_tokens_ask_for_one_replica_and_for_another_only_if_it_does_not_help(
    make_pool: Make,
) -> None:
    fleet = Fleet(_fleet_pool(make_pool))
    list(fleet.run(120.0, interactive=0.5 * fleet.rate))
    fleet.is_late = True
    asked = _says(list(fleet.run(150.0, interactive=0.5 * fleet.rate)))
    assert len(asked) == 1 and "first tokens over" in asked[0]
    # It is there, but the last minute is full of those that waited for it.
    ready_s = max(e.ready_at_s for e in fleet.engines)
    list(fleet.run(ready_s + fleet.warm_up_s, interactive=0.5 * fleet.rate))
    assert fleet.count(INTERACTIVE) == 2
    list(fleet.run(ready_s + 3 * fleet.warm_up_s, interactive=0.5 * fleet.rate))
    assert fleet.count(INTERACTIVE) == 3


@pytest.mark.parametrize("warm_up_s", [20.0, 90.0])
def test_what_queues_while_replicas_load_asks_for_no_more_of_them(
    make_pool: Make, warm_up_s: float
) -> None:
    fleet = Fleet(_fleet_pool(make_pool, most=9))
    rate = 1.7 * fleet.rate  # for three, however long they take to start
    list(fleet.run(60.0, interactive=0.3 * fleet.rate))
    fleet.warm_up_s = warm_up_s
    while fleet.count(INTERACTIVE) == 1:  # until the load is noticed
        list(fleet.run(fleet.now_s + 5.0, interactive=rate))
    list(fleet.run(fleet.now_s + RATE_WINDOW_S, interactive=rate))
    known = fleet.count(INTERACTIVE)  # with the whole rate seen, and none of them up
    loading = [e for e in fleet.engines if e.ready_at_s > fleet.now_s]
    while loading and fleet.now_s + 5.0 < max(e.ready_at_s for e in loading):
        list(fleet.run(fleet.now_s + 5.0, interactive=rate))
        assert fleet.count(INTERACTIVE) <= known


@pytest.mark.parametrize("mean", [0.7, 1.4, 2.2])
def test_noise_of_a_fifth_about_a_steady_mean_moves_at_most_once_in_a_window(
    make_pool: Make, mean: float
) -> None:
    window_s = 300.0
    pool = _fleet_pool(make_pool)
    pool = replace(pool, spec=replace(pool.spec, autoscaling=Autoscaling()))
    fleet, rng, moves = Fleet(pool), random.Random(3), []
    assert pool.spec.autoscaling.scale_down_window_s == window_s
    fleet.warm_up_s = 60.0
    while fleet.now_s < 3000.0:
        rate = mean * fleet.rate * rng.uniform(0.8, 1.2)
        for made in fleet.run(fleet.now_s + 5.0, interactive=rate):
            moves += [fleet.now_s for a in made.actions if isinstance(a, SetReplicas)]
    steady = [at_s for at_s in moves if at_s > 1500.0]
    assert all(later - at_s >= window_s for at_s, later in itertools.pairwise(steady))


def test_a_controller_that_restarts_keeps_what_it_finds_for_a_whole_window(
    make_pool: Make,
) -> None:
    fleet = Fleet(_fleet_pool(make_pool, most=9))
    list(fleet.run(120.0, interactive=2.0 * fleet.rate))
    list(fleet.run(240.0, interactive=0.3 * fleet.rate))
    for number in (5, 6):  # asked for by the leader before
        fleet.engines.append(FleetEngine(f"interactive-{number}", INTERACTIVE, fleet.now_s + 40.0))
    found, fleet.memory = fleet.count(INTERACTIVE), Memory.start(2, REFERENCE)
    restarted_s = fleet.now_s
    list(fleet.run(restarted_s + 60.0, interactive=0.3 * fleet.rate))
    assert fleet.count(INTERACTIVE) == found
    list(fleet.run(restarted_s + 600.0, interactive=0.3 * fleet.rate))
    assert fleet.count(INTERACTIVE) == 1


def test_batch_replicas_come_for_waiting_work_and_all_go_when_it_is_done(make_pool: Make) -> None:
    batch = Batch(BatchSlo(120.0), BatchReplicaBounds(0, 3))
    fleet = Fleet(_fleet_pool(make_pool, batch))
    list(fleet.run(30.0))
    assert fleet.count(BATCH) == 0
    list(fleet.run(35.0, batch=60 * fleet.rate))
    assert fleet.count(BATCH) == 1
    plans = list(fleet.run(100.0))
    assert 2 <= fleet.count(BATCH) <= 3, _says(plans)
    list(fleet.run(800.0))
    assert fleet.count(BATCH) == 0


def test_interactive_demand_takes_places_from_batch_work_one_after_the_other(
    make_pool: Make,
) -> None:
    batch = Batch(BatchSlo(60.0), BatchReplicaBounds(0, 3))
    fleet = Fleet(_fleet_pool(make_pool, batch, capacity=CapacityLimit(4)))
    list(fleet.run(200.0, interactive=0.3 * fleet.rate, batch=3.0 * fleet.rate))
    assert (fleet.count(INTERACTIVE), fleet.count(BATCH)) == (1, 3)
    plans = list(fleet.run(900.0, interactive=2.0 * fleet.rate, batch=0.0))
    assert fleet.count(INTERACTIVE) == 3
    assert any("interactive work needs the room" in s for s in _says(plans))
    assert fleet.most <= 4


@pytest.mark.parametrize("mode", ["Enforce", "Recommend"])
def test_a_recommendation_is_said_once_and_not_done(make_pool: Make, mode: str) -> None:
    pool = _fleet_pool(make_pool, mode=mode)
    fleet = Fleet(pool)
    fleet.engines = [FleetEngine("interactive-0", INTERACTIVE, 0.0)]
    plans = list(fleet.run(120.0, interactive=2.0 * fleet.rate))
    assert (fleet.count(INTERACTIVE) >= 3) is (mode == "Enforce")
    assert 1 <= len(_says(plans)) <= 3


def test_what_cannot_be_done_is_tried_each_tick_and_said_once(make_pool: Make) -> None:
    pool, memory, plans = _fleet_pool(make_pool), Memory.start(), []
    for tick in range(10):
        now_s = 1000.0 + 5.0 * tick
        plans.append(plan(pool, Snapshot("p", now_s, ()), memory, now_s))
        memory = plans[-1].memory
    assert all(any(isinstance(a, SetReplicas) for a in made.actions) for made in plans)
    assert len(_says(plans)) == 1


def test_an_external_autoscaler_is_left_alone_and_its_excess_is_said(make_pool: Make) -> None:
    pool = _fleet_pool(make_pool)
    pool = replace(pool, spec=replace(pool.spec, autoscaling=Autoscaling("External")))
    too_many = pool.spec.num_replicas + 2
    replicas = tuple(ReplicaSnapshot(f"r{n}", True) for n in range(too_many))
    made = plan(pool, Snapshot("p", 1000.0, replicas), Memory.start(), 1000.0)
    assert not [a for a in made.actions if isinstance(a, SetReplicas)]
    limited = {c.type: c for c in made.conditions}["CapacityLimited"]
    assert limited.reason == "ReplicasExhausted" and "external autoscaler" in limited.message


@pytest.mark.parametrize(("batch_max", "count"), [(0, 0), (3, None)])
def test_under_an_external_autoscaler_only_a_class_without_a_place_in_the_spec_ends(
    make_pool: Make, batch_max: int, count: int | None
) -> None:
    pool = _fleet_pool(make_pool)
    batch = Batch(replicas=BatchReplicaBounds(0, batch_max)) if batch_max else None
    spec = replace(pool.spec, autoscaling=Autoscaling("External"), batch=batch)
    replicas = (ReplicaSnapshot("r0", True), ReplicaSnapshot("b0", True, request_class=BATCH))
    made = plan(replace(pool, spec=spec), Snapshot("p", 1e3, replicas), Memory.start(), 1e3)
    counts = {a.request_class: a.count for a in made.actions if isinstance(a, SetReplicas)}
    assert counts == ({} if count is None else {BATCH: count})


def test_a_reserved_place_is_made_free_by_the_usual_shrink(make_pool: Make) -> None:
    pool = _fleet_pool(make_pool, capacity=CapacityLimit(2))
    replicas = (ReplicaSnapshot("a", True), ReplicaSnapshot("b", True))
    snapshot = Snapshot("p", 1000.0, replicas, num_reserved=1)
    made = plan(pool, snapshot, Memory.start(), 1000.0)
    (action,) = [a for a in made.actions if isinstance(a, SetReplicas)]
    assert action.count == 1 and "its successor needs a place" in action.reason


def test_a_replica_that_starts_says_what_it_waits_for(make_pool: Make) -> None:
    starting = ReplicaSnapshot("b", False, phase=Phase.STARTING, detail="loads the model, 35 s")
    made = plan(make_pool(), Snapshot("p", 1000.0, (starting,)), Memory.start(), 1000.0)
    assert made.replicas[0].held == "loads the model, 35 s"
