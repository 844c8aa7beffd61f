"""Before the first run: measure this machine, derive objectives and load, choose static's best.

Everything that is the same for all runs is made here, once. `rush` and `bench_demo` call it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from chairlift_bench import rush_formula, step_calibration
from chairlift_bench.arrivals import read_arrivals, with_lengths_divided
from chairlift_bench.load import Load, PlannedRequest
from chairlift_bench.local_server import engine_url, local_server
from chairlift_bench.prompts import PromptBook
from chairlift_bench.rush_formula import Phase
from chairlift_bench.rush_load import (
    CALIBRATION_FIRST_SEED,
    Candidate,
    RushLoad,
    StaticChoice,
    backlog_prompts,
    best_static,
    counted,
    prompted,
    rush_load,
)
from chairlift_bench.rush_run import RunKind, Say, settings_of
from chairlift_bench.step_calibration import Calibration
from chairlift_cli.pool_file import read_pool
from chairlift_operator.spec import InferencePool
from chairlift_protocol.wire import TOKENIZE_PATH

QUESTION: Final = "Why does a chairlift never wait to fill up?"
ANSWER_TOKENS: Final = 60
NUM_CANDIDATES: Final = 600
NUM_CALIBRATION_PROMPTS: Final = 200


@dataclass(frozen=True, slots=True)
class RushPlan:
    """requests_per_s: the capacity inside the objectives, in requests like those of the rush.

    pool: as written by the user; `settings` adds what a run needs.
    """

    pool_file: Path
    pool: InferencePool
    given_settings: tuple[str, ...]
    calibration: Calibration
    load: RushLoad
    static: StaticChoice
    requests_per_s: float
    answer: str

    def settings(self, kind: RunKind) -> list[str]:
        own = settings_of(kind, self.load.slo, self.static.batch_size)
        return [*self.given_settings, *own]

    def to_json(self) -> dict[str, Any]:
        costs = asdict(self.calibration.costs)
        return {
            "step_costs": costs,
            "single_stream_gap_s": self.calibration.gap_s,
            "misfit": self.calibration.misfit,
            "objectives": asdict(self.load.slo),
            "capacity_requests_per_s": self.requests_per_s,
            "phases": [
                {**asdict(phase), "requests_per_s": self.load.requests_per_s(phase)}
                for phase in self.load.phases
            ],
            "num_requests": len(self.load.requests),
            "static": asdict(self.static),
        }


async def make_plan(
    pool_file: Path,
    settings: Sequence[str],
    phases: tuple[Phase, ...],
    folder: Path,
    say: Say,
) -> RushPlan:
    """folder: where calibration leaves its logs and journal."""
    pool = read_pool(pool_file, settings)
    calibrating = [*settings, "mode=Recommend"]
    run_dir, journal = folder / "calibration", folder / "calibration.journal.jsonl"
    journal.unlink(missing_ok=True)
    async with local_server(pool_file, journal, say, calibrating, run_dir) as url:
        answer = await _ask(url, pool, say)
        candidates, backlog, training = await _prompts(url, pool)
        say(f"measuring this machine for about {step_calibration.TOTAL_S:.0f} s …")
        calibration = await step_calibration.calibrate(
            engine_url(run_dir),
            _loads(url, pool),
            itertools.cycle([c.planned() for c in backlog]),
            itertools.cycle([c.planned() for c in training]),
        )
    load = rush_load(calibration.costs, candidates, backlog, phases)
    tuned = read_pool(pool_file, [*settings, *settings_of(RunKind.TUNED, load.slo, 1)])
    say("rehearsing static batch sizes in virtual time …")
    rush = [a for a in load.arrivals if phases[1].starts_s <= a.arrival_s < phases[1].ends_s]
    return RushPlan(
        pool_file=pool_file,
        pool=pool,
        given_settings=tuple(settings),
        calibration=calibration,
        load=load,
        static=best_static(calibration.costs, tuned, load),
        requests_per_s=rush_formula.requests_per_s(calibration.costs, load.slo, rush),
        answer=answer,
    )


def _loads(url: str, pool: InferencePool) -> Callable[[], Load]:
    return lambda: Load(url, pool.spec.model.name)


async def _ask(url: str, pool: InferencePool, say: Say) -> str:
    load = Load(url, pool.spec.model.name)
    await load.run([PlannedRequest(0.0, QUESTION, ANSWER_TOKENS)])
    (outcome,) = load.outcomes
    if outcome.error is not None:
        raise step_calibration.CalibrationFailed(f"the first question failed: {outcome.error}")
    say(f"asked:    {QUESTION}")
    say(f"answered: {outcome.text.strip()}")
    return outcome.text.strip()


async def _prompts(
    url: str, pool: InferencePool
) -> tuple[list[Candidate], list[Candidate], list[Candidate]]:
    """For the rush, its backlog, and calibration."""
    book = PromptBook.load()
    chars_per_token = await _chars_per_token(url, book.sample())
    trace = with_lengths_divided(read_arrivals(), pool.spec.model.max_length)
    return (
        await counted(url, prompted(trace[:NUM_CANDIDATES], book, chars_per_token)),
        await counted(url, backlog_prompts(book)),
        await counted(
            url,
            prompted(
                trace[-NUM_CALIBRATION_PROMPTS:], book, chars_per_token, CALIBRATION_FIRST_SEED
            ),
        ),
    )


async def _chars_per_token(base_url: str, text: str) -> float:
    """By the served model's own tokenizer."""
    async with (
        aiohttp.ClientSession(raise_for_status=True) as client,
        client.post(base_url + TOKENIZE_PATH, json={"prompt": text}) as response,
    ):
        return len(text) / int((await response.json())["count"])
