"""From YAML text or a mapping to an `InferencePool`, or a `SpecError` that says all that is wrong.

The edge where untrusted input is validated, once. Knows nothing of clusters or files; called by the
command line, the operator's watch and the journal's reader.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from chairlift_operator.api_group import API_VERSION, KIND
from chairlift_operator.plain_yaml import NotYaml, read_yaml
from chairlift_operator.spec import InferencePool

_ADAPTER: TypeAdapter[InferencePool] = TypeAdapter(InferencePool)
_TAGS = frozenset({"named", "file", "costs"})  # of the profile union; not part of the user's path
_SHORT = reprlib.Repr()  # of what a user gave: never the whole of a huge or endless value
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 60, 60, 60


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


def hardware_hash(pool: InferencePool) -> str:
    """Names what step times depend on: pools with equal ones may begin with each other's model."""
    spec = pool_to_mapping(pool)["spec"]
    model = {k: v for k, v in spec["model"].items() if k in ("source", "dtype")}
    runtime = {k: v for k, v in spec.get("runtime", {}).items() if k != "sharePrefixes"}
    text = json.dumps([model, runtime], sort_keys=True)
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
        return f"{_shown(setting)}: write path.to.field=value, such as {example}."
    path = ".".join([*parents, leaf])
    try:
        documents = read_yaml(text)
    except NotYaml as error:
        return f"spec.{path}: {_shown(text)} is not a YAML value: {error}."
    if len(documents) > 1:
        return f"spec.{path}: {_shown(text)} is not a YAML value but {len(documents)} documents."
    node = spec
    for depth, part in enumerate(parents):
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            above = ".".join(parents[: depth + 1])
            why = f"spec.{above} is {_shown(node)}, not an object"
            return f"spec.{path}: cannot be set, because {why}."
    node[leaf] = documents[0] if documents else None
    return None


def _load_yaml(text: str) -> dict[str, Any]:
    try:
        documents = [d for d in read_yaml(text) if d is not None]
    except NotYaml as error:
        raise SpecError([f"{error.where}not valid YAML: {error}."]) from None
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
    location = _location(detail["loc"])
    path = ".".join(location) or "the document"
    kind, given = detail["type"], _shown(detail["input"])
    context = detail.get("ctx", {})
    if kind == "unexpected_keyword_argument":
        return f"{path}: is not a field here{_suggestion(location)}"
    if kind == "invalid_key":
        return f"{path}: is not a field here: the name of a field is text."
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
    demand = detail["msg"].removeprefix("Input should be ")
    demand = demand.replace("a valid integer", "an integer").replace("a valid ", "a ")
    return f"{path}: must be {demand}, not {given}{_hint(location, detail['input'])}."


def _hint(location: list[str], given: object) -> str:
    is_share = isinstance(given, float) and 0 < given < 1
    is_percentage = location[-1:] == ["objective"]
    return ": it is a percentage, such as 95" if is_percentage and is_share else ""


def _location(parts: Sequence[int | str]) -> list[str]:
    """The path as the user writes it."""
    return [
        str(part) or "''"
        for before, part in zip((None, *parts), parts, strict=False)
        if not (before == "profile" and part in _TAGS)
    ]


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)  # as YAML spells it
    try:
        text = _SHORT.repr(value)
    except ValueError:  # Python refuses to spell out thousands of digits
        return "a number of thousands of digits"
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
