"""The query layer against a real Prometheus: what is asked is what it answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from chairlift_operator.kube.polling import PrometheusReader
from chairlift_operator.pool_windows import PoolWindows
from chairlift_operator.prometheus.asking import PrometheusClient
from chairlift_operator.prometheus.samples import PodSeries
from chairlift_operator.signals import Idle, Signal, Unknown, Value
from chairlift_protocol import metrics
from chairlift_protocol.wire import RequestClass

World = Any  # conftest's


def eventually(what: str, probe: Callable[[], Any], timeout_s: float = 15.0) -> Any:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if found := probe():
            return found
        time.sleep(0.2)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


def share(windows: PoolWindows, objective: str = "itl", window_s: float = 300.0) -> Signal:
    (found,) = [
        s.signal for s in windows.shares if (s.objective, s.window_s) == (objective, window_s)
    ]
    return found


def quantity(windows: PoolWindows, name: str) -> Signal:
    (found,) = [q.signal for q in windows.quantities if q.name == name]
    return found


def has_values(windows: PoolWindows) -> bool:
    return all(isinstance(s.signal, Value) for s in windows.shares)


def percent(windows: PoolWindows) -> float:
    signal = share(windows)
    assert isinstance(signal, Value), signal
    return signal.value


def reason(windows: PoolWindows) -> str | None:
    return windows.trouble.reason if windows.trouble else None


def test_attainment_peaks_and_arrivals_come_in_one_batch(world: World) -> None:
    team, (one, gateway) = world.cluster.namespace("chat-a", "chat-b")
    one.serve_gaps(80.0, 20.0)
    gateway.serve_arrivals(5.0)

    def read() -> PoolWindows:
        return world.windows(team, "chat-a", gateways=("chat-b",))

    windows = world.until(read, lambda w: has_values(w) and w.is_known)
    assert percent(windows) == pytest.approx(80.0, abs=2.0)
    first = share(windows, "ttft", 3600.0)
    assert isinstance(first, Value) and first.value == 100.0
    assert first.source == "Prometheus: sloEvents[1h]"
    assert first.observed_at_s == share(windows).observed_at_s
    waiting, kv = (quantity(windows, f"interactive/{n}[5m]") for n in ("waitingPeak", "kvPeak"))
    assert isinstance(waiting, Value) and waiting.value == 2.0
    assert isinstance(kv, Value) and kv.value == 0.25
    arrivals = quantity(windows, "interactive/arrivals")
    assert isinstance(arrivals, Value) and arrivals.value == pytest.approx(5.0, rel=0.2)
    assert isinstance(quantity(windows, "batch/arrivals"), Idle)


def test_a_sample_is_dated_by_its_scrape_and_not_by_the_question(world: World) -> None:
    team, (engine,) = world.cluster.namespace("chat-a")
    engine.serve_gaps(10.0, 0.0)
    world.until(lambda: world.windows(team, "chat-a"), has_values)
    begin_s = time.time()
    dates_s: list[float | None] = []

    def dated() -> list[float | None]:
        dates_s.append(share(world.windows(team, "chat-a")).observed_at_s)
        return dates_s

    eventually("two questions find one scrape", lambda: len(dated()) > len(set(dates_s)))
    eventually("a later one is found", lambda: len(set(dated())) > 1)
    assert all(at_s and begin_s - 3.0 <= at_s <= time.time() for at_s in dates_s)


def test_eight_processes_of_a_pod_count_as_one_pod(world: World) -> None:
    """O10."""
    team, (many, one) = world.cluster.namespace("chat-a", "chat-b")
    for pid in range(8):
        many.serve_gaps(10.0, 0.0, f'pid="{pid}",')
    one.serve_gaps(0.0, 80.0)
    windows = world.until(
        lambda: world.windows(team, "chat-a", "chat-b"),
        lambda w: has_values(w) and abs(percent(w) - 50) < 5,
    )
    waiting = quantity(windows, "interactive/waitingPeak[5m]")
    assert isinstance(waiting, Value) and waiting.value == 8 * 2 + 2
    kv = quantity(windows, "interactive/kvPeak[5m]")
    assert isinstance(kv, Value) and kv.value == pytest.approx(0.25)


def test_one_model_in_two_namespaces_is_two_pools(world: World) -> None:
    """O8: pods may even have the same names."""
    one_team, (one,) = world.cluster.namespace("chat-a")
    other_team, (other,) = world.cluster.namespace("chat-a")
    one.serve_gaps(100.0, 0.0)
    other.serve_gaps(0.0, 100.0)
    good = world.until(lambda: world.windows(one_team, "chat-a"), has_values)
    bad = world.until(lambda: world.windows(other_team, "chat-a"), has_values)
    assert (percent(good), percent(bad)) == (100.0, 0.0)


def test_a_deleted_pod_is_out_while_its_series_are_still_found(world: World) -> None:
    """O6."""
    team, (kept, gone) = world.cluster.namespace("chat-a", "chat-b")
    kept.serve_gaps(100.0, 0.0)
    gone.serve_gaps(0.0, 100.0)
    world.until(
        lambda: world.windows(team, "chat-a", "chat-b"),
        lambda windows: has_values(windows) and 20.0 < percent(windows) < 80.0,
    )
    world.cluster.forget(gone)
    for _ in range(3):
        assert percent(world.windows(team, "chat-a")) == 100.0
        time.sleep(0.5)


def test_two_jobs_that_scrape_one_pod_do_not_count_it_twice(world: World) -> None:
    team, (twice, once) = world.cluster.namespace("chat-a", "chat-b")
    twice.serve_gaps(100.0, 0.0)
    once.serve_gaps(0.0, 100.0)
    world.cluster.pod(team, "chat-a", job="monitored")
    world.until(lambda: world.windows(team, "chat-a", "chat-b"), has_values)
    eventually(
        "the other job scrapes it too",
        lambda: len(world.query(f'up{{namespace="{team}", pod="chat-a"}}')) == 2,
    )
    windows = world.until(
        lambda: world.windows(team, "chat-a", "chat-b"),
        lambda w: has_values(w) and abs(percent(w) - 50) < 5,
    )
    waiting = quantity(windows, "interactive/waitingPeak[5m]")
    assert isinstance(waiting, Value) and waiting.value == 4.0


def test_a_target_that_is_down_makes_the_pool_partly_known(world: World) -> None:
    team, (well, failing) = world.cluster.namespace("chat-a", "chat-b")
    well.serve_gaps(100.0, 0.0)
    failing.serve_gaps(100.0, 0.0)
    world.until(lambda: world.windows(team, "chat-a", "chat-b"), has_values)
    failing.is_down = True
    windows = world.until(
        lambda: world.windows(team, "chat-a", "chat-b"), lambda w: reason(w) == "Partial"
    )
    assert windows.trouble is not None
    assert windows.trouble.message == (
        "1 of 2 Ready engines are seen; chat-b: Prometheus cannot scrape it (up is 0)"
    )
    assert isinstance(share(windows), Unknown)
    failing.is_down = False
    world.until(lambda: world.windows(team, "chat-a", "chat-b"), has_values)


def test_a_counter_that_begins_anew_is_no_negative_rate(world: World) -> None:
    team, (engine,) = world.cluster.namespace("chat-a")
    engine.born_s -= 10_000  # a million good events already
    engine.serve_gaps(90.0, 10.0)
    world.until(lambda: world.windows(team, "chat-a"), has_values)
    engine.restart()
    end_s = time.monotonic() + 4.0
    while time.monotonic() < end_s:
        signal = share(world.windows(team, "chat-a"))
        assert isinstance(signal, Value) and 80.0 <= signal.value <= 100.0
        time.sleep(0.5)


@pytest.mark.parametrize(
    ("labels", "missing"), [({"namespace": "nolabel"}, "pod"), ({"pod": "chat-a"}, "namespace")]
)
def test_a_label_that_a_scrape_configuration_leaves_out_is_named(
    own_world: World, labels: dict[str, str], missing: str
) -> None:
    """O7."""
    own_world.cluster.pod("nolabel", "chat-a", labels=labels).serve_gaps(10.0, 0.0)
    windows = own_world.until(
        lambda: own_world.windows("nolabel", "chat-a"), lambda w: reason(w) == "LabelMissing"
    )
    assert windows.trouble is not None
    assert f"label {missing} is absent from series vllm:num_requests_running" in (
        windows.trouble.message
    )
    assert all(isinstance(s.signal, Unknown) for s in windows.shares)


def test_a_pod_that_nobody_scrapes_is_told_from_one_that_exposes_nothing(world: World) -> None:
    team, (silent,) = world.cluster.namespace("chat-a")
    silent.series["something_else"] = 1.0

    def told(name: str) -> str | None:
        return reason(world.windows(team, name))

    world.until(lambda: world.windows(team, "chat-a"), lambda w: reason(w) == "SeriesMissing")
    assert told("chat-c") == "NoTarget"


def test_no_event_is_rest_and_no_counter_is_not(world: World) -> None:
    """O2 and O7."""
    team, (idle, mute) = world.cluster.namespace("chat-a", "chat-b")
    for engine in (idle, mute):
        engine.serve_gaps(0.0, 0.0)
        engine.series[f"{metrics.NUM_REQUESTS_RUNNING}{{}}"] = 0.0
        engine.series[f"{metrics.NUM_REQUESTS_WAITING}{{}}"] = 0.0
        for name in [n for n in engine.series if 'objective="ttft"' in n]:
            engine.series[name] = 0.0
    mute.series = {n: v for n, v in mute.series.items() if metrics.SLO_EVENTS not in n}
    rest = world.until(
        lambda: world.windows(team, "chat-a"),
        lambda w: all(isinstance(s.signal, Idle) for s in w.shares),
    )
    assert reason(rest) == "NotYetScraped"  # of its gateways, of which it has none
    unknown = world.until(
        lambda: world.windows(team, "chat-b"), lambda w: reason(w) == "SeriesMissing"
    )
    assert all(isinstance(s.signal, Unknown) for s in unknown.shares)


def test_an_engine_that_hangs_is_not_taken_for_one_at_rest(world: World) -> None:
    team, (engine,) = world.cluster.namespace("chat-a")
    engine.serve_gaps(0.0, 0.0)
    windows = world.until(lambda: world.windows(team, "chat-a"), lambda w: reason(w) == "Stalled")
    assert isinstance(share(windows), Unknown)


@pytest.mark.parametrize("bad", ["NaN", "+Inf", "-1"])
@pytest.mark.parametrize("name", [metrics.NUM_REQUESTS_RUNNING, metrics.KV_CACHE_USAGE])
def test_a_gauge_that_is_no_number_is_rejected_and_counted(
    world: World, name: str, bad: str
) -> None:
    """O4."""
    team, (engine,) = world.cluster.namespace("chat-a")
    engine.serve_gaps(10.0, 0.0)
    world.until(lambda: world.windows(team, "chat-a"), has_values)
    engine.series[f"{name}{{}}"] = float(bad)
    windows = world.until(
        lambda: world.windows(team, "chat-a"), lambda w: reason(w) == "NotANumber"
    )
    assert windows.num_rejected > 0
    assert not windows.is_known


@pytest.mark.parametrize("spelling", ["1.0", "1"])
def test_histograms_tell_at_the_threshold_however_it_is_spelled(
    world: World, spelling: str
) -> None:
    team, (engine,) = world.cluster.namespace("chat-a")
    engine.serve_gaps(10.0, 0.0)
    engine.series = {n: v for n, v in engine.series.items() if metrics.SLO_EVENTS not in n}
    for le, rate in (("0.5", 50.0), (spelling, 90.0), ("2.5", 95.0), ("+Inf", 100.0)):
        engine.series[f'{metrics.TTFT_SECONDS}_bucket{{le="{le}"}}'] = engine.per_s(rate)
    for le, rate in (("0.025", 50.0), ("0.1", 90.0), ("+Inf", 100.0)):
        engine.series[f'{metrics.INTER_TOKEN_LATENCY_SECONDS}_bucket{{le="{le}"}}'] = engine.per_s(
            rate
        )
    windows = world.until(lambda: world.windows(team, "chat-a"), has_values)
    first, gaps = (
        next(s for s in windows.shares if s.objective == o and s.window_s == 300.0)
        for o in ("ttft", "itl")
    )
    assert isinstance(first.signal, Value) and first.signal.value == pytest.approx(90, abs=2)
    assert first.boundary_ms == 1000.0
    assert first.signal.source == "Prometheus: ttftBuckets[5m]"
    # 50 ms is no boundary: the share lies between that of 25 and that of 100 ms.
    assert gaps.boundary_ms == 25.0
    assert isinstance(gaps.signal, Value) and gaps.signal.value == pytest.approx(50, abs=4)
    assert gaps.bad_lower < 0.12 and gaps.bad_upper > 0.48


def test_an_outage_is_named_and_what_was_lost_is_not_zero(own_world: World) -> None:
    """O1 and O3: an error, then a Prometheus that has forgotten everything."""
    own_world.cluster.pod("lost", "chat-a").serve_gaps(10.0, 0.0)
    own_world.until(lambda: own_world.windows("lost", "chat-a"), has_values)
    own_world.server.stop()
    windows = own_world.windows("lost", "chat-a")
    assert reason(windows) == "QueryFailed"
    assert windows.trouble is not None
    assert windows.trouble.message.startswith("Prometheus, query running: Cannot connect")
    own_world.server.lose_data()
    own_world.server.start()
    seen = []

    def read() -> PoolWindows:
        seen.append(own_world.windows("lost", "chat-a"))
        return seen[-1]

    own_world.until(read, has_values)
    for windows in seen[:-1]:
        assert not any(isinstance(s.signal, Idle) for s in windows.shares)
        assert not windows.is_known


def test_a_query_that_takes_too_long_has_no_answer(world: World) -> None:
    eventually("there is something to count", lambda: world.query("up"))
    heavy = "count_over_time(max_over_time(up[1h])[1h:1ms])"

    async def ask(reader: PrometheusReader) -> Any:
        client: PrometheusClient = reader._client
        queries = {"heavy": heavy, "light": "vector(1)", "wrong": "sum(("}
        return await client.ask(queries, time.time(), 0.5)

    answers = world.run(ask)
    assert answers["light"].failure is None
    failure = answers["heavy"].failure
    assert failure is not None and ("timed out" in failure or "no answer within" in failure)
    assert "parse error" in answers["wrong"].failure


def test_a_pod_out_of_reach_is_read_from_its_last_scrape(world: World) -> None:
    team, (engine, door) = world.cluster.namespace("chat-a", "chat-b")
    engine.serve_gaps(10.0, 0.0)
    engine.series[f"{metrics.NUM_REQUESTS_RUNNING}{{}}"] = float("nan")
    engine.series[f'{metrics.POLICY_GENERATION}{{part="term"}}'] = 3
    engine.series[f'{metrics.POLICY_GENERATION}{{part="counter"}}'] = 9
    door.serve_arrivals(50.0)
    pods = ((team, "chat-a"), (team, "chat-b"))

    async def read(reader: PrometheusReader) -> list[PodSeries | str]:
        for pod in pods:
            reader.sample(pod)
        await reader.poll_samples()
        return [reader.sample(pod) for pod in pods]

    def is_told() -> list[PodSeries | str] | None:
        latest = world.run(read)
        is_whole = all(isinstance(told, PodSeries) for told in latest)
        return latest if is_whole and latest[0].engine().policy_generation else None

    told, gateway = eventually("both were scraped as they are now", is_told)
    assert isinstance(told, PodSeries) and isinstance(gateway, PodSeries)
    assert time.time() - 3.0 <= told.at_s <= time.time()
    sample = told.engine()
    assert sample.num_running is None
    assert sample.rejected == (metrics.NUM_REQUESTS_RUNNING,)
    assert sample.policy_generation is not None and sample.policy_generation.counter == 9
    count = sample.slo_count("itl", 50.0, "interactive")
    # What it was when it was scraped, to the instant.
    assert count is not None and count.num_good == pytest.approx(
        10.0 * (told.at_s - engine.born_s), abs=1.0
    )
    arrivals = gateway.gateway()
    assert arrivals is not None
    received = {c.request_class: c.num_received for c in arrivals}
    assert received[RequestClass.INTERACTIVE] > 0
    engine.is_down = True
    at_s = told.at_s
    time.sleep(2.5)
    later = world.run(read)[0]
    assert isinstance(later, str) or later.at_s <= at_s + 1.5
