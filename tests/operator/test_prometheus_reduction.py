"""From Prometheus' answers to a pool's windows: every state, and what no spoilt answer may do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_operator.pool_windows import PoolWindows
from chairlift_operator.prometheus.attained import NotKnown, counted_buckets
from chairlift_operator.prometheus.batch import ENGINES, GATEWAYS, Batch, PoolPods
from chairlift_operator.prometheus.heartbeats import Pod
from chairlift_operator.prometheus.queries import WINDOWS, selector, window_queries
from chairlift_operator.prometheus.reduction import windows_of
from chairlift_operator.prometheus.series import Answer, AnswerError, Series, understood
from chairlift_operator.signals import Idle, Unknown, Value
from chairlift_protocol.wire import RequestClass

NOW_S = 10_000.0
SCRAPE_S = 15.0
INTERACTIVE = RequestClass.INTERACTIVE
THRESHOLDS_MS = {(INTERACTIVE, "itl"): 50.0, (INTERACTIVE, "ttft"): 1000.0}
ENGINE_PODS = ("chat-a", "chat-b")
GATEWAY_POD = "chat-gateway-a"
Answers = dict[str, list[Series]]


def pool_pods(*engines: str, ready_since_s: float = 0.0) -> PoolPods:
    return PoolPods(
        {INTERACTIVE: [Pod(("team", name), ready_since_s) for name in engines]},
        [Pod(("team", GATEWAY_POD), 0.0)],
        THRESHOLDS_MS,
    )


POOL = pool_pods(*ENGINE_PODS)


def series(pod: str, *values: float, newest_s: float = NOW_S - 5.0, **labels: str) -> Series:
    """One value, of now; several, a scrape apart, the last at newest_s."""
    known = {"namespace": "team", "pod": pod, "job": "pods", **labels}
    known = {name: value for name, value in known.items() if value}
    times_s = [newest_s - SCRAPE_S * back for back in reversed(range(len(values)))]
    return Series(known, tuple(zip(times_s, values, strict=True)))


def events(pod: str, objective: str, good: float, bad: float) -> list[Series]:
    threshold_ms = f"{THRESHOLDS_MS[INTERACTIVE, objective]:g}"
    return [
        series(pod, number, objective=objective, threshold_ms=threshold_ms, result=result,
               **{"class": "interactive"})
        for result, number in (("good", good), ("bad", bad))
    ]  # fmt: skip


def answers(good: float = 950.0, bad: float = 50.0, running: float = 3.0) -> Answers:
    """Two engines and a gateway, all well."""
    found: Answers = {
        ENGINES: [series(pod, running, running, running) for pod in ENGINE_PODS],
        GATEWAYS: [
            series(GATEWAY_POD, 0.0, rise, 2 * rise, **{"class": request_class})
            for request_class, rise in (("interactive", 30.0), ("batch", 0.0))
        ],
        "arrivalsPeak[1h]": [
            series(GATEWAY_POD, peak, **{"class": request_class})
            for request_class, peak in (("interactive", 4.0), ("batch", 0.0))
        ],
        "waitingPeak[5m]": [series(pod, 0.0) for pod in ENGINE_PODS],
        "kvPeak[5m]": [series(pod, 0.5) for pod in ENGINE_PODS],
    }
    for window in WINDOWS:
        found[f"sloEvents[{window}]"] = [
            one
            for pod in ENGINE_PODS
            for objective in ("itl", "ttft")
            for one in events(pod, objective, good, bad)
        ]
        found[f"steps[{window}]"] = [series(pod, 5000.0) for pod in ENGINE_PODS]
    return found


def batch_of(found: Mapping[str, list[Series]], failed: Mapping[str, str] | None = None) -> Batch:
    told = {name: Answer(name, tuple(known)) for name, known in found.items()}
    told |= {name: Answer(name, failure=failure) for name, failure in (failed or {}).items()}
    return Batch(NOW_S, told)


def test_the_fixture_asks_what_is_asked() -> None:
    assert answers().keys() == window_queries(selector(["team"]), SCRAPE_S).keys()


def test_all_is_known_of_a_pool_that_is_well() -> None:
    windows = windows_of(batch_of(answers()), POOL)
    assert windows.is_known and windows.num_rejected == 0
    assert {(s.name, s.signal) for s in windows.shares} == {
        (name, Value(95.0, NOW_S - 5.0, f"Prometheus: sloEvents[{window}]"))
        for window in WINDOWS
        for name in (
            f"interactive/interTokenLatency.goodPercent[{window}]",
            f"interactive/timeToFirstToken.goodPercent[{window}]",
        )
    }
    values = {q.name: q.signal for q in windows.quantities}
    assert values["interactive/arrivals"] == Value(2.0, NOW_S - 5.0, "Prometheus: received")
    assert isinstance(values["batch/arrivals"], Idle)
    assert values["interactive/kvPeak[5m]"] == Value(0.5, NOW_S - 5.0, "Prometheus: kvPeak[5m]")


@given(st.floats(1e-3, 1e12))
def test_nothing_bad_is_a_hundred_percent_to_the_last_digit(good: float) -> None:
    """Increases are extrapolated, so they are any number: 100 * 0.07 / 0.07 is more than 100."""
    windows = windows_of(batch_of(answers(good, bad=0.0)), POOL)
    values = [s.signal.value for s in windows.shares if isinstance(s.signal, Value)]
    assert set(values) <= {100.0}
    assert values or good < 1


def test_gaps_count_as_steps_and_first_tokens_as_themselves() -> None:
    found = answers(good=950.0, bad=50.0)
    found["steps[5m]"] = [series(pod, 20.0) for pod in ENGINE_PODS]
    gaps, _, first, _ = windows_of(batch_of(found), POOL).shares
    assert gaps.num_events == first.num_events == 2000
    assert gaps.bad_upper - gaps.bad_lower > 3 * (first.bad_upper - first.bad_lower)
    del found["steps[5m]"][:]  # an engine that counts none: as many gaps a step as requests run
    without = windows_of(batch_of(found), POOL).shares[0]
    assert gaps.bad_lower < without.bad_lower < first.bad_lower


Spoil = Callable[[Answers], None]


def _replaced(query: str, pod: str, value: float) -> Spoil:
    def spoil(found: Answers) -> None:
        found[query] = [
            replace(s, points=(*s.points[:-1], (s.points[-1][0], value)))
            if s.pod[1] == pod else s
            for s in found[query]
        ]  # fmt: skip

    return spoil


def _without(query: str, *pods: str) -> Spoil:
    def spoil(found: Answers) -> None:
        found[query] = [s for s in found[query] if s.pod[1] not in pods]

    return spoil


def _unlabelled(query: str, label: str) -> Spoil:
    def spoil(found: Answers) -> None:
        found[query] = [
            replace(s, labels={n: v for n, v in s.labels.items() if n != label})
            for s in found[query]
        ]

    return spoil


def _aged(query: str, pod: str, by_s: float) -> Spoil:
    def spoil(found: Answers) -> None:
        found[query] = [
            replace(s, points=tuple((at_s - by_s, v) for at_s, v in s.points))
            if s.pod[1] == pod else s
            for s in found[query]
        ]  # fmt: skip

    return spoil


@pytest.mark.parametrize(
    ("spoil", "reason", "said"),
    [
        (_without(ENGINES, *ENGINE_PODS), "SeriesMissing", "chat-a: no sample in the last 150 s"),
        (_without(ENGINES, "chat-b"), "Partial", "1 of 2 Ready engines are seen; chat-b: no sam"),
        (_aged(ENGINES, "chat-a", 60.0), "Partial", "chat-a: its last sample is 65 s old"),
        (_replaced(ENGINES, "chat-a", math.nan), "NotANumber", "of chat-a is NaN, negative or"),
        (_replaced("sloEvents[5m]", "chat-a", math.inf), "NotANumber", "chairlift_slo_events_tot"),
        (_replaced("sloEvents[1h]", "chat-b", -3.0), "NotANumber", "chat-b: chairlift_slo_events"),
        (_replaced("steps[5m]", "chat-b", math.nan), "NotANumber", "chat-b: chairlift_steps_tota"),
        (_without("sloEvents[5m]", "chat-a"), "SeriesMissing", "series chairlift_slo_events_tota"),
        (_unlabelled("sloEvents[5m]", "class"), "LabelMissing", "label class is absent from cha"),
        (_unlabelled("sloEvents[1h]", "objective"), "LabelMissing", "label objective is absent f"),
        (_unlabelled(GATEWAYS, "class"), "LabelMissing", "label class is absent, query received"),
        (_unlabelled(ENGINES, "namespace"), "SeriesMissing", "chat-a: no sample in the last 150"),
        (_without(GATEWAYS, GATEWAY_POD), "SeriesMissing", "chat-gateway-a: no sample in the la"),
        (_replaced("kvPeak[5m]", "chat-b", math.nan), "NotANumber", "chat-b: kvPeak[5m] is NaN"),
        (_without("waitingPeak[5m]", "chat-b"), "SeriesMissing", "query waitingPeak[5m] finds no"),
    ],
)  # fmt: skip
def test_what_is_not_whole_is_unknown_and_says_what_to_look_after(
    spoil: Spoil, reason: str, said: str
) -> None:
    """O3, O4, O7: an absence, a number that is none, a label that is not there."""
    found = answers()
    spoil(found)
    windows = windows_of(batch_of(found), POOL)
    assert windows.trouble is not None
    assert windows.trouble.reason == reason
    assert said in windows.trouble.message
    assert not windows.is_known
    assert (windows.num_rejected > 0) is (reason == "NotANumber")


@pytest.mark.parametrize("query", sorted(answers()))
def test_a_query_that_failed_is_named_by_the_signals_that_it_leaves_unknown(query: str) -> None:
    """O1."""
    windows = windows_of(batch_of(answers(), {query: "no answer within 15 s"}), POOL)
    assert windows.trouble is not None
    assert windows.trouble.message == f"Prometheus, query {query}: no answer within 15 s"
    signals = [s.signal for s in (*windows.shares, *windows.quantities)]
    unknown = [s for s in signals if isinstance(s, Unknown)]
    assert unknown and {s.reason for s in unknown} == {windows.trouble.message}
    if query not in (ENGINES, GATEWAYS):
        assert len(unknown) < len(signals)  # the others are read


def test_no_event_beside_fresh_gauges_is_rest() -> None:
    """O2."""
    windows = windows_of(batch_of(answers(0.0, 0.0, running=0.0)), POOL)
    assert all(isinstance(s.signal, Idle) for s in windows.shares)
    assert windows.is_known


def test_no_gap_while_requests_run_is_no_rest() -> None:
    windows = windows_of(batch_of(answers(0.0, 0.0, running=1.0)), POOL)
    assert isinstance(windows.shares[0].signal, Unknown)
    assert windows.trouble is not None and windows.trouble.reason == "Stalled"


def test_a_pod_counts_from_its_second_scrape_and_is_missed_only_later() -> None:
    young = PoolPods(
        {INTERACTIVE: [*POOL.engines[INTERACTIVE], Pod(("team", "chat-new"), NOW_S - 20.0)]},
        POOL.gateways,
        THRESHOLDS_MS,
    )
    assert windows_of(batch_of(answers()), young) == windows_of(batch_of(answers()), POOL)
    found = answers()
    found[ENGINES].append(series("chat-new", 1.0))
    assert windows_of(batch_of(found), young).is_known
    grown = replace(
        young, engines={INTERACTIVE: [*POOL.engines[INTERACTIVE], Pod(("team", "chat-new"), 0.0)]}
    )
    windows = windows_of(batch_of(answers()), grown)
    assert windows.trouble is not None and windows.trouble.reason == "Partial"


def test_nothing_asked_yet_is_nothing_known() -> None:
    windows = windows_of(Batch(NOW_S), POOL)
    assert windows.trouble is not None
    assert windows.trouble.message == "Prometheus, query running: it has not been asked yet"
    assert windows.trouble.is_passing
    assert all(isinstance(s.signal, Unknown) for s in windows.shares)


@given(
    strangers=st.lists(
        st.tuples(
            st.sampled_from(sorted(answers())),
            st.sampled_from(["chat-gone", "chat-c", "other"]),
            st.floats(allow_nan=True, allow_infinity=True),
            st.sampled_from(["team", "elsewhere", ""]),
        ),
        max_size=20,
    )
)
def test_series_of_pods_that_are_not_ready_ones_of_the_pool_change_nothing(
    strangers: list[tuple[str, str, float, str]],
) -> None:
    """O6, O8: deleted pods, and pods of the same name in another namespace."""
    found = answers()
    for query, pod, value, namespace in strangers:
        name = "chat-a" if namespace == "elsewhere" else pod
        found[query].append(series(name, value, value, namespace=namespace))
    assert windows_of(batch_of(found), POOL) == windows_of(batch_of(answers()), POOL)


SPOILT = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 1e300])


@given(data=st.data())
def test_a_spoilt_answer_leaves_signals_as_they_were_or_unknown(data: st.DataObject) -> None:
    found = answers()
    query = data.draw(st.sampled_from(sorted(found)))
    kind = data.draw(st.sampled_from(["fail", "empty", "drop", "spoil", "age", "unlabel"]))
    failed = {}
    pod = data.draw(st.sampled_from([*ENGINE_PODS, GATEWAY_POD]))
    if kind == "fail":
        failed = {query: "timed out"}
    elif kind == "empty":
        found[query] = []
    elif kind == "drop":
        _without(query, pod)(found)
    elif kind == "spoil":
        _replaced(query, pod, data.draw(SPOILT))(found)
    elif kind == "age":
        _aged(query, pod, data.draw(st.floats(60.0, 1e6)))(found)
    else:
        label = data.draw(st.sampled_from(["namespace", "pod", "class", "objective", "result"]))
        _unlabelled(query, label)(found)
    well, spoilt = windows_of(batch_of(answers()), POOL), windows_of(batch_of(found, failed), POOL)
    _assert_no_worse_news(well, spoilt, query)


def _assert_no_worse_news(well: PoolWindows, spoilt: PoolWindows, query: str) -> None:
    before = [*well.shares, *well.quantities]
    after = [*spoilt.shares, *spoilt.quantities]
    assert [s.name for s in before] == [s.name for s in after]
    for one, other in zip(before, after, strict=True):
        is_steps = query.startswith("steps")  # these only say how certain a share is
        assert isinstance(other.signal, Unknown) or is_steps or one.signal == other.signal
        if isinstance(other.signal, Value):
            assert 0 <= other.signal.value < 1e16


@given(
    times_ms=st.lists(st.floats(0.1, 9_000), min_size=1, max_size=60),
    boundaries_ms=st.sets(st.floats(1, 8_000), min_size=1, max_size=8),
    threshold_ms=st.floats(0.5, 10_000),
)
def test_buckets_bound_the_true_share_and_tell_it_at_a_boundary(
    times_ms: list[float], boundaries_ms: set[float], threshold_ms: float
) -> None:
    def told(boundaries: set[float]) -> Any:
        buckets = [
            series("a", float(sum(1e-3 * t <= b for t in times_ms)), le=f"{b!r}")
            for b in {1e-3 * b for b in boundaries} | {math.inf}
        ]
        return counted_buckets(buckets, "x", threshold_ms)

    counted = told(boundaries_ms)
    num_bad = sum(t > threshold_ms for t in times_ms)
    assert counted.num_bad_least <= num_bad <= counted.num_bad_most
    assert counted.num_bad_least <= counted.num_bad <= counted.num_bad_most
    assert counted.total == len(times_ms)


@pytest.mark.parametrize("spelling", ["1", "1.0", "1e0", "1.00"])
def test_a_boundary_is_a_number_and_not_a_spelling(spelling: str) -> None:
    buckets = [series("a", n, le=le) for le, n in ((spelling, 90.0), ("+Inf", 100.0))]
    counted = counted_buckets(buckets, "x", 1000.0)
    assert (counted.num_good, counted.num_bad, counted.boundary_ms) == (90.0, 10.0, 1000.0)
    assert counted.num_bad_least == counted.num_bad_most == 10.0


@pytest.mark.parametrize(
    ("buckets", "said"),
    [
        ((), "series x_bucket has no two samples"),
        ((("1", 3.0),), "bucket le=+Inf, or any other, is absent from x_bucket"),
        ((("+Inf", 3.0),), "bucket le=+Inf, or any other, is absent from x_bucket"),
        ((("", 3.0), ("+Inf", 3.0)), "label le is absent from x_bucket"),
        ((("one", 3.0), ("+Inf", 3.0)), "label le of x_bucket is no number"),
        ((("nan", 3.0), ("+Inf", 3.0)), "label le of x_bucket is no number"),
        ((("1", 30.0), ("+Inf", 3.0)), "the buckets of x do not add up"),
        ((("1", math.nan), ("+Inf", 3.0)), "x_bucket is NaN, negative or absurdly large"),
    ],
)
def test_buckets_that_cannot_be_read_say_why(
    buckets: tuple[tuple[str, float], ...], said: str
) -> None:
    with pytest.raises(NotKnown, match=said.replace("+", r"\+")):
        counted_buckets([series("a", n, le=le) for le, n in buckets], "x", 1000.0)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "no JSON object"),
        ({"status": "error", "errorType": "bad_data", "error": "parse error"}, "bad_data: parse"),
        ({"message": "not found"}, "no answer of Prometheus"),
        ({"status": "success", "data": {"resultType": "scalar", "result": [1, "1"]}}, "a scalar"),
        ({"status": "success", "data": {}}, "lacks or garbles"),
        ({"status": "success", "data": {"resultType": "vector", "result": [{}]}}, "lacks or garb"),
        (
            {
                "status": "success",
                "warnings": ["store b did not answer"],
                "data": {"resultType": "vector", "result": []},
            },
            "the answer is partial: store b",
        ),
    ],
)  # fmt: skip
def test_an_answer_that_is_not_whole_is_none(body: object, said: str) -> None:
    with pytest.raises(AnswerError, match=said):
        understood("q", body)


def test_names_are_matched_as_they_are_and_whole() -> None:
    where = selector(["a.b", "team"], ["chat-a"])
    assert where == 'namespace=~"a\\\\.b|team", pod=~"chat\\\\-a"'
