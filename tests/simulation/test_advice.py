"""What a simulated run answers: made-up runs, each bad for one cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import parse_pool, with_overrides
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.advice import advice, is_missed, replicas_line, verdict
from chairlift_simulation.conditions import PoolResult
from chairlift_simulation.records import Journey, ReplicaState, SecondCounts, TickState
from chairlift_simulation.replica import VirtualRequest
from chairlift_simulation.summary import Summary

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet.yaml"
DURATION_S = 100.0


def pool_with(*settings: str) -> InferencePool:
    """1 to 3 interactive replicas of 4; 500 ms to a first token, 50 ms between two."""
    return with_overrides(parse_pool(EXAMPLE.read_text()), settings)


def journey(due_s: float, ttft_s: float = 0.1, num_late_gaps: int = 0) -> Journey:
    request = VirtualRequest(due_s, 100, 11, INTERACTIVE, "anonymous", ())
    return Journey(request, due_s + ttft_s, due_s + ttft_s + 1, 11, num_late_gaps, None)


def replica(
    name: str, *, starts: bool = False, batch_size: int = 16, running: int = 0, waiting: int = 0
) -> ReplicaState:
    return ReplicaState(
        name, INTERACTIVE, not starts, False, batch_size, num_running=running, num_waiting=waiting
    )


def run_of(journeys: Sequence[Journey], *replicas: Sequence[ReplicaState]) -> PoolResult:
    """A tick each 10 s; the last of replicas stays."""
    per_tick = [*replicas, *[replicas[-1]] * (10 - len(replicas))]
    ticks = tuple(TickState(10.0 * n, tuple(own), 0) for n, own in enumerate(per_tick))
    seconds = SecondCounts()
    seconds.reach(DURATION_S)
    seconds.gaps[0] = sum(j.num_gaps for j in journeys)
    seconds.late_gaps[0] = sum(j.num_late_gaps for j in journeys)
    return PoolResult(tuple(journeys), ticks, seconds, (), (), DURATION_S, 100.0, 0, 0)


LATE = [journey(due_s, 2.0) for due_s in (12.0, 14.0, 16.0, 18.0, 72.0)]
FULL = replica("a", running=16, waiting=9)
BATCH_PAIR = [ReplicaState(name, BATCH, True, False) for name in ("x", "y")]
ONE_FREE, ONE_FULL = [replica("a")], [FULL]


@pytest.mark.parametrize(
    ("settings", "journeys", "replicas", "trial"),
    [
        (
            [],
            LATE,
            [ONE_FREE, [FULL, replica("b", starts=True, batch_size=0)], [FULL, replica("b")]],
            "try --set interactive.replicas.min=2, as many as it came to have "
            "(80 % of bad requests: replicas were starting)",
        ),
        (
            [],
            LATE,
            [[replica("a", starts=True, batch_size=0)]],
            "try a shorter --warm-up, if replicas can start sooner "
            "(100 % of bad requests: replicas were starting)",
        ),
        (
            [],
            LATE,
            [ONE_FULL] * 5 + [[replica("a", batch_size=64)]],
            "begin on a pool that has served, or judge by a longer --duration "
            "(80 % of bad requests: the batch size had yet to grow)",
        ),
        (
            [],
            LATE,
            [ONE_FREE] * 5 + [[replica("a", batch_size=64)]],
            "try --set interactive.replicas.min=2, one more than it had, or a longer "
            "interactive.slo.timeToFirstToken.threshold "
            "(100 % of bad requests: prompts queued and no replica was asked for)",
        ),
        (
            [],
            LATE,
            [[replica("a"), replace(FULL, name="b", is_draining=True)]],
            "try --set interactive.replicas.min=2, one more than it had, or a longer "
            "interactive.slo.timeToFirstToken.threshold "
            "(100 % of bad requests: prompts queued and no replica was asked for)",
        ),
        (
            ["interactive.replicas.max=1"],
            LATE,
            [ONE_FULL],
            "try --set interactive.replicas.max=2 "
            "(100 % of bad requests: all replicas that may run did)",
        ),
        (
            ["interactive.replicas.max=3", "capacity.replicas=3"],
            LATE,
            [[FULL, replica("b"), replica("c")]],
            "try --set interactive.replicas.max=4 --set capacity.replicas=4 "
            "(100 % of bad requests: all replicas that may run did)",
        ),
        (
            ["capacity.replicas=2"],
            LATE,
            [[FULL, replica("b")]],
            "try --set capacity.replicas=3 (100 % of bad requests: all replicas that may run did)",
        ),
        (
            ["interactive.replicas.max=4", "capacity.replicas=4", "batch.replicas.min=2",
             "batch.replicas.max=2"],
            LATE,
            [[FULL, replica("b"), *BATCH_PAIR]],
            "try --set capacity.replicas=5 (100 % of bad requests: all replicas that may run did)",
        ),
        (
            ["interactive.replicas.max=2", "capacity.replicas=4", "batch.replicas.min=2",
             "batch.replicas.max=2"],
            LATE,
            [[FULL, replica("b"), *BATCH_PAIR]],
            "try --set interactive.replicas.max=3 --set capacity.replicas=5 "
            "(100 % of bad requests: all replicas that may run did)",
        ),
        (
            ["interactive.replicas.max=4", "capacity.replicas=4", "batch.replicas.max=2"],
            LATE,
            [[FULL, replica("b"), *BATCH_PAIR]],
            "try --set interactive.replicas.min=3, one more than it had, or a longer "
            "interactive.slo.timeToFirstToken.threshold "
            "(100 % of bad requests: every slot was taken and no replica was asked for)",
        ),
        (
            ["interactive.replicas.max=4", "capacity.replicas=4", "batch.replicas.min=2",
             "batch.replicas.max=2"],
            LATE,
            [ONE_FULL] * 5 + [[FULL, replica("b")]],
            "try a longer interactive.slo.timeToFirstToken.threshold "
            "(80 % of bad requests: every slot was taken and no replica was asked for)",
        ),
        (
            ["interactive.batchSize.max=16"],
            LATE,
            [ONE_FULL],
            "try --set interactive.batchSize.max=32, if memory allows it "
            "(100 % of bad requests: every slot was taken and no replica was asked for)",
        ),
        (
            [],
            LATE,
            [ONE_FULL],
            "try --set interactive.replicas.min=2, one more than it had, or a longer "
            "interactive.slo.timeToFirstToken.threshold "
            "(100 % of bad requests: every slot was taken and no replica was asked for)",
        ),
        (
            [],
            LATE,
            [ONE_FREE],
            "try --set interactive.replicas.min=2, one more than it had, or a longer "
            "interactive.slo.timeToFirstToken.threshold "
            "(100 % of bad requests: prompts queued and no replica was asked for)",
        ),
        (
            [],
            [journey(50.0, num_late_gaps=5), journey(60.0, num_late_gaps=5)],
            [ONE_FREE],
            "try a longer interactive.slo.interTokenLatency.threshold, or a faster --profile "
            "(100 % of bad requests: tokens came too slowly)",
        ),
    ],
    ids=["starting", "none ready", "ungrown", "free slots", "draining", "maximum",
         "maximum and capacity", "capacity", "beside batch work", "maximum beside batch work",
         "batch work gives way", "had all it may", "batch size", "slots", "prompts", "gaps"],
)  # fmt: skip
def test_the_cause_of_most_bad_requests_says_what_to_try(
    settings: list[str],
    journeys: list[Journey],
    replicas: list[list[ReplicaState]],
    trial: str,
) -> None:
    pool = pool_with(*settings)
    result = run_of(journeys, *replicas)
    assert is_missed(pool, Summary.of(pool, result, DURATION_S))
    told = list(advice(pool, result))
    assert [line for line in told if not line.startswith("nine in ten")][0] == trial


def test_a_cause_of_few_is_left_out_and_an_early_end_of_trouble_is_said() -> None:
    pool = pool_with()
    early = [journey(float(due_s), 2.0) for due_s in range(10, 19)]
    starts = [FULL, replica("b", starts=True, batch_size=0)]
    told = list(advice(pool, run_of([*early, journey(80.0, 2.0)], ONE_FREE, starts, ONE_FREE)))
    assert told[0] == "nine in ten bad requests came in the first 18 s"
    assert len(told) == 2 and "90 % of bad requests" in told[1]
    late = [journey(80.0 + n, 2.0) for n in range(10)]
    assert len(list(advice(pool, run_of(late, ONE_FREE)))) == 1


def test_objectives_are_told_with_what_was_wanted() -> None:
    pool = pool_with()
    slow = [journey(1.0, 2.0), journey(2.0), journey(3.0), journey(4.0)]
    summary = Summary.of(pool, run_of(slow, ONE_FREE), DURATION_S)
    assert verdict(pool, summary) == (
        "missed: first token 75.0 % within 500 ms (95 % wanted); "
        "met: gaps 100.0 % within 50 ms (95 % wanted)"
    )
    fine = Summary.of(pool, run_of(slow[1:], ONE_FREE), DURATION_S)
    assert not is_missed(pool, fine) and verdict(pool, fine).startswith("met: first token 100.0 %")
    one_token = journey(1.0)
    one_token.num_tokens = 1
    without_gaps = Summary.of(pool, run_of([one_token], ONE_FREE), DURATION_S)
    assert "gaps" not in verdict(pool, without_gaps) and not is_missed(pool, without_gaps)


def test_how_many_replicas_served_is_told_by_class() -> None:
    pool = pool_with()
    two = [replica("a"), replica("b"), replica("c", starts=True)]
    line = replicas_line(pool, run_of([], ONE_FREE, two).ticks)
    assert line == "interactive: 1 to 2 ready, 1.9 in the mean, 1 to 3 allowed"
    batch = ReplicaState("x", BATCH, True, False)
    line = replicas_line(pool, run_of([], [replica("a"), batch]).ticks)
    assert line.endswith("; batch: 1 to 1 ready, 1.0 in the mean, 0 to 3 allowed")
