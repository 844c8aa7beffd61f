"""`chairlift explain`: a pool's decisions in words, from its status or from a journal.

The cluster is asked by kubectl, which knows how this user logs in.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from chairlift_cli.errors import FAILURE_EXIT_CODE, CliError
from chairlift_cli.moments import moment
from chairlift_operator.explaining import inputs_of
from chairlift_operator.journal import JournalError, replay
from chairlift_operator.step_time import StepCosts

Json = dict[str, Any]
RESOURCE: Final = "inferencepools.chairlift.dev"
KUBECTL_S: Final = 30.0
_LOG_LINE: Final = re.compile(r"[EWI]\d{4} ")


def run_explain(args: argparse.Namespace) -> int:
    if args.journal is not None:
        lines = _from_journal(args.journal)
    elif args.pool is not None:
        lines = _from_status(args.pool, _ask_kubectl(args.pool, args.namespace))
    else:
        raise CliError("explain: name a pool, or a journal by --journal FILE")
    for line in lines:
        print(line)
    return 0


def _from_journal(path: Path) -> Iterator[str]:
    told = False
    learned: StepCosts | None = None
    try:
        for step in replay(path):
            for decision in step.recorded.decisions:
                told = True
                inputs = inputs_of(decision, step.plan.replicas)
                yield from _decision(
                    moment(decision.at_s), decision.replica, decision.sentence, inputs,
                    decision.enforced,
                )  # fmt: skip
            learned = step.plan.memory.learned or learned
    except JournalError as error:
        raise CliError(f"--journal: {error}") from error
    if not told:
        yield "No decision was made."
    if learned is not None:
        yield f"Step times as learned, for simulate --profile: {_profile(learned)}"


def _profile(costs: StepCosts) -> str:
    """As a simulated engine takes it."""
    known = {
        "a_ms": costs.fixed_s,
        "b_ms": costs.decode_s,
        "c_ms": costs.prefill_s,
        "d_ms": costs.kv_s,
    }
    return json.dumps({name: float(f"{1e3 * cost_s:.4g}") for name, cost_s in known.items()})


def _from_status(pool: str, body: Json) -> Iterator[str]:
    status: Json = body.get("status") or {}
    if not status:
        yield f"{pool}: no operator has looked at it yet; is one running, and for its namespace?"
        return
    yield f"{pool}: objectives {str(status.get('slo', 'Unknown')).lower()}"
    for name in ("interactive", "batch"):
        if known := status.get(name):
            knobs = {"batch size": known.get("batchSize"), "step tokens": known.get("stepTokens")}
            told = [f"{k} {v}" for k, v in knobs.items() if v is not None]
            yield "  " + ", ".join([f"{name}: {known.get('replicas')} replicas ready", *told])
    if status.get("progress"):
        yield f"  under way: {status['progress']}"
    for condition in status.get("conditions", ()):
        yield f"  {condition['type']} {condition['status']}: {condition['message']}"
    decisions = status.get("decisions", ())
    yield "Decisions, newest last:" if decisions else "No decision was made."
    for known in decisions:
        yield from _decision(
            known["at"],
            known["target"],
            known["sentence"],
            known.get("inputs", {}),
            known.get("enforced", True),
        )


def _decision(
    at: str, target: str, sentence: str, inputs: Mapping[str, str], enforced: bool
) -> Iterator[str]:
    advice = "" if enforced else " (advice only: mode is Recommend)"
    yield f"{at} {target}: {sentence}{advice}"
    if inputs:
        yield "    measured: " + ", ".join(f"{name} {value}" for name, value in inputs.items())


def _ask_kubectl(pool: str, namespace: str | None) -> Json:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise CliError("explain: kubectl is not in PATH; install it, or read a --journal")
    command = [kubectl, "get", RESOURCE, pool, "-o", "json"]
    command += ["-n", namespace] if namespace else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=KUBECTL_S)
    except subprocess.TimeoutExpired as error:
        raise CliError("explain: kubectl did not answer", FAILURE_EXIT_CODE) from error
    if done.returncode != 0:
        raise CliError(f"explain: {_refusal(done.stderr)}", FAILURE_EXIT_CODE)
    body: Json = json.loads(done.stdout)
    return body


def _refusal(said: str) -> str:
    """kubectl's own words without its log lines, and what may help."""
    lines = [line for line in said.splitlines() if line.strip() and not _LOG_LINE.match(line)]
    told = " ".join(lines) or said.strip() or "kubectl failed and did not say why"
    if "doesn't have a resource type" in told:
        return f"{told}: apply crds/, or install the chart"
    if "NotFound" in told and RESOURCE in told:
        return f"{told}: name its namespace by -n; kubectl get ipool -A lists all"
    if "was refused" in told or "no such host" in told:
        return f"{told} KUBECONFIG names the cluster; a local run is read by --journal"
    return told
