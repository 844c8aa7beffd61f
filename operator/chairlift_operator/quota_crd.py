"""The CustomResourceDefinition of `TenantQuota`: sentences, rules and columns. Part of `crd`."""

from __future__ import annotations

from typing import Final

from chairlift_operator.api_group import QUOTA_KIND, QUOTA_PLURAL
from chairlift_operator.crd_form import CONDITIONS, Column, Resource
from chairlift_operator.quota_spec import MAX_KEY_SOURCES, TenantQuotaSpec
from chairlift_operator.quota_status_model import TenantQuotaStatus
from chairlift_operator.structural_schema import Annotations, Json, Rule
from chairlift_protocol.metrics import GATEWAY_TENANT_REFUSED


def _limits(path: str, whose: str) -> dict[str, str]:
    return {
        path: f"Limits of {whose} requests, over all gateways of the pool. Left out: those of the "
        "quota of tenant *, and no limits without one.",
        f"{path}.tokensPerMinute": "Tokens of prompts and answers; left out: no limit; 0: none.",
        f"{path}.requestsPerMinute": "Requests; left out: no limit; 0: none.",
        f"{path}.concurrency": "Requests at the same time; left out: no limit; 0: none.",
        f"{path}.burst": "How much of tokens and requests may come at once, as time of their "
        "rates: 1ms to 10m.",
        f"{path}.whenIdle": "Refuse: tokensPerMinute always holds. Borrow: tokens are refused only "
        "while the pool has no idle capacity; what is owed for them never exceeds one burst.",
    }


# What gateways refuse by themselves never reaches Redis, from which the operator knows.
_BY_REDIS: Final = "by Redis in the last minute, not those by gateways while they cannot reach it"


def _use(path: str, whose: str) -> dict[str, str]:
    return {
        path: f"What {whose} requests use.",
        f"{path}.used": "Tokens charged in the last minute, or Unknown.",
        f"{path}.refused": f"Requests refused {_BY_REDIS}, or Unknown.",
        f"{path}.running": "Requests that are admitted and have not ended, those that still wait "
        "for a slot among them, or Unknown.",
    }


PLACES: Final = {
    "": "A tenant of an InferencePool: its API keys, and what it may use.",
    "apiVersion": "chairlift.dev/v1alpha1.",
    "kind": "TenantQuota.",
}
DESCRIPTIONS: Final = {
    "spec": "What the tenant may use. Changes hold within seconds, without a restart.",
    "spec.poolRef": "The pool, in the namespace of this object; it needs spec.quotas.",
    "spec.poolRef.name": "Its name.",
    "spec.tenant": "The tenant, as quotas, fairness and metrics know it. anonymous: whoever gives "
    "no key, where that is served. '*': everybody without a quota of their own, each alone.",
    "spec.keys": "Secrets with the tenant's API keys; two of them while keys are exchanged. Left "
    "out for tenants that a trusted header names.",
    "spec.keys[]": "One Secret; each of its values is a key of at least 24 characters.",
    "spec.keys[].secret": "Its name, in this namespace; its type must be chairlift.dev/api-keys.",
    "spec.keys[].class": "Class of the requests that carry these keys: interactive or batch. It "
    "is no restriction: any key's requests under /batch/v1 are batch. To keep a tenant out of a "
    "class, give that class concurrency 0.",
    "spec.weight": "Its share of the engines' work while others wait too, against their weights: "
    "with 2 it is served twice as much as a tenant with 1.",
    **_limits("spec.interactive", "interactive"),
    **_limits("spec.batch", "batch"),
    "status": "How the tenant fares, written by the operator.",
    "status.observedGeneration": "The spec's generation that this status is about.",
    "status.ready": "True when limits and keys are in force, False, or Unknown.",
    "status.limited": f"True when requests were refused {_BY_REDIS}; False, or Unknown.",
    "status.used": "Tokens charged in the last minute, of both classes, or Unknown.",
    "status.refused": f"Requests refused {_BY_REDIS}, of both classes, or Unknown. The metric "
    f"{GATEWAY_TENANT_REFUSED} counts all.",
    "status.slotShare": "The tenant's requests of both classes that are admitted and have not "
    "ended, those that still wait for a slot among them, in percent of the slots of all replicas "
    "that serve; at most 100 %, or Unknown.",
    **_use("status.interactive", "interactive"),
    **_use("status.batch", "batch"),
    "status.conditions": "Accepted, KeysMissing, RedisReachable, Limited, RatesLowered, Ready; "
    "each message says what to check.",
    "status.conditions[]": "One statement on the quota.",
    "status.conditions[].type": "What it is about.",
    "status.conditions[].status": "True, False or Unknown.",
    "status.conditions[].reason": "Why, in one word.",
    "status.conditions[].message": "Why, in a sentence, and what to check.",
    "status.conditions[].lastTransitionTime": "Since when it says so.",
    "status.conditions[].observedGeneration": "The spec's generation that it is about.",
}
_CLASS_RULES: Final = (
    Rule("duration(self.burst) <= duration('10m')", "burst is above 10m: lower it"),
    Rule(
        "self.whenIdle != 'Borrow' || has(self.tokensPerMinute)",
        "whenIdle: Borrow lends tokens, and tokensPerMinute does not limit them: set "
        "tokensPerMinute, or remove whenIdle",
    ),
)
RULES: Final = {
    "spec": (
        Rule(
            "!has(self.keys) || size(self.keys) == 0 || !(self.tenant in ['*', 'anonymous'])",
            "tenants * and anonymous stand for requests without a key: remove keys, or name a "
            "tenant",
        ),
        Rule(
            "self.tenant != '*' || self.weight == 1.0",
            "tenant * stands for many, who have weight 1: remove weight",
        ),
    ),
    "spec.interactive": _CLASS_RULES,
    "spec.batch": _CLASS_RULES,
}
EXTRA: Final[dict[str, Json]] = {
    "spec.keys": {"maxItems": MAX_KEY_SOURCES, "x-kubernetes-list-type": "atomic"},
    **CONDITIONS,
}
QUOTAS: Final = Resource(
    kind=QUOTA_KIND,
    plural=QUOTA_PLURAL,
    short_name="tq",
    spec=TenantQuotaSpec,
    status=TenantQuotaStatus,
    notes=Annotations(DESCRIPTIONS, RULES, EXTRA),
    places=PLACES,
    # A tenant at a glance: is its quota in force, what does it use, was it refused.
    columns=(
        Column("Pool", "string", ".spec.poolRef.name"),
        Column("Tenant", "string", ".spec.tenant"),
        Column("Ready", "string", ".status.ready"),
        Column("Used", "string", ".status.used"),
        Column("Refused", "string", ".status.refused"),
        Column("Slots", "string", ".status.slotShare"),
        Column("Age", "date", ".metadata.creationTimestamp"),
    ),
    name_schema={"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
    sources="{quota_*,crd_form}.py",
)
