"""`chairlift simulate`: a whole pool under a recorded load, faster than it would pass.

The gateway's, the engine's and the controller's own code in virtual time: to size a pool before
there is hardware for it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from chairlift_cli.errors import CliError, check_writable, writing
from chairlift_cli.pool_file import read_pool
from chairlift_engine.simulator_profile import ProfileError, open_profile, simulated_kv_tokens
from chairlift_operator.decisions import Truth
from chairlift_operator.engine_arguments import engine_arguments
from chairlift_operator.journal import JournalWriter, open_for_append
from chairlift_operator.memory import Memory
from chairlift_operator.plan import Plan
from chairlift_operator.snapshot import Snapshot
from chairlift_operator.spec import InferencePool
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.advice import advice, is_missed, replicas_line, verdict
from chairlift_simulation.arrival_traces import Arrival, TraceError, read_trace
from chairlift_simulation.conditions import NO_BACKLOG, Backlog, Conditions, PoolResult
from chairlift_simulation.fleet import Hardware
from chairlift_simulation.laws import ChairliftLaw
from chairlift_simulation.offered import Offered, offered, scaled
from chairlift_simulation.pool_run import PoolRun
from chairlift_simulation.summary import Summary

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
SAY_EVERY_S: Final = 2.0


def run_simulate(args: argparse.Namespace) -> int:
    pool = read_pool(args.file, args.settings)
    picture: Path = args.picture or Path(f"{pool.name}-simulated.png")
    check_writable(picture)
    hardware = _hardware(args, pool)
    try:
        trace = scaled(read_trace(args.trace), args.rate, args.duration, args.seed)
    except TraceError as error:
        raise CliError(f"--trace: {error}") from error
    load = offered(trace, pool, hardware.kv_tokens)
    if not load.requests:
        raise CliError(
            f"no request of the trace fits the pool: its longest prompt plus answer is "
            f"{pool.spec.model.max_length} tokens; raise model.maxLength"
        )
    duration_s = args.duration or trace[-1].arrival_s
    conditions = Conditions(hardware, warm_up_s=args.warm_up, seed=args.seed)
    with ExitStack() as closing:
        watch = _Watch(pool, duration_s, _journal(args.journal, pool, closing))
        run = PoolRun(pool, ChairliftLaw(pool), conditions, watch.tick)
        result = run.run(load.requests, duration_s, _backlog(args.batch_clients, trace, load, pool,
                                                             hardware, duration_s))  # fmt: skip
    watch.end(result.elapsed_s)
    summary = Summary.of(pool, result, duration_s)
    for line in (*_lines(summary, watch, load, duration_s), *_answer(pool, result, summary)):
        print(line)
    from chairlift_simulation.picture import drawn, png  # with it comes matplotlib

    title = f"{pool.name}: {args.trace}, {len(load.requests) / duration_s:.3g} requests/s"
    with writing(picture):
        picture.write_bytes(png(drawn(pool, result, title)))
    print(f"picture: {picture}")
    return 0


def _hardware(args: argparse.Namespace, pool: InferencePool) -> Hardware:
    arguments = engine_arguments(pool, INTERACTIVE)
    named = args.profile or str(arguments.get("--simulator-profile", "reference"))
    try:
        profile, _ = open_profile(named)
    except ProfileError as error:
        raise CliError(f"--profile: {error}") from error
    spec = pool.spec
    return Hardware(
        profile,
        args.kv_tokens
        or simulated_kv_tokens(spec.model.max_length, spec.interactive.batch_size.max),
    )


def _backlog(
    num_clients: int,
    trace: list[Arrival],
    load: Offered,
    pool: InferencePool,
    hardware: Hardware,
    duration_s: float,
) -> Backlog:
    if not num_clients:
        return NO_BACKLOG
    if pool.spec.batch is None:
        raise CliError("--batch-clients: the pool has no batch section")
    requests = offered(trace, pool, hardware.kv_tokens, BATCH).requests
    return Backlog(requests, num_clients, until_s=duration_s)


def _journal(path: Path | None, pool: InferencePool, closing: ExitStack) -> JournalWriter | None:
    if path is None:
        return None
    with writing(path):
        return JournalWriter(closing.enter_context(open_for_append(path)), Memory.start())


@dataclass(slots=True)
class _Watch:
    """Listens to the run: progress for the person, ticks for the journal, what was short."""

    pool: InferencePool
    duration_s: float
    journal: JournalWriter | None
    num_ticks: int = 0
    limits: Counter[str] = field(default_factory=Counter)
    _started_s: float = field(default_factory=time.monotonic)
    _said_s: float = field(default_factory=time.monotonic)

    def tick(self, snapshot: Snapshot, plan: Plan | None) -> None:
        self.num_ticks += 1
        if plan is None:
            return
        if self.journal is not None:
            self.journal.tick(self.pool, snapshot, plan, ())
        for condition in plan.conditions:
            if condition.type == "CapacityLimited" and condition.status is Truth.TRUE:
                self.limits[condition.reason] += 1
        now_s = time.monotonic()
        if now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            self._say(snapshot)

    def _say(self, snapshot: Snapshot) -> None:
        running = sum(r.sample.num_running or 0 for r in snapshot.replicas if r.sample)
        waiting = sum(r.sample.num_waiting or 0 for r in snapshot.replicas if r.sample)
        print(
            f"  {snapshot.taken_at_s:5.0f} of {self.duration_s:.0f} s: "
            f"{len(snapshot.replicas)} replicas, {running:.0f} running, {waiting:.0f} waiting",
            file=sys.stderr,
        )

    def end(self, elapsed_s: float) -> None:
        took_s = time.monotonic() - self._started_s
        print(f"simulated {elapsed_s:.0f} s in {took_s:.1f} s", file=sys.stderr)


def _lines(summary: Summary, watch: _Watch, load: Offered, duration_s: float) -> list[str]:
    def percent(share: float) -> str:
        return f"{100 * share:.1f} %"

    lines = [
        f"requests       {summary.num_requests} in {duration_s:.0f} s, "
        f"{summary.num_refused} refused, {summary.num_unfinished} unfinished",
        f"attainment     first token {percent(summary.ttft_share)}, gaps "
        f"{percent(summary.itl_share)}, both {percent(summary.good_share)}",
        f"first token    p50 {summary.ttft_p50_s:.2f} s, p95 {summary.ttft_p95_s:.2f} s; "
        f"{percent(summary.late_gap_share)} of gaps over their threshold",
        f"goodput        {summary.goodput_per_s:.2f} good requests/s, "
        f"{summary.output_tokens_per_s:.0f} tokens/s",
        f"cost           {summary.replica_hours:.2f} replica-hours, at most "
        f"{summary.most_replicas} replicas, {summary.num_preemptions} preemptions",
        f"changes        {_counted(summary.changes) or 'none'}",
        f"bad requests   {_counted(summary.bad_while) or 'none'}",
        f"limited        {_limited(watch)}",
    ]
    if load.num_too_long:
        lines.insert(1, f"left out       {load.num_too_long} requests longer than the model takes")
    if summary.num_batch_done:
        lines.insert(4, f"batch class    {summary.num_batch_done} requests done")
    return lines


def _answer(pool: InferencePool, result: PoolResult, summary: Summary) -> Iterator[str]:
    yield f"replicas       {replicas_line(pool, result.ticks)}"
    yield f"objectives     {verdict(pool, summary)}"
    if is_missed(pool, summary):
        for line in advice(pool, result):
            yield f"  {line}"


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _limited(watch: _Watch) -> str:
    said: Callable[[str], str] = {
        "ReplicasExhausted": "more replicas were needed than may run",
        "ObjectiveInfeasible": "the hardware cannot meet the inter-token objective",
        "BatchFull": "the batch size that the objectives allow was full",
    }.__getitem__
    parts = [
        f"{said(reason)} {100 * count / watch.num_ticks:.0f} % of the time"
        for reason, count in watch.limits.most_common()
    ]
    return "; ".join(parts) or "never"
