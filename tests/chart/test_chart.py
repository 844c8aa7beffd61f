"""The chart says what it means: goldens, no wildcards, hardened pods, refused typos."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from chairlift_operator.kube.settings import Settings

if TYPE_CHECKING:
    from conftest import Helm

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "chairlift"
GOLDENS = {
    "default": (),
    "two-namespaces": ("watchNamespaces={chat,search}", "crds.install=false"),
    "pinned": (
        "replicas=1",
        "images.registry=localhost",
        "images.tag=e2e",
        "images.pullPolicy=Never",
        "images.pullSecrets[0].name=registry-key",
        "crds.install=false",
        "prometheus.url=http://prometheus.monitoring:9090",
        "nodeSelector.pool=system",
        "tolerations[0].operator=Exists",
        "priorityClassName=system-cluster-critical",
    ),
}
CASES = sorted(GOLDENS)


def of_kind(objects: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [found for found in objects if found["kind"] in kinds]


def without_crds(rendered: str) -> str:
    """CRDs are compared with crds/ instead; a second copy in a golden would only be noise."""
    documents = re.split(r"(?m)^---$", rendered)
    return "---".join(d for d in documents if "\nkind: CustomResourceDefinition" not in d)


@pytest.mark.parametrize("name", CASES)
def test_what_is_installed_changes_only_on_purpose(helm: Helm, name: str) -> None:
    golden = Path(__file__).parent / "golden" / f"{name}.yaml"
    rendered = without_crds(helm.template(GOLDENS[name]))
    if not golden.exists() or golden.read_text() != rendered:
        fresh = golden.with_suffix(".new")
        fresh.write_text(rendered)
        pytest.fail(f"compare {fresh} with {golden.name}; if it is what you meant, replace it")


def test_lint_has_no_findings(helm: Helm) -> None:
    linted = helm.run("lint", "--strict", str(CHART))
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize("name", CASES)
def test_no_right_is_a_wildcard_and_no_secret_can_be_listed(helm: Helm, name: str) -> None:
    roles = of_kind(helm.objects(GOLDENS[name]), "ClusterRole", "Role")
    rules = [rule for role in roles for rule in role["rules"]]
    assert rules
    assert not [r for r in rules if "*" in r["apiGroups"] + r["resources"] + r["verbs"]]
    for rule in rules:
        if "secrets" in rule["resources"]:
            assert not {"list", "watch"} & set(rule["verbs"])


def test_the_rights_are_those_that_the_docs_give_a_reason_for(helm: Helm) -> None:
    told = set()
    for row in (ROOT / "docs" / "rbac.md").read_text().splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if len(cells) == 4 and cells[0] != "API group" and not cells[0].startswith("--"):
            group, resources, verbs = ("" if cells[0] == "(core)" else cells[0]), cells[1], cells[2]
            told |= {(group, r, v) for r in resources.split(", ") for v in verbs.split(", ")}
    (role,) = of_kind(helm.objects(), "ClusterRole")
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == told


def test_with_namespaces_named_rights_on_pools_end_there(helm: Helm) -> None:
    objects = helm.objects(GOLDENS["two-namespaces"])
    assert of_kind(objects, "ClusterRole", "ClusterRoleBinding") == []
    granted = {role["metadata"]["namespace"] for role in of_kind(objects, "Role")}
    assert granted == {"system", "chat", "search"}
    (deployment,) = of_kind(objects, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--namespace=chat", "--namespace=search"]


@pytest.mark.parametrize("name", CASES)
def test_every_binding_binds_a_role_that_exists_to_the_operator(helm: Helm, name: str) -> None:
    objects = helm.objects(GOLDENS[name])
    roles = {
        (r["kind"], r["metadata"].get("namespace"), r["metadata"]["name"])
        for r in of_kind(objects, "Role", "ClusterRole")
    }
    bound = set()
    for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding"):
        namespace = binding["metadata"].get("namespace")
        bound.add((binding["roleRef"]["kind"], namespace, binding["roleRef"]["name"]))
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": "chairlift", "namespace": "system"}
        ]
    assert bound == roles


def test_the_operator_runs_unprivileged_on_a_read_only_root(helm: Helm) -> None:
    (deployment,) = of_kind(helm.objects(), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"livenessProbe", "readinessProbe", "resources"} <= container.keys()


def test_crds_are_those_of_the_tree_and_outlive_the_release(helm: Helm) -> None:
    tree = {p.name: p.read_text() for p in (ROOT / "crds").glob("*.yaml")}
    assert {p.name: p.read_text() for p in (CHART / "files" / "crds").glob("*.yaml")} == tree
    rendered = of_kind(helm.objects(), "CustomResourceDefinition")
    expected = [yaml.safe_load(text) for _, text in sorted(tree.items())]
    for crd in expected:
        crd["metadata"].setdefault("annotations", {})["helm.sh/resource-policy"] = "keep"
    assert rendered == expected
    assert of_kind(helm.objects(["crds.install=false"]), "CustomResourceDefinition") == []


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("replica=2", "replica"),
        ("replicas=0", "replicas"),
        ("images.pullPolicy=Sometimes", "pullPolicy"),
        ("images.registry=registry.example/", "registry"),
        ("images.registry=registry example", "registry"),
        ("resources.limits.memory.max=1Gi", "memory"),
        ("watchNamespaces={Chat}", "watchNamespaces"),
        ("crds.instal=true", "instal"),
        ("images.registry=null", "registry"),
        ("replicas=null", "replicas"),
        ("crds=null", "crds"),
        ("prometheus.url=prometheus:9090", "prometheus"),
        ("prometheus=null", "prometheus"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(
    helm: Helm, setting: str, named: str
) -> None:
    refused = helm.run("template", "chairlift", str(CHART), "--set", setting)
    assert refused.returncode != 0
    assert named in refused.stderr


def _texts(found: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What Kubernetes takes as text only, by the name of its field."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from _texts(value, "label" if "abels" in name else key)
    elif isinstance(found, list):
        for item in found:
            yield from _texts(item, name)
    elif name in ("name", "namespace", "value", "label", "image", "args", "resourceNames"):
        yield name, found


@pytest.mark.parametrize("watched", [(), ("--set-string=watchNamespaces={456,0x10}",)])
@pytest.mark.parametrize("name", ["123", "1e3", "true", "null", "a.b", "no", "x" * 53])
def test_names_that_yaml_would_read_as_something_else_are_text(
    helm: Helm, name: str, watched: tuple[str, ...]
) -> None:
    odd = ("--set-string=priorityClassName=007", "--set=crds.install=false", *watched)
    where = ("--namespace=456", "--kube-version=1.34.0")
    rendered = helm.run("template", name, str(CHART), *where, *odd)
    assert rendered.returncode == 0, rendered.stderr
    texts = list(_texts([found for found in yaml.safe_load_all(rendered.stdout) if found]))
    assert ("namespace", "456") in texts and ("label", name) in texts
    assert [(field, value) for field, value in texts if not isinstance(value, str)] == []


def test_a_release_may_lead_by_the_lease_that_its_operator_asks_for(helm: Helm) -> None:
    (role,) = of_kind(helm.objects(), "Role")
    environment = {"POD_NAME": "p", "POD_NAMESPACE": "system", "CHAIRLIFT_INSTANCE": "chairlift"}
    lease = Settings.from_environment(environment).lease_name
    assert [r["resourceNames"] for r in role["rules"] if "resourceNames" in r] == [[lease]]


def test_every_value_is_explained_and_has_a_schema() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    for before, line in zip(lines, lines[1:], strict=False):
        if re.match(r" *[a-zA-Z]+: *\S", line):
            assert before.lstrip().startswith("#"), f"values.yaml: no comment above {line.strip()}"
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load("\n".join(lines))
    assert values.keys() == schema["properties"].keys() - {"global"}


def test_the_chart_has_the_version_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == chart["version"] == project["version"]
