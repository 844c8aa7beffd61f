"""From the spec's dataclasses to the structural schema that Kubernetes takes: names, types, bounds,
defaults. What types cannot say is handed in by path: descriptions, and CEL rules.

Knows no field by name; `crd` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

Json = dict[str, Any]
_LEAF_KEYS = (
    "type", "enum", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minLength",
    "maxLength", "pattern", "items", "additionalProperties",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rule:
    """A CEL rule, and what to change where it does not hold."""

    rule: str
    message: str

    def to_json(self) -> Json:
        return {"rule": self.rule, "message": self.message}


@dataclass(frozen=True, slots=True)
class Annotations:
    """What a schema says beside the types, by path such as `spec.interactive.replicas.min`."""

    descriptions: Mapping[str, str]
    rules: Mapping[str, Sequence[Rule]] = field(default_factory=dict)
    extra: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def schema_of(hint: Any, path: str, notes: Annotations) -> Json:
    """KeyError when something at or below the path has no description."""
    inner, required_hint = _unwrapped(hint), _without_none(hint)
    if isinstance(inner, type) and is_dataclass(inner):
        schema = _object(inner, path, notes)
    elif item := _item_class(inner):
        schema = {"type": "array", "items": schema_of(item, path + "[]", notes)}
    else:
        schema = _leaf(required_hint)
    schema = {"description": notes.descriptions[path], **schema, **notes.extra.get(path, {})}
    if rules := [rule.to_json() for rule in notes.rules.get(path, ())]:
        schema["x-kubernetes-validations"] = [
            *schema.get("x-kubernetes-validations", ()), *rules
        ]  # fmt: skip
    return schema


def _object(cls: type[Any], path: str, notes: Annotations) -> Json:
    hints = get_type_hints(cls, include_extras=True)
    properties, required = {}, []
    for item in fields(cls):
        name = alias_of(item.name, hints[item.name])
        prop = schema_of(hints[item.name], f"{path}.{name}", notes)
        if (default := _default(item, hints[item.name])) is not None:
            prop["default"] = default
        elif item.default is MISSING and item.default_factory is MISSING:
            required.append(name)
        properties[name] = prop
    schema: Json = {"type": "object", "properties": properties}
    return {**schema, "required": required} if required else schema


def alias_of(name: str, hint: Any) -> str:
    for note in getattr(hint, "__metadata__", ()):
        if isinstance(note, FieldInfo) and note.alias:
            return note.alias
    return to_camel(name)


def _default(item: Field[Any], hint: Any) -> Any:
    """None: there is none. An object's is spelled out: the server judges it by the rules as it is,
    before the defaults inside it."""
    value = item.default
    if item.default_factory is not MISSING:
        value = item.default_factory()
    if value is MISSING or value is None or value == {} or value == ():
        return None
    return _adapter(hint).dump_python(value, mode="json", by_alias=True, exclude_none=True)


def _leaf(hint: Any) -> Json:
    told = _adapter(hint).json_schema()
    if told.get("x-kubernetes-preserve-unknown-fields"):
        kind = {"type": "object"} if told.get("type") == "object" else {}
        return {**kind, "x-kubernetes-preserve-unknown-fields": True}
    if told.get("x-kubernetes-int-or-string"):
        return {"x-kubernetes-int-or-string": True, "pattern": told["pattern"]}
    if "const" in told:
        told = {**told, "enum": [told["const"]]}
    schema = {key: told[key] for key in _LEAF_KEYS if key in told}
    for bound in ("Minimum", "Maximum"):  # OpenAPI 3.0 spells these as a flag
        if (limit := schema.pop(f"exclusive{bound}", None)) is not None:
            schema |= {bound.lower(): limit, f"exclusive{bound}": True}
    if isinstance(schema.get("additionalProperties"), dict):
        schema["additionalProperties"] = _leaf(get_args(_unwrapped(hint))[1])
    least = schema.get("minimum", 0)
    if not float(least).is_integer():
        # The API server compares a whole value with the limit's whole part: 0 would pass.
        rule = {"rule": f"self >= {least}", "message": f"must be at least {least}"}
        schema["x-kubernetes-validations"] = [rule]
    schema |= {key: told[key] for key in told if key.startswith("x-kubernetes-")}
    return schema


def _adapter(hint: Any) -> TypeAdapter[Any]:
    """Of a field's type by itself: an alias belongs to the field, its bounds to the type."""
    if get_origin(hint) is not Annotated:
        return TypeAdapter(hint)
    inner, *notes = get_args(hint)
    bare = [n for note in notes for n in (note.metadata if isinstance(note, FieldInfo) else [note])]
    return TypeAdapter(Annotated[(inner, *bare)] if bare else inner)


def _unwrapped(hint: Any) -> Any:
    """Without Annotated and without `| None`."""
    hint = _without_none(hint)
    return _unwrapped(get_args(hint)[0]) if get_origin(hint) is Annotated else hint


def _without_none(hint: Any) -> Any:
    arguments = get_args(hint)
    if type(None) in arguments and len(arguments) == 2:
        return next(a for a in arguments if a is not type(None))
    return hint


def _item_class(hint: Any) -> type[Any] | None:
    """The dataclass that a homogeneous tuple holds."""
    if get_origin(hint) is not tuple:
        return None
    item = _unwrapped(get_args(hint)[0])
    return item if is_dataclass(item) and isinstance(item, type) else None
