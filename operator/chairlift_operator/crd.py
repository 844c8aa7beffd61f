"""The CustomResourceDefinition of `InferencePool`, made from the spec's and the status's classes.

`python -m chairlift_operator.crd FILE` writes it (`make crds`); a test fails while the file in
`crds/` is another. What the parser refuses is refused here too wherever a structural schema or CEL
can say it, in words that say what to change.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import yaml

from chairlift_operator.api_group import GROUP, KIND, PLURAL, VERSION
from chairlift_operator.crd_text import DESCRIPTIONS, PLACES
from chairlift_operator.spec import PoolSpec
from chairlift_operator.status_model import PoolStatus
from chairlift_operator.structural_schema import Annotations, Json, Rule, schema_of

_NAME: Final = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"

# Messages say no values: the server shows them, and an expression that spells out a number is
# priced as if the number had no end.
_BOUNDS = Rule("self.min <= self.max", "min is above max: lower min or raise max")
_STEP_HOLDS_BATCH = Rule(
    "self.batchSize.max <= self.stepTokens.max",
    "batchSize.max is above stepTokens.max, but every running sequence takes a token of each step: "
    "lower batchSize.max or raise stepTokens.max",
)
_LEAST = "self.interactive.replicas.min + (has(self.batch) ? self.batch.replicas.min : 0)"
RULES: Final = {
    "spec": (
        Rule(
            f"!has(self.capacity) || {_LEAST} <= self.capacity.replicas",
            "interactive.replicas.min and batch.replicas.min together are above "
            "capacity.replicas: lower a min or raise capacity.replicas",
        ),
    ),
    "spec.model": (
        Rule(
            "!has(self.huggingFace) || self.source.startsWith('hf://')",
            "huggingFace only works with a source that begins with hf://: set such a source, or "
            "remove huggingFace",
        ),
    ),
    "spec.model.name": (
        Rule(
            "self == oldSelf",
            "model.name cannot change, because clients ask for it by this name: make another "
            "pool, then delete this one",
        ),
    ),
    "spec.runtime": (
        Rule(
            "!has(self.simulator) || self.engine == 'simulator'",
            "simulator only works with 'engine: simulator': set that, or remove simulator",
        ),
    ),
    "spec.metrics": (
        Rule(
            "!has(self.url) || (has(self.source) && self.source == 'Prometheus')",
            "url only works with 'source: Prometheus': set that, or remove url",
        ),
    ),
    "spec.interactive": (_STEP_HOLDS_BATCH,),
    "spec.batch": (
        _STEP_HOLDS_BATCH,
        Rule(
            "has(self.borrowing) || self.replicas.max > 0",
            "batch work would have nowhere to run: set replicas.max to 1 or more, or add "
            "borrowing, so that it runs on interactive replicas",
        ),
    ),
    "spec.batch.borrowing": (
        Rule(
            "duration(self.returnWithin) >= duration('10s')",
            "returnWithin is below 10s, two of the controller's ticks: raise it",
        ),
    ),
    **{
        f"spec.{part}.{bounds}": (_BOUNDS,)
        for part in ("interactive", "batch")
        for bounds in ("replicas", "batchSize", "stepTokens")
    },
}
EXTRA: Final[dict[str, Json]] = {
    "status.conditions": {
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    },
    "status.signals": {"x-kubernetes-list-type": "atomic"},
    "status.decisions": {"x-kubernetes-list-type": "atomic"},
}
# A pool at a glance: does it meet its objectives, where are the knobs, why did they last move.
_COLUMNS = (
    ("Model", "string", ".spec.model.name", 1),
    ("Interactive", "string", ".status.interactive.replicas", 0),
    ("Batch", "string", ".status.batch.replicas", 0),
    ("SLO", "string", ".status.slo", 0),
    ("Batch size", "integer", ".status.interactive.batchSize", 0),
    ("Step tokens", "integer", ".status.interactive.stepTokens", 0),
    ("Reason", "string", ".status.lastReason", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)


def definition() -> Json:
    notes = Annotations(DESCRIPTIONS, RULES, EXTRA)
    names = {
        "kind": KIND,
        "listKind": "InferencePoolList",
        "plural": PLURAL,
        "singular": "inferencepool",
        "shortNames": ["ipool"],
        "categories": ["chairlift"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": names,
            "scope": "Namespaced",
            "versions": [_version(notes)],
        },
    }


def _version(notes: Annotations) -> Json:
    root: Json = {
        "description": PLACES[""],
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"description": PLACES["apiVersion"], "type": "string"},
            "kind": {"description": PLACES["kind"], "type": "string"},
            "metadata": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 40, "pattern": _NAME}},
            },
            "spec": schema_of(PoolSpec, "spec", notes),
            "status": schema_of(PoolStatus, "status", notes),
        },
    }
    columns = [
        {"name": name, "type": kind, "jsonPath": path, **({"priority": p} if p else {})}
        for name, kind, path, p in _COLUMNS
    ]
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": root},
    }


def text() -> str:
    header = (
        "# Written by `make crds` from operator/chairlift_operator/{spec*,crd*,status_model}.py.\n"
    )
    return header + yaml.dump(definition(), Dumper=_PlainDumper, sort_keys=False, width=100)


class _PlainDumper(yaml.SafeDumper):
    """Writes shared parts out instead of naming them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text(), encoding="utf-8")
