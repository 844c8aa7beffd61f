"""From YAML text or a mapping to an `InferencePool`, or a `SpecError` that says all that is wrong.

The edge where untrusted input is validated, once. Knows nothing of clusters or files; called by the
command line, the operator's watch and the journal's reader.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from chairlift_operator.spec import API_VERSION, KIND, InferencePool

_ADAPTER: TypeAdapter[InferencePool] = TypeAdapter(InferencePool)
_TAGS = frozenset({"named", "costs"})  # of the profile union; not part of the user's path


class SpecError(ValueError):
    """A pool that cannot be accepted. `problems` holds one sentence for each thing to change."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def parse_pool(source: str | Mapping[str, Any]) -> InferencePool:
    document = _load_yaml(source) if isinstance(source, str) else dict(source)
    problems = _header_problems(document)
    try:
        pool = _ADAPTER.validate_python({**document, "apiVersion": API_VERSION, "kind": KIND})
    except ValidationError as error:
        raise SpecError(problems + [_sentence(detail) for detail in error.errors()]) from None
    if problems:
        raise SpecError(problems)
    return pool


def pool_to_mapping(pool: InferencePool) -> dict[str, Any]:
    """The pool as its YAML would be, every default spelled out."""
    mapping: dict[str, Any] = _ADAPTER.dump_python(
        pool, by_alias=True, mode="json", exclude_none=True
    )
    return {"apiVersion": mapping.pop("apiVersion"), "kind": mapping.pop("kind"), **mapping}


def pool_hash(pool: InferencePool) -> str:
    """Names one spec in the journal; equal pools have equal hashes."""
    text = json.dumps(pool_to_mapping(pool), sort_keys=True)
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
    if not equals or not leaf:
        return f"{setting!r}: write path.to.field=value, such as interactive.batchSize.max=32."
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return f"spec.{path}: {text!r} is not a YAML value."
    node = spec
    for depth, part in enumerate(parents):
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            above = ".".join(parents[: depth + 1])
            return f"spec.{path}: cannot be set, because spec.{above} is {node!r}, not an object."
    node[leaf] = value
    return None


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key given twice, where YAML would silently keep the last."""


def _construct_unique(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.value in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"{key_node.value!r} is given twice", key_node.start_mark
            )
        seen.add(key_node.value)
    return loader.construct_mapping(node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_unique)


def _load_yaml(text: str) -> dict[str, Any]:
    try:
        # A SafeLoader by inheritance: constructs no Python objects.
        documents = [d for d in yaml.load_all(text, _UniqueKeyLoader) if d is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SpecError([f"{where}not valid YAML: {error.problem}."]) from None
    except yaml.YAMLError as error:
        raise SpecError([f"not valid YAML: {error}."]) from None
    if len(documents) != 1:
        raise SpecError([f"holds {len(documents)} documents: give exactly one InferencePool."])
    if not isinstance(documents[0], dict):
        kind = type(documents[0]).__name__
        raise SpecError([f"holds a {kind}: give an object that starts with apiVersion and kind."])
    return documents[0]


def _header_problems(document: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if name not in document:
            problems.append(f"{name}: is missing: add '{name}: {wanted}'.")
        elif document[name] != wanted:
            problems.append(f"{name}: is {_shown(document[name])}: this version takes {wanted}.")
    return problems


def _sentence(detail: ErrorDetails) -> str:
    location = [str(part) for part in detail["loc"] if part not in _TAGS]
    path = ".".join(location) or "the document"
    kind, given = detail["type"], _shown(detail["input"])
    context = detail.get("ctx", {})
    if kind == "unexpected_keyword_argument":
        return f"{path}: is not a field here{_suggestion(location)}"
    if kind == "missing":
        return f"{path}: is missing: add it."
    if kind == "value_error":
        demand = str(context["error"])
        return (
            f"{path}: {demand}."
            if isinstance(detail["input"], Mapping)
            else (f"{path}: {demand}, not {given}.")
        )
    if kind == "literal_error":
        return f"{path}: must be {context['expected']}, not {given}."
    if kind in ("dataclass_type", "dataclass_exact_type"):
        return f"{path}: must be an object with fields, not {given}."
    demand = detail["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"{path}: must be {demand}, not {given}."


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _suggestion(location: list[str]) -> str:
    known = _known_fields(location[:-1])
    close = difflib.get_close_matches(location[-1], known, n=1)
    if not close:  # a snake_case spelling or another case of a known name
        close = [name for name in known if name.lower() == to_camel(location[-1]).lower()]
    if close:
        return f"; did you mean {close[0]}?"
    return f": remove it; known here: {', '.join(known)}." if known else ": remove it."


def _known_fields(path: Sequence[str]) -> list[str]:
    level: Any = InferencePool
    for part in path:
        level = _fields_of(level).get(part)
    return list(_fields_of(level))


def _fields_of(annotation: Any) -> dict[str, Any]:
    """Names as YAML spells them, with the type of each, for a dataclass or a union holding one."""
    for candidate in _flatten(annotation):
        if isinstance(candidate, type) and is_dataclass(candidate):
            hints = get_type_hints(candidate, include_extras=True)
            return {_alias(f.name, hints[f.name]): hints[f.name] for f in fields(candidate)}
    return {}


def _flatten(annotation: Any) -> list[Any]:
    if get_origin(annotation) is None:
        return [annotation]
    arguments = get_args(annotation)
    inner = arguments[:1] if get_origin(annotation) is Annotated else arguments
    return [leaf for argument in inner for leaf in _flatten(argument)]


def _alias(name: str, hint: Any) -> str:
    for note in getattr(hint, "__metadata__", ()):
        if isinstance(note, FieldInfo) and note.alias:
            return note.alias
    return to_camel(name)
