"""What one tenant's agent loop does to another's chat, on the real engine.

`python -m chairlift_bench.bench_noisy` starts one pool with `chairlift local` and fixed knobs, with
fewer slots than the agent loop would take. A chat runs alone, beside one tenant that keeps 30
requests in flight, and beside 30 tenants with one each: in alternating rounds, the same prompts.
Writes bench/results/noisy.json and prints the claims last. `make bench-noisy` calls it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import aiohttp

from chairlift_bench.claims import publish
from chairlift_bench.load import Load, PlannedRequest
from chairlift_bench.local_server import LocalServerFailed, engine_url, ensure_model, local_server
from chairlift_bench.outcomes import Outcome, percentile
from chairlift_bench.prompts import REPOSITORY, PromptBook
from chairlift_cli.errors import CliError
from chairlift_cli.pool_file import read_pool
from chairlift_operator.exposition import EngineSample, parse_engine_metrics
from chairlift_protocol.wire import METRICS_PATH

NUM_ROUNDS: Final = 3
NUM_TURNS: Final = 20
NUM_NOISY: Final = 30
NUM_SLOTS: Final = 16  # half of what the loop keeps in flight finds a slot
BUSY_WITHIN_S: Final = 120.0
# Long enough that slots are what is short, not the prefill of 200 tokens at 96 a step.
CHAT_ANSWER_TOKENS, AGENT_ANSWER_TOKENS, AGENT_PROMPT_TOKENS = 12, 64, 200
CHARS_PER_TOKEN: Final = 4.0
TENANT_HEADER: Final = "x-tenant"
POOL_FILE: Final = REPOSITORY / "examples" / "chat.yaml"
SETTINGS: Final = (
    f"gateway.trustedTenantHeader={TENANT_HEADER}",
    *(f"interactive.batchSize.{end}={NUM_SLOTS}" for end in ("min", "max")),
    *(f"interactive.stepTokens.{end}=96" for end in ("min", "max")),
)
ALONE, ONE_TENANT, MANY_TENANTS = "alone", "one tenant", "many tenants"
KINDS: Final = (ALONE, ONE_TENANT, MANY_TENANTS)


@dataclass(frozen=True, slots=True)
class Phase:
    """One round of one kind. step_s: mean time of the steps meanwhile."""

    kind: str
    ttfts_s: tuple[float, ...]
    step_s: float
    num_failed: int


@dataclass(frozen=True, slots=True)
class Pooled:
    """All rounds of one kind."""

    ttft_p50_s: float
    ttft_p95_s: float
    step_s: float

    @classmethod
    def of(cls, phases: Sequence[Phase]) -> Pooled:
        ttfts_s = [ttft_s for phase in phases for ttft_s in phase.ttfts_s]
        step_s = statistics.fmean(phase.step_s for phase in phases)
        return cls(percentile(ttfts_s, 50), percentile(ttfts_s, 95), step_s)


class Bench:
    """Rounds against one running pool."""

    def __init__(self, url: str, engine: str, model: str) -> None:
        self._url, self._engine, self._model = url, engine, model
        book = PromptBook.load()
        self._questions = [
            PlannedRequest(
                0.0, book.questions[turn % len(book.questions)], CHAT_ANSWER_TOKENS, True
            )
            for turn in range(NUM_TURNS)
        ]
        self._agent_prompts = [
            book.prompt(AGENT_PROMPT_TOKENS, seed, CHARS_PER_TOKEN) for seed in range(200)
        ]

    async def phase(self, kind: str) -> Phase:
        is_over = False

        def prompts(first: int) -> Iterator[PlannedRequest]:
            for number in itertools.count(first):
                if is_over:
                    return
                text = self._agent_prompts[number % len(self._agent_prompts)]
                yield PlannedRequest(0.0, text, AGENT_ANSWER_TOKENS, True)

        loads = [(self._load(tenant), count) for tenant, count in _noise(kind)]
        noise = [
            asyncio.create_task(load.run_closed(prompts(10 * n), count, float("inf")))
            for n, (load, count) in enumerate(loads)
        ]
        try:
            await self._until_busy([load for load, _ in loads])
            before = await self._sample()
            chat = await self._load("chat").run_closed(iter(self._questions), 1, float("inf"))
            after = await self._sample()
        finally:
            is_over = True
            ended = await asyncio.gather(*noise)
        return _measured(kind, chat, [o for each in ended for o in each], before, after)

    async def _until_busy(self, loads: Sequence[Load]) -> None:
        """Until slots are full and others wait for them, so that every turn meets the same."""
        if not loads:
            return
        try:
            async with asyncio.timeout(BUSY_WITHIN_S):
                while not is_busy(await self._sample()):
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise LocalServerFailed(
                f"{NUM_NOISY} requests in flight did not fill {NUM_SLOTS} slots within "
                f"{BUSY_WITHIN_S:.0f} s"
            ) from None

    def _load(self, tenant: str) -> Load:
        return Load(self._url, self._model, headers={TENANT_HEADER: tenant})

    async def _sample(self) -> EngineSample:
        async with (
            aiohttp.ClientSession(raise_for_status=True) as client,
            client.get(self._engine + METRICS_PATH) as response,
        ):
            sample = parse_engine_metrics(await response.text())
        if sample.missing:
            raise LocalServerFailed(f"the engine does not say {', '.join(sample.missing)}")
        return sample


def is_busy(sample: EngineSample) -> bool:
    """Whether slots are full but for the tenth that no tenant alone may take, and others wait."""
    num_running, num_waiting = sample.num_running or 0, sample.num_waiting or 0
    return num_running >= math.floor(0.9 * NUM_SLOTS) and num_waiting >= NUM_NOISY - NUM_SLOTS


def _noise(kind: str) -> list[tuple[str, int]]:
    """Tenants and how many requests each keeps in flight."""
    if kind == ALONE:
        return []
    if kind == ONE_TENANT:
        return [("agent", NUM_NOISY)]
    return [(f"agent-{number}", 1) for number in range(NUM_NOISY)]


def _measured(
    kind: str,
    chat: Sequence[Outcome],
    noise: Sequence[Outcome],
    before: EngineSample,
    after: EngineSample,
) -> Phase:
    busy_s = (after.step_seconds or 0.0) - (before.step_seconds or 0.0)
    num_steps = (after.num_steps or 0.0) - (before.num_steps or 0.0)
    failed = [o.error for o in (*chat, *noise) if o.error is not None]
    for error in sorted(set(failed)):
        print(f"failed: {error}")
    ttfts_s = tuple(o.ttft_s for o in chat if o.ttft_s is not None)
    return Phase(kind, ttfts_s, busy_s / num_steps, len(failed))


def claims_of(phases: Sequence[Phase]) -> dict[str, float]:
    """Over all rounds: how many steps later than alone, beside the noise; one tenant's noise over
    that of many."""
    pooled = {kind: Pooled.of([p for p in phases if p.kind == kind]) for kind in KINDS}
    noisy = pooled[ONE_TENANT]
    return {
        "noisy_extra_ttft_steps": (noisy.ttft_p95_s - pooled[ALONE].ttft_p95_s) / noisy.step_s,
        "noisy_vs_many_tenants": noisy.ttft_p95_s / pooled[MANY_TENANTS].ttft_p95_s,
        "noisy_failed_requests": float(sum(p.num_failed for p in phases)),
    }


async def _run(folder: Path) -> list[Phase]:
    pool = read_pool(POOL_FILE, SETTINGS)
    phases = []
    async with local_server(
        POOL_FILE, folder / "noisy.journal.jsonl", print, SETTINGS, folder
    ) as url:
        bench = Bench(url, engine_url(folder), pool.spec.model.name)
        await bench.phase(ALONE)  # the first requests after the start are not like the others
        for number in range(NUM_ROUNDS):
            for kind in (*KINDS[number:], *KINDS[:number]):
                phase = await bench.phase(kind)
                phases.append(phase)
                print(
                    f"round {number + 1} of {NUM_ROUNDS}, chat beside {kind}: TTFT p50 "
                    f"{percentile(phase.ttfts_s, 50):.2f}, p95 {percentile(phase.ttfts_s, 95):.2f} "
                    f"s; a step takes {phase.step_s * 1e3:.0f} ms",
                    flush=True,
                )
    return phases


def by_round(phases: Sequence[Phase]) -> list[Mapping[str, float]]:
    """The claims of each round by itself: their spread."""
    size = len(KINDS)
    return [claims_of(phases[start : start + size]) for start in range(0, len(phases), size)]


def main() -> int:
    try:
        ensure_model(read_pool(POOL_FILE, SETTINGS))
        with tempfile.TemporaryDirectory() as folder:
            phases = asyncio.run(_run(Path(folder)))
    except (CliError, LocalServerFailed, aiohttp.ClientError) as error:
        print(f"bench_noisy: {error}", file=sys.stderr)
        return 1
    rounds = by_round(phases)
    for name in ("noisy_extra_ttft_steps", "noisy_vs_many_tenants"):
        print(f"{name} by round: {', '.join(f'{r[name]:.2f}' for r in rounds)}")
    claims = claims_of(phases)
    publish("noisy", claims, {"phases": [asdict(p) for p in phases], "rounds": rounds})
    return 1 if claims["noisy_failed_requests"] else 0


if __name__ == "__main__":
    sys.exit(main())
