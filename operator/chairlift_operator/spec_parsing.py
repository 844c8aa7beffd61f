"""From YAML text or a mapping to an `InferencePool`, with overrides from a command line.

Called by the command line, the operator's watch and the journal's reader.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from chairlift_operator.api_group import KIND
from chairlift_operator.parsing import Form, shown
from chairlift_operator.parsing import SpecError as SpecError
from chairlift_operator.plain_yaml import NotYaml, read_yaml
from chairlift_operator.spec import InferencePool

_FORM: Final = Form(KIND, InferencePool)


def parse_pool(source: str | Mapping[str, Any]) -> InferencePool:
    """Raise SpecError."""
    return _FORM.parse(source)


def pool_to_mapping(pool: InferencePool) -> dict[str, Any]:
    """The pool as its YAML would be, every default spelled out."""
    return _FORM.to_mapping(pool)


def pool_hash(pool: InferencePool) -> str:
    """Names one spec in the journal; equal pools have equal hashes."""
    text = json.dumps(pool_to_mapping(pool), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def hardware_hash(pool: InferencePool) -> str:
    """Names what step times depend on: pools with equal ones may begin with each other's model."""
    model, runtime = pool.spec.model, replace(pool.spec.runtime, share_prefixes=False)
    # A volume claim of that name holds other files in another namespace.
    place = pool.namespace if model.source.startswith("pvc://") else ""
    text = repr((model.source, place, model.dtype, runtime))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def with_overrides(pool: InferencePool, settings: Sequence[str]) -> InferencePool:
    """The pool with `path.to.field=value` settings applied, paths relative to `spec`."""
    mapping = copy.deepcopy(pool_to_mapping(pool))
    problems = [problem for setting in settings if (problem := _override(mapping["spec"], setting))]
    if problems:
        raise SpecError(problems)
    return parse_pool(mapping)


def _override(spec: dict[str, Any], setting: str) -> str | None:
    path, equals, text = setting.partition("=")
    *parents, leaf = path.strip().removeprefix("spec.").split(".")
    if not equals or not leaf or not all(parents):
        example = "interactive.batchSize.max=32"
        return f"{shown(setting)}: write path.to.field=value, such as {example}."
    path = ".".join([*parents, leaf])
    try:
        documents = read_yaml(text)
    except NotYaml as error:
        return f"spec.{path}: {shown(text)} is not a YAML value: {error}."
    if len(documents) > 1:
        return f"spec.{path}: {shown(text)} is not a YAML value but {len(documents)} documents."
    node = spec
    for depth, part in enumerate(parents):
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            above = ".".join(parents[: depth + 1])
            why = f"spec.{above} is {shown(node)}, not an object"
            return f"spec.{path}: cannot be set, because {why}."
    node[leaf] = documents[0] if documents else None
    return None
