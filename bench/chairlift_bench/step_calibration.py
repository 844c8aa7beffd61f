"""What one step costs on this machine, measured on the serving pool itself in under a minute.

Bursts of few and many streams, then of long prompts; between them the engine's own sums over steps
are read. T = a + b·decodes + c·prompt tokens is fitted to their differences by least squares. Knows
no objective; `rush` calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import aiohttp
import numpy as np

from chairlift_bench.load import Load, PlannedRequest
from chairlift_bench.outcomes import Outcome, percentile
from chairlift_operator.exposition import EngineSample, parse_engine_metrics
from chairlift_operator.step_time import StepCosts
from chairlift_protocol.wire import METRICS_PATH

SAMPLE_S: Final = 0.5
BURST_S: Final = 2.0
# A stream alone; more of them; and prompts, which arrive one upon another.
STREAMS: Final = (1, 4, 16)
PROMPT_CLIENTS: Final = 3
PROMPTS_S: Final = 2 * BURST_S
NUM_ROUNDS: Final = 2
STREAM_TOKENS: Final = 16
PROMPT_ANSWER_TOKENS: Final = 2
# Each burst also waits for its last requests, about a second.
TOTAL_S: Final = NUM_ROUNDS * (len(STREAMS) * (BURST_S + 1) + PROMPTS_S + 1)


class CalibrationFailed(Exception):
    """Nothing can be derived from what was measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Window:
    """Differences of an engine's sums between two readings."""

    step_s: float
    num_steps: float
    num_decodes: float
    prompt_tokens: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """costs: without a term for context, which these short ones do not show.

    gap_s: of a stream alone, as its client sees it. misfit: typical relative error of the fit.
    """

    costs: StepCosts
    gap_s: float
    misfit: float
    num_windows: int
    outcomes: tuple[Outcome, ...]


async def calibrate(
    engine_url: str,
    load: Callable[[], Load],
    questions: Iterator[PlannedRequest],
    long_prompts: Iterator[PlannedRequest],
) -> Calibration:
    """questions: short prompts for streams; long_prompts: what traffic looks like."""
    windows: list[Window] = []
    outcomes: list[Outcome] = []
    alone_s: list[float] = []
    streams = (replace(q, max_tokens=STREAM_TOKENS, exact_length=True) for q in questions)
    prompts = (replace(p, max_tokens=PROMPT_ANSWER_TOKENS, exact_length=True) for p in long_prompts)
    sampling = asyncio.create_task(_sample(engine_url, windows))
    try:
        for _ in range(NUM_ROUNDS):
            for num_clients in STREAMS:
                ended = await load().run_closed(streams, num_clients, BURST_S)
                outcomes += ended
                if num_clients == 1:
                    alone_s += [gap_s for outcome in ended for gap_s in outcome.gaps_s]
            outcomes += await load().run_closed(prompts, PROMPT_CLIENTS, PROMPTS_S)
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
    costs, misfit = fitted(windows)
    return Calibration(costs, percentile(alone_s, 50), misfit, len(windows), tuple(outcomes))


def fitted(windows: Sequence[Window]) -> tuple[StepCosts, float]:
    """Least squares on relative errors; a coefficient that comes out negative is none."""
    measured = np.array([w.step_s for w in windows])
    sums = np.array([[w.num_steps, w.num_decodes, w.prompt_tokens] for w in windows])
    if len(windows) < sums.shape[-1] + 2:
        raise CalibrationFailed(f"calibration: only {len(windows)} readings of the engine's sums")
    relative = sums / measured[:, None]
    used = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(relative[:, used], np.ones(len(windows)), rcond=None)
        if (found >= 0).all():
            break
        used.pop(int(found.argmin()))
    coefficients = np.zeros(3)
    coefficients[used] = found
    fixed_s, decode_s, prefill_s = (float(c) for c in coefficients)
    if fixed_s <= 0 or prefill_s <= 0:
        raise CalibrationFailed("calibration: step times do not grow with what a step carries")
    misfit = float(np.median(np.abs(relative @ coefficients - 1)))
    return StepCosts(fixed_s, decode_s, prefill_s, 0.0), misfit


async def _sample(engine_url: str, windows: list[Window]) -> None:
    """Append a window for every interval in which steps ran, until cancelled."""
    async with aiohttp.ClientSession(raise_for_status=True) as client:
        before: EngineSample | None = None
        while True:
            async with client.get(engine_url + METRICS_PATH) as response:
                now = parse_engine_metrics(await response.text())
            if before is not None and (window := _between(before, now)) is not None:
                windows.append(window)
            before = now
            await asyncio.sleep(SAMPLE_S)


def _between(before: EngineSample, now: EngineSample) -> Window | None:
    pairs = [
        (getattr(before, name), getattr(now, name))
        for name in ("step_seconds", "num_steps", "step_decode_seqs", "step_prefill_tokens")
    ]
    if any(old is None or new is None for old, new in pairs):
        return None
    step_s, num_steps, num_decodes, prompt_tokens = (new - old for old, new in pairs)
    if num_steps < 1 or step_s <= 0:
        return None
    return Window(step_s, num_steps, num_decodes, prompt_tokens)
