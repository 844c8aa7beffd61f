"""What local mode shows: a live table on a terminal, plain lines everywhere else.

Shows the controller's own reports, decisions and conditions; computes nothing. `supervisor` makes
it speak, `control` hands it every tick's plan.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Final, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from chairlift_operator.decisions import Condition, Decision, ReplicaReport, Truth
from chairlift_operator.mistakes import MISTAKES
from chairlift_operator.plan import Plan
from chairlift_operator.snapshot import Phase
from chairlift_operator.spec import InferencePool
from chairlift_operator.windows import Attainment
from chairlift_protocol.wire import RequestClass

NUM_DECISIONS_SHOWN: Final = 6
UNKNOWN: Final = "–"
NUMBERS: Final = (
    "TTFT met",
    "gaps met",
    "running",
    "of it batch",
    "waiting",
    "KV",
    "tokens/s",
    "step",
    "batch size",
    "step tokens",
    "batch share",
)
# The conditions whose truth is the trouble.
BAD_WHEN_TRUE: Final = ("CapacityLimited", *MISTAKES)


class View(Protocol):
    def say(self, line: str) -> None:
        """A sentence for the person at the terminal."""
        ...

    def show(self, plan: Plan) -> None:
        """How the pool stands after a tick, and what that tick decided."""
        ...

    def close(self) -> None: ...


class LineView:
    """One line for each sentence, decision and new trouble: for pipes, logs and other programs."""

    def __init__(self) -> None:
        self._troubled: set[str] = set()

    def say(self, line: str) -> None:
        print(line, flush=True)

    def show(self, plan: Plan) -> None:
        for decision in plan.decisions:
            print(decision_line(decision), flush=True)
        troubles = troubles_of(plan)
        for condition in troubles:
            if condition.type not in self._troubled:
                print(trouble_line(condition), flush=True)
        self._troubled = {condition.type for condition in troubles}

    def close(self) -> None:
        pass


class LiveView:
    """A table that is redrawn in place; sentences scroll above it."""

    def __init__(self, pool: InferencePool, console: Console) -> None:
        self._pool = pool
        self._console = console
        self._decisions: deque[str] = deque(maxlen=NUM_DECISIONS_SHOWN)
        self._live: Live | None = None

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def show(self, plan: Plan) -> None:
        clock = time.strftime("%H:%M:%S")
        self._decisions.extend(f"{clock}  {decision_line(d)}" for d in plan.decisions)
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(self._render(plan), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _render(self, plan: Plan) -> RenderableType:
        slo = self._pool.spec.interactive.slo
        ttft, gap = slo.time_to_first_token, slo.inter_token_latency
        table = Table(
            title=f"{self._pool.name}: {self._pool.spec.model.name}, "
            f"TTFT ≤ {ttft.threshold_ms:g} ms for {ttft.percent:g} % of requests, "
            f"gaps ≤ {gap.threshold_ms:g} ms for {gap.percent:g} %",
            title_justify="left",
        )
        table.add_column("replica")
        for heading in NUMBERS:
            table.add_column(heading, justify="right")
        table.add_column("signals")
        for report in sorted(plan.replicas, key=_in_order):
            table.add_row(*_cells(report))
        lines = [
            pools_line(self._pool, plan),
            *self._decisions,
            *map(trouble_line, troubles_of(plan)),
        ]
        return Group(table, *map(Text, lines))


def troubles_of(plan: Plan) -> list[Condition]:
    """Conditions that a person should know of."""
    return [
        condition
        for condition in plan.conditions
        if condition.status is (Truth.TRUE if condition.type in BAD_WHEN_TRUE else Truth.FALSE)
    ]


def trouble_line(condition: Condition) -> str:
    return f"{condition.type} {condition.status}: {condition.message}"


def decision_line(decision: Decision) -> str:
    said = "" if decision.enforced else " (recommended, not done)"
    return f"{decision.replica}: {decision.sentence}{said}"


def pools_line(pool: InferencePool, plan: Plan) -> str:
    """How many replicas each class has, and may have."""
    parts = []
    for request_class in RequestClass:
        bounds = pool.spec.replicas(request_class)
        own = [r for r in plan.replicas if r.request_class is request_class]
        if bounds.max or own:
            num_ready = sum(r.ready and r.phase is Phase.SERVING for r in own)
            others = [
                f"{count} {phase}"
                for phase in (Phase.STARTING, Phase.DRAINING)
                if (count := sum(r.phase is phase for r in own))
            ]
            allowed = f"{bounds.min} to {bounds.max} allowed"
            parts.append(f"{request_class}: {', '.join([f'{num_ready} ready', *others, allowed])}")
    return "; ".join(parts)


def _in_order(report: ReplicaReport) -> tuple[bool, int, str]:
    return report.request_class.value != RequestClass.INTERACTIVE, len(report.name), report.name


def _name(report: ReplicaReport) -> str:
    if report.phase is not Phase.SERVING:
        return f"{report.name} ({report.phase})"
    return report.name if report.ready else f"{report.name} (not ready)"


def _cells(report: ReplicaReport) -> list[str]:
    return [
        _name(report),
        _attainment(report.first_token),
        _attainment(report.inter_token),
        _number(report.num_running),
        _number(report.num_borrowing if report.num_running is not None else None),
        _number(report.num_waiting),
        UNKNOWN if report.kv_usage is None else f"{100 * report.kv_usage:.0f} %",
        _number(report.output_tokens_per_s),
        UNKNOWN if report.step_s is None else f"{1e3 * report.step_s:.1f} ms",
        _number(report.batch_size),
        _number(report.step_tokens),
        UNKNOWN if report.batch_share is None else f"{100 * report.batch_share:.0f} %",
        report.health.value if report.held is None else report.held,
    ]


def _attainment(attainment: Attainment | None) -> str:
    return UNKNOWN if attainment is None else f"{attainment.good_percent:.1f} %"


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}"
