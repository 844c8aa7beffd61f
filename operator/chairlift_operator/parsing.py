"""From YAML text or a mapping to an object of a kind, or a `SpecError` that says all that is wrong.

The edge where untrusted input is validated, once. Knows no field by name, nothing of clusters or
files; `spec_parsing` and `quota_parsing` call it, each for its kind.
"""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from chairlift_operator.api_group import API_VERSION
from chairlift_operator.plain_yaml import NotYaml, read_yaml

_TAGS = frozenset({"named", "file", "costs"})  # of the profile union; not part of the user's path
_TOP_FIELDS = ("apiVersion", "kind", "metadata", "spec")
_PERCENTAGE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%?\s*")
_SHORT = reprlib.Repr()  # of what a user gave: never the whole of a huge or endless value
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 60, 60, 60
_T = TypeVar("_T")


class SpecError(ValueError):
    """An object that cannot be accepted. `problems` holds one sentence for each thing to change."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class Form(Generic[_T]):
    """A kind and the dataclass of its objects, whose annotations say how YAML spells them."""

    def __init__(self, kind: str, of: type[_T]) -> None:
        self._kind = kind
        self._class = of
        self._adapter: TypeAdapter[_T] = TypeAdapter(of)

    def parse(self, source: str | Mapping[str, Any]) -> _T:
        document = self._load(source) if isinstance(source, str) else dict(source)
        if not any(name in document for name in _TOP_FIELDS):
            # Some other file: every field of it would be wrong, and every one of ours missing.
            known = ", ".join(_TOP_FIELDS)
            raise SpecError([f"is no {self._kind}: it has none of {known}; give another file."])
        problems = self._header_problems(document)
        header = {"apiVersion": API_VERSION, "kind": self._kind}
        try:
            parsed = self._adapter.validate_python({**document, **header})
        except ValidationError as error:
            told = [_sentence(detail, self._class) for detail in error.errors()]
            raise SpecError(problems + told) from None
        if problems:
            raise SpecError(problems)
        return parsed

    def to_mapping(self, parsed: _T) -> dict[str, Any]:
        """The object as its YAML would be, every default spelled out."""
        mapping: dict[str, Any] = self._adapter.dump_python(
            parsed, by_alias=True, mode="json", exclude_none=True
        )
        return {"apiVersion": mapping.pop("apiVersion"), "kind": mapping.pop("kind"), **mapping}

    def _load(self, text: str) -> dict[str, Any]:
        try:
            documents = [d for d in read_yaml(text) if d is not None]
        except NotYaml as error:
            raise SpecError([f"{error.where}not valid YAML: {error}."]) from None
        if len(documents) != 1:
            raise SpecError([f"holds {len(documents)} documents: give exactly one {self._kind}."])
        if not isinstance(documents[0], dict):
            kind = type(documents[0]).__name__
            told = f"holds a {kind}: give an object that starts with apiVersion and kind."
            raise SpecError([told])
        return documents[0]

    def _header_problems(self, document: Mapping[str, Any]) -> list[str]:
        problems = []
        for name, wanted in (("apiVersion", API_VERSION), ("kind", self._kind)):
            if name not in document:
                problems.append(f"{name}: is missing: add '{name}: {wanted}'.")
            elif document[name] != wanted:
                problems.append(f"{name}: is {shown(document[name])}: this version takes {wanted}.")
        return problems


def _sentence(detail: ErrorDetails, root: type[Any]) -> str:
    location = _location(detail["loc"])
    path = ".".join(location) or "the document"
    kind, given = detail["type"], shown(detail["input"])
    context = detail.get("ctx", {})
    if kind == "unexpected_keyword_argument":
        return f"{path}: is not a field here{_suggestion(location, root)}"
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
    if location[-1:] != ["objective"]:
        return ""
    if isinstance(given, str) and (number := _PERCENTAGE.fullmatch(given)):
        return f": write {number[1]}"
    is_share = isinstance(given, float) and 0 < given < 1
    return ": it is a percentage, such as 95" if is_share else ""


def _location(parts: Sequence[int | str]) -> list[str]:
    """The path as the user writes it."""
    return [
        str(part) or "''"
        for before, part in zip((None, *parts), parts, strict=False)
        if not (before == "profile" and part in _TAGS)
    ]


def shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)  # as YAML spells it
    try:
        text = _SHORT.repr(value)
    except ValueError:  # Python refuses to spell out thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def _suggestion(location: list[str], root: type[Any]) -> str:
    known = _known_fields(location[:-1], root)
    close = difflib.get_close_matches(location[-1], known, n=1)
    if not close:  # a snake_case spelling or another case of a known name
        close = [name for name in known if name.lower() == to_camel(location[-1]).lower()]
    if close:
        return f"; did you mean {close[0]}?"
    return f": remove it; known here: {', '.join(known)}." if known else ": remove it."


def _known_fields(path: Sequence[str], root: type[Any]) -> list[str]:
    level: Any = root
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
