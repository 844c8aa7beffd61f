"""A CustomResourceDefinition from the classes of a kind's spec and status, and its text as a file.

Knows no kind by name; `crd` says which there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from chairlift_operator.api_group import GROUP, VERSION
from chairlift_operator.structural_schema import Annotations, Json, schema_of

# One writer may set a condition without naming the others.
CONDITIONS: Final[dict[str, Json]] = {
    "status.conditions": {
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    },
}


@dataclass(frozen=True, slots=True)
class Column:
    """What `kubectl get` shows; priority 1: only with `-o wide`."""

    name: str
    kind: str
    path: str
    priority: int = 0

    def to_json(self) -> Json:
        shown = {"name": self.name, "type": self.kind, "jsonPath": self.path}
        return {**shown, **({"priority": self.priority} if self.priority else {})}


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind. places: sentences on the object itself, its apiVersion and its kind.

    name_schema: what an object's own name must be. sources: where the file says it comes from.
    """

    kind: str
    plural: str
    short_name: str
    spec: type[Any]
    status: type[Any]
    notes: Annotations
    places: Mapping[str, str]
    columns: Sequence[Column]
    name_schema: Mapping[str, Any]
    sources: str

    @property
    def name(self) -> str:
        return f"{self.plural}.{GROUP}"


def definition(resource: Resource) -> Json:
    names = {
        "kind": resource.kind,
        "listKind": f"{resource.kind}List",
        "plural": resource.plural,
        "singular": resource.kind.lower(),
        "shortNames": [resource.short_name],
        "categories": ["chairlift"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": resource.name},
        "spec": {
            "group": GROUP,
            "names": names,
            "scope": "Namespaced",
            "versions": [_version(resource)],
        },
    }


def _version(resource: Resource) -> Json:
    places, notes = resource.places, resource.notes
    root: Json = {
        "description": places[""],
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"description": places["apiVersion"], "type": "string"},
            "kind": {"description": places["kind"], "type": "string"},
            "metadata": {"type": "object", "properties": {"name": dict(resource.name_schema)}},
            "spec": schema_of(resource.spec, "spec", notes),
            "status": schema_of(resource.status, "status", notes),
        },
    }
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [column.to_json() for column in resource.columns],
        "schema": {"openAPIV3Schema": root},
    }


def text(resource: Resource) -> str:
    header = f"# Written by `make crds` from operator/chairlift_operator/{resource.sources}.\n"
    body = yaml.dump(definition(resource), Dumper=_PlainDumper, sort_keys=False, width=100)
    return header + body


class _PlainDumper(yaml.SafeDumper):
    """Writes shared parts out instead of naming them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
