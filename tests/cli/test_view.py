from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chairlift_cli.view import LineView, LiveView
from chairlift_operator.decisions import Condition, Decision, Health, ReplicaReport, Truth
from chairlift_operator.memory import Memory
from chairlift_operator.plan import Plan
from chairlift_operator.snapshot import Phase
from chairlift_operator.spec import InferencePool, Metadata, PoolSpec
from chairlift_operator.spec_parsing import parse_pool
from chairlift_operator.spec_runtime import Model
from chairlift_protocol.wire import RequestClass

POOL = InferencePool(Metadata("chat"), PoolSpec(Model("tiny", "cache://tiny")))
REPORT = ReplicaReport(
    name="interactive-0",
    ready=True,
    health=Health.OK,
    batch_size=24,
    step_tokens=192,
    num_running=7.0,
    num_waiting=3.0,
    kv_usage=0.42,
    step_s=0.0314,
)
DECISION = Decision(
    at_s=0.0,
    replica="interactive-0",
    field="batchSize",
    before=96,
    after=72,
    reason="12 % of gaps over 50 ms",
)
LIMITED = Condition("CapacityLimited", Truth.TRUE, "BatchFull", "all 24 slots run.")
CROWDED = Condition("SlotsHeldByOneTenant", Truth.TRUE, "OneTenant", "team-a holds 8 of 10.")
UNTROUBLED = Condition("BatchSizeBeyondObjective", Truth.FALSE, "Fits", "All fit.")
FINE = Condition("Ready", Truth.TRUE, "ReplicasReady", "1 of 1 replicas are ready.")


def plan(**parts: Any) -> Plan:
    empty = dict.fromkeys(("actions", "decisions", "replicas", "signals", "conditions"), ())
    return Plan(**{**empty, "memory": Memory.start(), "health": Health.OK, **parts})


def test_lines_tell_each_decision_and_each_trouble_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = LineView()
    view.show(plan(decisions=(DECISION,), conditions=(FINE, LIMITED)))
    view.show(plan(conditions=(FINE, LIMITED)))
    view.show(plan(conditions=(FINE,)))
    view.show(plan(conditions=(FINE, LIMITED, UNTROUBLED, CROWDED)))
    trouble = "CapacityLimited True: all 24 slots run."
    assert capsys.readouterr().out.splitlines() == [
        "interactive-0: batch size 96→72: 12 % of gaps over 50 ms",
        trouble,
        trouble,
        "SlotsHeldByOneTenant True: team-a holds 8 of 10.",
    ]


def test_the_table_shows_both_classes_what_is_lent_and_who_comes_and_goes() -> None:
    screen = io.StringIO()
    pool = parse_pool((Path(__file__).parents[2] / "examples" / "fleet.yaml").read_text())
    view = LiveView(pool, Console(file=screen, force_terminal=True, width=240))
    lender = replace(REPORT, batch_share=0.8, num_borrowing=5.0)
    leaving = replace(REPORT, name="interactive-1", phase=Phase.DRAINING)
    coming = ReplicaReport(
        "batch-0", False, Health.MISSING, RequestClass.BATCH, Phase.STARTING, held="starting"
    )
    scaled = Decision(0.0, "batch", "replicas", 0, 1, "40 batch requests must start within 100 s")
    view.show(plan(decisions=(scaled,), replicas=(coming, leaving, lender)))
    view.close()
    shown = screen.getvalue()
    assert "interactive: 1 ready, 1 draining, 1 to 3 allowed; batch: 0 ready, 1 starting" in shown
    for text in ("80 %", "interactive-1 (draining)", "batch-0 (starting)", "batch: replicas 0→1"):
        assert text in shown
    assert shown.index("interactive-0") < shown.index("interactive-1") < shown.index("batch-0 (")


def test_the_table_shows_what_is_known_and_a_dash_for_what_is_not() -> None:
    screen = io.StringIO()
    view = LiveView(POOL, Console(file=screen, force_terminal=True, width=220))
    view.say("journal: /x [not markup]")
    view.show(plan(decisions=(DECISION,), replicas=(REPORT,), conditions=(LIMITED,)))
    view.close()
    shown = screen.getvalue()
    for text in ("[not markup]", "24", "192", "42 %", "31.4 ms", "–", "96→72", "all 24 slots"):
        assert text in shown
    for unknown in ("None", "nan"):
        assert unknown not in shown
