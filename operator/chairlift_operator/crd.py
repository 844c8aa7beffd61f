"""The CustomResourceDefinitions, made from the classes of each kind's spec and status.

`python -m chairlift_operator.crd FOLDER` writes them (`make crds`); a test fails while a file in
`crds/` is another. What the parser refuses is refused here too wherever a structural schema or CEL
can say it, in words that say what to change.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from chairlift_operator.api_group import KIND, PLURAL
from chairlift_operator.crd_form import CONDITIONS, Column, Resource, text
from chairlift_operator.crd_text import DESCRIPTIONS, PLACES
from chairlift_operator.quota_crd import QUOTAS
from chairlift_operator.spec import PoolSpec
from chairlift_operator.status_model import PoolStatus
from chairlift_operator.structural_schema import Annotations, Json, Rule

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
        Rule(
            "!has(self.gateway.anonymous) || self.gateway.anonymous != 'Refuse' || "
            "has(self.quotas) || has(self.gateway.trustedTenantHeader)",
            "gateway.anonymous: Refuse would refuse everybody, because nothing names tenants: add "
            "quotas or gateway.trustedTenantHeader, or remove anonymous",
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
    "spec.quotas.redis": (
        Rule(
            "!has(self.caSecret) || self.url.startsWith('rediss://')",
            "caSecret only works with a url that begins with rediss://: change one",
        ),
        Rule(
            "!has(self.user) || has(self.passwordSecret)",
            "user needs its password: add passwordSecret, or remove user",
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
    **CONDITIONS,
    "status.signals": {"x-kubernetes-list-type": "atomic"},
    "status.decisions": {"x-kubernetes-list-type": "atomic"},
}
POOLS: Final = Resource(
    kind=KIND,
    plural=PLURAL,
    short_name="ipool",
    spec=PoolSpec,
    status=PoolStatus,
    notes=Annotations(DESCRIPTIONS, RULES, EXTRA),
    places=PLACES,
    # A pool at a glance: does it meet its objectives, where are the knobs, why did they last move.
    columns=(
        Column("Model", "string", ".spec.model.name", 1),
        Column("Interactive", "string", ".status.interactive.replicas"),
        Column("Batch", "string", ".status.batch.replicas"),
        Column("SLO", "string", ".status.slo"),
        Column("Batch size", "integer", ".status.interactive.batchSize"),
        Column("Step tokens", "integer", ".status.interactive.stepTokens"),
        Column("Reason", "string", ".status.lastReason"),
        Column("Age", "date", ".metadata.creationTimestamp"),
    ),
    name_schema={"type": "string", "maxLength": 40, "pattern": _NAME},
    sources="{spec*,crd*,status_model}.py",
)
RESOURCES: Final = (POOLS, QUOTAS)


if __name__ == "__main__":
    for resource in RESOURCES:
        Path(sys.argv[1], f"{resource.name}.yaml").write_text(text(resource), encoding="utf-8")
