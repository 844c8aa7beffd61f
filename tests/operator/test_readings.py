from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chairlift_operator.exposition import EngineSample
from chairlift_operator.readings import MIX_FINISHED, demand_of, failure_of
from chairlift_operator.snapshot import ReplicaSnapshot
from chairlift_operator.step_time import StepCosts
from chairlift_operator.windows import History


def _history(finished: float, running: float, prefilled: float, decoded: float) -> History:
    zero = {"step_seconds": 0.0, "num_steps": 0.0, "num_waiting": 0.0}
    first = EngineSample(
        **zero, step_decode_seqs=0, step_prefill_tokens=0, num_finished=0, num_running=0
    )
    last = EngineSample(
        **zero,
        step_decode_seqs=decoded,
        step_prefill_tokens=prefilled,
        num_finished=finished,
        num_running=running,
    )
    return History().with_sample(0, first).with_sample(60, last)


@pytest.mark.parametrize(
    ("finished", "running", "wanted"),
    [(MIX_FINISHED - 1, 0, None), (40, 0, 10.0), (40, 40, 5.0)],
)
def test_prefill_of_requests_still_decoding_is_not_held_against_the_mix(
    finished: float, running: float, wanted: float | None
) -> None:
    history = _history(finished, running, prefilled=4000, decoded=400)
    assert demand_of(history, ReplicaSnapshot("a", True), 60).prefill_per_decode == wanted


def test_context_is_memory_in_use_over_running_sequences(
    make_engine: Callable[..., Any],
) -> None:
    engine = make_engine(StepCosts(8e-3, 6e-5, 4.5e-5, 5e-8))
    history = History()
    for tick in range(1, 8):
        engine.run_until(5.0 * tick)
        history = history.with_sample(engine.now_s, engine.sample())
    context = demand_of(history, engine.snapshot(), engine.now_s).context_tokens
    assert context is not None and 400 < context < 2500


@pytest.mark.parametrize(
    ("sample", "sampled_at_s", "reason"),
    [
        (None, None, "no metrics were read"),
        (EngineSample(), 100.0, "series chairlift_step_seconds_total is absent"),
        (
            EngineSample(rejected=("chairlift_steps_total",)),
            100.0,
            "chairlift_steps_total is NaN, infinite or negative",
        ),
        (EngineSample(*[1.0] * 7), 60.0, "the last sample is 40 s old"),
        (EngineSample(*[1.0] * 7), 99.0, None),
    ],
)
def test_an_unusable_sample_says_which_series_is_to_blame(
    sample: EngineSample | None, sampled_at_s: float | None, reason: str | None
) -> None:
    seen = ReplicaSnapshot("a", True, sample=sample, sampled_at_s=sampled_at_s)
    assert failure_of(seen, 100.0) == reason
