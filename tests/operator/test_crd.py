from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from chairlift_gateway.config import GatewayConfig
from chairlift_operator import crd
from chairlift_operator.crd_form import Resource, text
from chairlift_operator.spec_parsing import SpecError, parse_pool, pool_to_mapping

ROOT = Path(__file__).parents[2]
FILE = ROOT / "crds" / "inferencepools.chairlift.dev.yaml"
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
Json = dict[str, Any]
FULL: Json = {
    "apiVersion": "chairlift.dev/v1alpha1",
    "kind": "InferencePool",
    "metadata": {"name": "chat"},
    "spec": {
        "model": {"name": "m", "source": "hf://o/m", "huggingFace": {"cacheClaim": "hub"}},
        "runtime": {"engine": "simulator", "simulator": {}, "resources": {"limits": {"cpu": 1}}},
        "capacity": {"replicas": 8},
        "batch": {"replicas": {"max": 2}, "borrowing": {}},
        "gateway": {},
        "quotas": {"redis": {"url": "rediss://redis:6379/0"}},
    },
}


def _version(file: Path = FILE) -> Json:
    version: Json = yaml.safe_load(file.read_text())["spec"]["versions"][0]
    return version


SCHEMA: Json = _version()["schema"]["openAPIV3Schema"]["properties"]


def _leaves(schema: Json, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Json]]:
    for name, prop in schema.get("properties", {}).items():
        yield (*path, name), prop
        yield from _leaves(prop, (*path, name))


GATEWAY_BOUNDS = ("replicaConcurrency", "batchMaxBodyBytes")
LEAVES = list(_leaves(SCHEMA["spec"], ("spec",)))


def test_the_files_are_what_make_crds_writes() -> None:
    written = {path.name: path.read_text() for path in FILE.parent.glob("*.yaml")}
    made = {f"{resource.name}.yaml": text(resource) for resource in crd.RESOURCES}
    assert written == made, "run make crds"


@pytest.mark.parametrize("resource", crd.RESOURCES, ids=lambda resource: resource.kind)
def test_every_field_has_a_sentence_and_a_type(resource: Resource) -> None:
    version = _version(FILE.with_name(f"{resource.name}.yaml"))
    known = version["schema"]["openAPIV3Schema"]["properties"]
    for root in ("spec", "status"):
        for path, schema in _leaves(known[root], (root,)):
            assert schema["description"].endswith("."), path
            free = schema.get("x-kubernetes-preserve-unknown-fields")
            assert "type" in schema or free, path


@pytest.mark.parametrize("resource", crd.RESOURCES, ids=lambda resource: resource.kind)
def test_columns_show_fields_that_are_there(resource: Resource) -> None:
    version = _version(FILE.with_name(f"{resource.name}.yaml"))
    known = version["schema"]["openAPIV3Schema"]["properties"]
    paths = {".".join(("", *path)) for root in ("spec", "status") for path, _ in
             _leaves(known[root], (root,))}  # fmt: skip
    shown = {column["jsonPath"] for column in version["additionalPrinterColumns"]}
    assert shown - paths <= {".metadata.creationTimestamp"}


def _defaulted(value: Any, schema: Json) -> Any:
    """As the API server does it: outer defaults first, then those inside them."""
    if not isinstance(value, dict):
        return value
    known = dict(value)
    for name, prop in schema.get("properties", {}).items():
        if name not in known and "default" in prop:
            known[name] = copy.deepcopy(prop["default"])
        if name in known:
            known[name] = _defaulted(known[name], prop)
    return known


@pytest.mark.parametrize("sections", [("model",), tuple(FULL["spec"])], ids=["minimal", "full"])
def test_server_and_parser_fill_in_the_same_defaults(sections: tuple[str, ...]) -> None:
    given = {**FULL, "spec": {name: FULL["spec"][name] for name in sections}}
    parsed = pool_to_mapping(parse_pool(given))["spec"]
    defaulted = {**given, "spec": _defaulted(given["spec"], SCHEMA["spec"])}
    assert pool_to_mapping(parse_pool(defaulted))["spec"] == parsed
    for path, schema in LEAVES:
        here = _at(parsed, path[1:])
        is_default = _at(given, path) is None and here is not None and not isinstance(here, dict)
        assert not is_default or here == schema.get("default", here), path


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _out_of_bounds() -> Iterator[Any]:
    for path, schema in LEAVES:
        limits = [(schema[k], d) for k, d in (("minimum", -1), ("maximum", 1)) if k in schema]
        values = [limit + step for limit, step in limits]
        values += ["neither of them"] if "enum" in schema else []
        values += ["not / like $ this!"] if schema.get("pattern", "").startswith("^") else []
        for value in values:
            yield pytest.param(path, value, id=f"{'.'.join(path)}={value}")


@pytest.mark.parametrize(("path", "value"), list(_out_of_bounds()))
def test_what_the_schema_refuses_the_parser_refuses(path: tuple[str, ...], value: Any) -> None:
    pool = copy.deepcopy(FULL)
    node = pool
    for name in path[:-1]:
        node = node.setdefault(name, {})
    node[path[-1]] = value
    with pytest.raises(SpecError) as caught:
        parse_pool(pool)
    assert ".".join(path[:-1]) in str(caught.value)


@pytest.mark.parametrize(
    ("path", "lowest", "highest"),
    [
        ("spec.interactive.slo.timeToFirstToken.objective", 1, 99.99),
        ("spec.interactive.stepTokens.min", 16, 1_000_000),
        ("spec.batch.replicas.max", 0, 1_000_000),
        ("spec.gateway.replicas", 1, 100),
        ("spec.gateway.replicaConcurrency", 1, 1_000_000),
        ("spec.gateway.batchMaxBodyBytes", 1, 2**30),
    ],
)
def test_bounds_reach_the_schema(path: str, lowest: float, highest: float) -> None:
    schema = dict(LEAVES)[tuple(path.split("."))]
    assert (schema["minimum"], schema["maximum"]) == (lowest, highest)


def test_what_a_gateway_does_without_a_bound_is_told_as_it_is() -> None:
    usual, leaves = GatewayConfig(endpoints_path=None, internal_token=""), dict(LEAVES)
    told = {name: leaves["spec", "gateway", name]["description"] for name in GATEWAY_BOUNDS}
    assert usual.replica_concurrency == 256
    assert usual.batch_max_body_bytes == usual.max_body_bytes == 10 * 2**20
    assert "left out: 256." in told["replicaConcurrency"]
    assert "left out: 10 MiB, as for interactive ones." in told["batchMaxBodyBytes"]


def test_a_column_for_each_question() -> None:
    columns = {column["name"] for column in _version()["additionalPrinterColumns"]}
    assert columns >= {"SLO", "Batch size", "Step tokens", "Reason"}


@pytest.mark.parametrize(
    "example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.stem
)
def test_examples_use_only_fields_of_the_schema(example: Path) -> None:
    def check(value: Any, schema: Json, path: str) -> None:
        if schema.get("x-kubernetes-preserve-unknown-fields") or not isinstance(value, dict):
            return
        extra = schema.get("additionalProperties")
        for name, inner in value.items():
            prop = extra or schema["properties"][name]
            check(inner, prop, f"{path}.{name}")

    check(yaml.safe_load(example.read_text())["spec"], SCHEMA["spec"], "spec")
