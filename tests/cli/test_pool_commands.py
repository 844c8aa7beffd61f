"""`chairlift validate` and `chairlift explain`: what is wrong with a pool, and why it is so."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift_cli.__main__ import main
from chairlift_operator.journal import JournalWriter
from chairlift_operator.memory import Memory
from chairlift_operator.plan import plan
from chairlift_operator.snapshot import EngineCapacity, PolicyReadback, ReplicaSnapshot, Snapshot
from chairlift_operator.spec_parsing import parse_pool
from chairlift_protocol.policy import Generation, Policy, SloThresholds

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
STATUS: dict[str, Any] = {
    "slo": "Met",
    "interactive": {"replicas": "2/2", "batchSize": 48, "stepTokens": 256},
    "progress": "chat-9: loads the model, 35 s",
    "conditions": [{"type": "Tuned", "status": "True", "message": "Every replica runs it."}],
    "decisions": [
        {
            "at": "2026-01-01T00:00:00Z",
            "target": "chat-1",
            "sentence": "batch size 96→72: 12 % of gaps over 50 ms",
            "inputs": {"running": "12", "waiting": "3"},
        }
    ],
}


def test_the_examples_are_valid(capsys: pytest.CaptureFixture[str]) -> None:
    files = [part for example in EXAMPLES for part in ("-f", str(example))]
    assert main(["validate", *files]) == 0
    assert capsys.readouterr().out.count(" is valid\n") == len(EXAMPLES)


def test_all_that_is_wrong_is_said_and_the_other_files_are_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(
        "apiVersion: chairlift.dev/v1alpha1\nkind: InferencePool\nspec: {tenancy: {}}\n"
    )
    assert main(["validate", "-f", str(wrong), "-f", str(EXAMPLES[0])]) == 2
    seen = capsys.readouterr()
    assert "metadata: is missing" in seen.err and "spec.tenancy: is not a field here" in seen.err
    assert f"{EXAMPLES[0]}: InferencePool chat is valid" in seen.out


def test_quotas_are_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "tenants" / "fleet.yaml"
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(example.read_text().replace("burst: 30s", "burst: 11m"))
    assert main(["validate", "-f", str(example), "-f", str(wrong)]) == 2
    seen = capsys.readouterr()
    assert f"{example}: TenantQuota acme is valid" in seen.out
    assert f"{example}: TenantQuota everybody-else is valid" in seen.out
    assert "spec.interactive: burst 660s is above 600s: lower it" in seen.err


def test_two_quotas_for_one_tenant_of_one_pool_are_both_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(name: str, *quotas: tuple[str, str, str, str]) -> list[str]:
        path = tmp_path / name
        path.write_text(
            "".join(
                "---\napiVersion: chairlift.dev/v1alpha1\nkind: TenantQuota\n"
                f"metadata: {{name: {quota}, namespace: {namespace}}}\n"
                f"spec: {{poolRef: {{name: {pool}}}, tenant: {tenant}}}\n"
                for quota, namespace, pool, tenant in quotas
            )
        )
        return ["-f", str(path)]

    first = write(
        "first.yaml",
        ("one", "a", "chat", "acme"),
        ("two", "a", "fleet", "acme"),
        ("three", "b", "chat", "acme"),
    )
    second = write("second.yaml", ("four", "a", "chat", "zeta"), ("five", "a", "chat", "acme"))
    assert main(["validate", *first]) == 0
    assert capsys.readouterr().out.count(" is valid\n") == 3
    assert main(["validate", *first, *second]) == 2
    assert capsys.readouterr().err.startswith(
        f"chairlift: TenantQuota five of {tmp_path}/second.yaml and TenantQuota one of "
        f"{tmp_path}/first.yaml are both for tenant acme of pool chat: merge the two, or name "
        "another tenant\n"
    )
    within = write("third.yaml", ("six", "a", "chat", "'*'"), ("seven", "a", "chat", "'*'"))
    assert main(["validate", *within]) == 2
    said = capsys.readouterr().err
    assert "TenantQuota seven" in said and "TenantQuota six" in said


POOL = (EXAMPLES[0].parent / "fleet.yaml").read_text()
QUOTA = (
    "apiVersion: chairlift.dev/v1alpha1\nkind: TenantQuota\nmetadata: {name: acme}\n"
    "spec: {poolRef: {name: fleet}, tenant: acme}\n"
)
REDIS = "  quotas: {redis: {url: 'redis://redis:6379/0'}}\n"


@pytest.mark.parametrize(
    ("pool", "quota", "doubt"),
    [
        (POOL + REDIS, QUOTA, ""),
        (POOL, QUOTA, "TenantQuota acme: not in force before pool fleet has spec.quotas.redis.url"),
        (
            POOL + REDIS,
            QUOTA.replace("fleet", "other"),
            "TenantQuota acme: spec.poolRef names pool other in namespace default, which none of "
            "these files holds",
        ),
        (
            POOL + REDIS,
            QUOTA.replace("{name: acme}", "{name: acme, namespace: team}"),
            "names pool fleet in namespace team",
        ),
    ],
    ids=["in force", "no Redis", "another pool", "another namespace"],
)
def test_a_valid_quota_that_may_not_be_in_force_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pool: str, quota: str, doubt: str
) -> None:
    files = [tmp_path / "pool.yaml", tmp_path / "quota.yaml"]
    for file, text in zip(files, (pool, quota), strict=True):
        file.write_text(text)
    assert main(["validate", *map(str, files)]) == 0
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if "have no TenantQuota are not limited" not in line]
    assert len(said) == bool(doubt) and all(doubt in line for line in said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("image: x\nreplicas: 2\n", "is no InferencePool or TenantQuota: it names no kind"),
        ("apiVersion: apps/v1\nkind: Deployment\n", "TenantQuota: its kind is 'Deployment'"),
        ("spec: {}\n", "it names no kind"),
        ("kind: InferencePool\n", "apiVersion: is missing"),
        ("apiVersion: chairlift.dev/v1alpha1\nkind: Pool\n", "this version takes InferencePool"),
    ],
)
def test_a_file_of_another_kind_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(text)
    assert main(["validate", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_validate_wants_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate"]) == 2
    assert "name a file" in capsys.readouterr().err


def test_a_pool_that_limits_some_and_says_nothing_of_the_others_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[2] / "examples" / "tenants" / "fleet.yaml"
    acme, others = (tmp_path / name for name in ("acme.yaml", "others.yaml"))
    both = example.read_text().split("---\n")
    acme.write_text(both[0])
    others.write_text(both[1])
    assert main(["validate", "-f", str(acme)]) == 0
    warning = "pool fleet: known tenants that have no TenantQuota are not limited"
    assert warning in capsys.readouterr().err
    assert main(["validate", "-f", str(acme), "-f", str(others)]) == 0
    assert warning not in capsys.readouterr().err
    # Another pool's rest is another rest.
    others.write_text(both[1].replace("name: fleet", "name: chat"))
    assert main(["validate", "-f", str(acme), "-f", str(others)]) == 0
    assert warning in capsys.readouterr().err


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Answers with that text and exit code, whatever it is asked."""

    def answer(text: str, exit_code: int = 0) -> None:
        tool = tmp_path / "bin" / "kubectl"
        tool.parent.mkdir(exist_ok=True)
        (tmp_path / "answer").write_text(text)
        stream = "" if exit_code == 0 else " >&2"
        tool.write_text(f"#!/bin/sh\ncat {tmp_path}/answer{stream}\nexit {exit_code}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")

    return answer


