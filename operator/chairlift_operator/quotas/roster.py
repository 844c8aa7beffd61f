"""A pool's tenants: whose limits and keys are in force, and what is said to each quota. Pure.

Of several quotas for one tenant the oldest counts, and a key that two tenants name is that of the
older quota: a newcomer takes nothing from anybody.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from chairlift_operator.decisions import Condition, Truth
from chairlift_operator.quota_spec import TenantQuotaSpec
from chairlift_operator.quotas.key_ring import KEYS_MISSING, KeyRing, TenantKeys
from chairlift_operator.quotas.key_secrets import SecretKeys
from chairlift_protocol.quota import DEFAULT_TENANT, Limits, default_holder, holder_of
from chairlift_protocol.wire import RequestClass

ACCEPTED: Final = "Accepted"


@dataclass(frozen=True, slots=True)
class Claim:
    """A `TenantQuota` as it is in the cluster. created: sorts by age. spec: None where it cannot be
    followed, and trouble says why. limits: as Redis shall hold them, by holder."""

    name: str
    created: str
    spec: TenantQuotaSpec | None
    trouble: str = ""
    limits: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits", _limits(self.spec) if self.spec is not None else {})


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one quota. tenant: whose accounts tell what it uses; None where it is not in force."""

    accepted: Condition
    keys_missing: Condition
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Roster:
    """limits: as Redis shall hold them, by holder. keys: whose each is. weights: by tenant, of
    those whose weight is not 1."""

    limits: Mapping[str, str]
    keys: TenantKeys
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)

    def holders(self, quotas: Iterable[str]) -> tuple[str, ...]:
        """The accounts that tell what the tenants of these quotas use."""
        told = (self.verdicts[name].tenant for name in quotas)
        known = {tenant for tenant in told if tenant is not None and tenant != DEFAULT_TENANT}
        return tuple(holder_of(tenant, c) for tenant in sorted(known) for c in RequestClass)


def roster_of(claims: Sequence[Claim], secrets: Mapping[str, SecretKeys | None]) -> Roster:
    """secrets: by name; None where the API server could not be asked yet."""
    limits = {default_holder(c): Limits().to_json() for c in RequestClass}
    keys = KeyRing()
    first: dict[str, str] = {}
    verdicts, weights = {}, {}
    for claim in sorted(claims, key=lambda claim: (claim.created, claim.name)):
        spec = claim.spec
        if spec is None:
            verdicts[claim.name] = _refused("Refused", claim.trouble)
            continue
        holder = first.setdefault(spec.tenant, claim.name)
        if holder != claim.name:
            told = (
                f"TenantQuota {holder} is older and has tenant {spec.tenant} of this pool: merge "
                "the two, or name another tenant"
            )
            verdicts[claim.name] = _refused("TenantTaken", told)
            continue
        limits |= claim.limits
        if spec.weight != 1.0:
            weights[spec.tenant] = spec.weight
        told = f"Its limits hold for tenant {spec.tenant}."
        accepted = Condition(ACCEPTED, Truth.TRUE, "Followed", told)
        verdicts[claim.name] = Verdict(accepted, keys.add(spec, secrets), spec.tenant)
    return Roster(limits, TenantKeys(keys.owners, frozenset(keys.in_doubt)), verdicts, weights)


def all_refused(claims: Sequence[Claim], reason: str, message: str) -> Mapping[str, Verdict]:
    """Quotas of a pool that has none in force; one that is wrong in itself is told that first."""
    return {
        claim.name: _refused("Refused", claim.trouble)
        if claim.spec is None
        else _refused(reason, message)
        for claim in claims
    }


def _limits(spec: TenantQuotaSpec) -> dict[str, str]:
    own = ((c, spec.of(c)) for c in RequestClass)
    # One text for all who have the same limits.
    return {
        holder_of(spec.tenant, c): sys.intern(given.limits().to_json())
        for c, given in own
        if given is not None
    }


def _refused(reason: str, message: str) -> Verdict:
    accepted = Condition(ACCEPTED, Truth.FALSE, reason, f"{message.rstrip('.')}.")
    told = "Its keys are not looked at before it is accepted."
    return Verdict(accepted, Condition(KEYS_MISSING, Truth.UNKNOWN, "NotAccepted", told))