def test_a_pool_in_a_cluster_explains_itself(
    kubectl: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl(json.dumps({"status": STATUS}))
    assert main(["explain", "chat", "-n", "team"]) == 0
    assert capsys.readouterr().out == (
        "chat: objectives met\n"
        "  interactive: 2/2 replicas ready, batch size 48, step tokens 256\n"
        "  under way: chat-9: loads the model, 35 s\n"
        "  Tuned True: Every replica runs it.\n"
        "Decisions, newest last:\n"
        "2026-01-01T00:00:00Z chat-1: batch size 96→72: 12 % of gaps over 50 ms\n"
        "    measured: running 12, waiting 3\n"
    )


def test_a_pool_that_no_operator_has_seen_says_so(
    kubectl: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl("{}")
    assert main(["explain", "chat"]) == 0
    assert "no operator has looked at it yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            'Error from server (NotFound): inferencepools.chairlift.dev "chat" not found',
            'Error from server (NotFound): inferencepools.chairlift.dev "chat" not found: name its '
            "namespace by -n; kubectl get ipool -A lists all",
        ),
        (
            'error: the server doesn\'t have a resource type "inferencepools"',
            'error: the server doesn\'t have a resource type "inferencepools": apply crds/, or '
            "install the chart",
        ),
        (
            'E1130 03:48:06.907190 17830 memcache.go:265] "Unhandled Error"\n'
            "The connection to the server localhost:8080 was refused - did you specify the right "
            "host or port?",
            "The connection to the server localhost:8080 was refused - did you specify the right "
            "host or port? KUBECONFIG names the cluster; a local run is read by --journal",
        ),
        ("Error from server (Forbidden): no", "Error from server (Forbidden): no"),
    ],
    ids=["no such pool", "no CRD", "no cluster", "no rights"],
)
def test_what_kubectl_refuses_is_said_in_its_words_with_what_may_help(
    kubectl: Callable[..., None], capsys: pytest.CaptureFixture[str], said: str, told: str
) -> None:
    kubectl(said, 1)
    assert main(["explain", "chat"]) == 1
    assert capsys.readouterr().err == f"chairlift: explain: {told}\n"


def test_explain_wants_a_pool_or_a_journal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 2
    assert "name a pool, or a journal" in capsys.readouterr().err


def test_a_journal_explains_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool = parse_pool(EXAMPLES[0].read_text())
    policy = Policy(Generation(0, 0), 64, 2048, 2048, 1.0, SloThresholds(3000.0, 300.0))
    readback = PolicyReadback(policy, policy, EngineCapacity(64, 2048, 10_000, 4096, 16))
    snapshot = Snapshot("chat", 1000.0, (ReplicaSnapshot("a", True, policy=readback),))
    memory, text = Memory.start(), io.StringIO()
    made = plan(pool, snapshot, memory, 1000.0)
    JournalWriter(text, memory).tick(pool, snapshot, made, ())
    journal = tmp_path / "journal.jsonl"
    journal.write_text(text.getvalue())
    assert main(["explain", "--journal", str(journal)]) == 0
    assert "a: batch size 64→16: cautious first policy" in capsys.readouterr().out


def test_an_error_among_several_quotas_says_in_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = (Path(__file__).parents[2] / "examples" / "tenants" / "fleet.yaml").read_text()
    path = tmp_path / "quotas.yaml"
    path.write_text(good.replace("concurrency: 2", "concurrency: -2"))
    assert main(["validate", "-f", str(path)]) == 2
    assert "document 2 of 2: spec.interactive.concurrency: must be" in capsys.readouterr().err
